"""Checks objects of the user's or of another library by the methods that are called on them.

Covers optimizers, schedulers and scalers, which need not derive from torch's classes. Does not cover what their methods
do.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["is_instance_with", "takes_none"]


def is_instance_with(value: Any, *methods: str) -> bool:
    """Whether it is an instance with these methods: a class has them too, and cannot be called like one."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def takes_none(value: Any, method: str) -> bool:
    """Whether a method can be called without an argument, as its class declares it; ``True`` where that is not known.

    A scheduler of torch replaces the ``step`` of its optimizer by a function that shows one argument too many
    (``torch/optim/lr_scheduler.py``, ``patch_track_step_called``), so the instance itself is not asked.
    """
    try:
        signature = inspect.signature(getattr(type(value), method))
    except (AttributeError, TypeError, ValueError):
        return True
    try:
        signature.bind(value)
    except TypeError:
        return False
    return True
