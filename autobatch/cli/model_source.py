"""Loads the model of a command from ``MODULE:FUNCTION``.

Covers finding the function, calling it, and the keys of what it returns; what the user's own code raises is not
changed. Does not cover what the values may be (``fit``, ``predict`` and ``verify`` check that).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autobatch.errors import InvalidArgument

__all__ = ["KNOWN", "add_source", "load", "take"]

KNOWN = (
    "model",
    "target_batch",
    "batch",
    "step",
    "optimizer",
    "weigh",
    "device",
    "budget",
    "headroom",
    "max_micro_batch",
    "objective",
    "accumulate_in_float32",
    "check",
    "reuse",
)
"""What a user's function may return."""


def add_source(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The one argument of a command that needs a model."""
    parser.add_argument(
        "source",
        nargs=nargs,
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a dict of what autobatch.fit takes, such as train:make",
    )


def load(source: str) -> dict[str, Any]:
    """What the named function returns.

    Args:
        source: ``package.module:function`` or ``path/to/file.py:function``; modules are looked for here first.

    Raises:
        InvalidArgument: No such module or function exists, or what it returns is no dict with a model.
    """
    name, _, function_name = source.rpartition(":")
    is_relative = name.startswith(".") and not name.endswith(".py")
    if not name or is_relative or not function_name.isidentifier():
        raise InvalidArgument(f"{source!r} is no MODULE:FUNCTION, such as train:make or train.py:make")
    arguments, sys.argv = sys.argv, [name]  # a script that reads its arguments on import must not be given ours
    try:
        function = getattr(_import(name, source), function_name, None)
        if not callable(function):
            raise InvalidArgument(f"{source!r}: {name} has no function {function_name}")
        found = _call(function, source)
    finally:
        sys.argv = arguments
    if not isinstance(found, Mapping) or "model" not in found:
        raise InvalidArgument(
            f"{source!r} returned {_describe(found)}: return a dict such as "
            f"{{'model': model, 'batch': batch, 'step': step, 'optimizer': optimizer}}"
        )
    return dict(found)


def take(found: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
    """Those of the values that a command uses; ``source`` is for the message.

    Raises:
        InvalidArgument: A key is none that any command knows.
    """
    unknown = sorted(str(key) for key in found.keys() - {*KNOWN})
    if unknown:
        raise InvalidArgument(f"{source!r} returned {', '.join(map(repr, unknown))}; known are {', '.join(names)}")
    return {name: found[name] for name in names if name in found}


def _import(name: str, source: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.endswith(".py"):
        return _import_file(Path(name), source)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # What the user's own module misses is the user's to see.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgument(f"{source!r}: no module {name} here ({here}) or installed") from None


def _import_file(path: Path, source: str) -> ModuleType:
    if not path.is_file():
        raise InvalidArgument(f"{source!r}: no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None  # noqa: S101 - narrows for mypy: the name ends in .py
    assert specification.loader is not None  # noqa: S101 - the same
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def _call(function: Callable[[], Any], source: str) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError:
        raise InvalidArgument(f"{source!r} takes arguments: name a function that can be called with none") from None
    except ValueError:  # a builtin without a signature
        pass
    return function()


def _describe(found: Any) -> str:
    return f"a dict without 'model' ({', '.join(map(str, found))})" if isinstance(found, Mapping) else repr(type(found))
