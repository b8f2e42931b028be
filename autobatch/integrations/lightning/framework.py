"""Finds the installed Lightning, which is published as ``lightning`` and as ``pytorch_lightning``.

Covers the base class of callbacks and classes of the trainer's own package. Nothing of Lightning is imported by name:
the two packages hold the same classes twice, and a Trainer takes only its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from autobatch.errors import InvalidArgument

__all__ = ["callback_bases", "closure_classes"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_bases() -> tuple[Any, ...]:
    """``Callback`` of each package that was imported before, or else of each that is installed.

    Raises:
        InvalidArgument: None is installed.
    """
    imported = [name for name in _PACKAGES if name in sys.modules]
    names = imported or [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    if not names:
        raise InvalidArgument(
            "autobatch.integrations.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            "installed: pip install lightning"
        )
    return tuple(importlib.import_module(name).Callback for name in names)


def closure_classes(loop: Any) -> tuple[Any, Any]:
    """``Closure`` and ``ClosureResult`` of the package that the loop is from."""
    module = next(sys.modules[base.__module__] for base in type(loop).__mro__ if "output_result_cls" in vars(base))
    return module.Closure, module.ClosureResult
