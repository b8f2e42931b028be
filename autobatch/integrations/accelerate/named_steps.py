"""Decides by its code whether a function trains: whether it, or code of the user's that it names, names a ``step``.

Covers functions that it names, and methods by that name of objects that it is given or names. No code is run. Does not
cover code of installed libraries, nor what is looked up by name at run time.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autobatch.step.reachable import attributes_of, is_installed, names_in, parts_of, walk

__all__ = ["trains"]


def trains(function: Callable[..., Any], given: Sequence[Any]) -> bool:
    """Whether it does.

    Args:
        function: The training function.
        given: What it is called with.
    """
    package, named = _package_of(function), set[str]()

    def lead(value: Any) -> Iterator[Any]:
        code = value.__func__ if isinstance(value, types.MethodType) else value
        if isinstance(code, types.FunctionType):
            if is_installed(code.__code__.co_filename) and _package_of(code) != package:
                return
            named.update(names_in(code.__code__))
        yield from parts_of(value, attributes_of)
        if not isinstance(value, type | types.FunctionType | types.MethodType):
            yield from _methods_named(type(value), named)

    called = [vars(kind)["__call__"] for kind in type(function).__mro__ if "__call__" in vars(kind)]
    return any("step" in named for _ in walk((function, *called, *given), lead))


def _methods_named(kind: type, named: set[str]) -> Iterator[types.FunctionType]:
    """Methods by names that were seen, and by the names in these."""
    own = [vars(base) for base in kind.__mro__ if not _is_builtin(base)]
    methods = {
        name: code for base in reversed(own) for name, code in base.items() if isinstance(code, types.FunctionType)
    }
    waiting = sorted(named & methods.keys())
    seen = set(waiting)
    while waiting:
        method = methods[waiting.pop()]
        yield method
        if not is_installed(method.__code__.co_filename):
            waiting += sorted(new := {*names_in(method.__code__)} & methods.keys() - seen)
            seen |= new


def _is_builtin(kind: type) -> bool:
    return kind.__module__ == "builtins"


def _package_of(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]
