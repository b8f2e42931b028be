"""Finds the objects that a step can reach: bound arguments, its closure, globals that it names, attributes of those.

Covers Python functions, methods, ``functools.partial``, callable objects, containers and instances, the nearest first;
and among these, modules and tensors that belong to neither the model nor its optimizer: a teacher, a memory bank, a
queue. No object is called and no property is read. Does not cover what C code or objects with ``__slots__`` hold, class
attributes, modules of Python, nor what is looked up by name at run time.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["attributes_of", "find_modules", "find_outside", "names_in", "parts_of", "walk"]

_MOST_REACHED = 2_000
"""Objects that are looked at from one step; a dataset in a list may be among them."""

_LIBRARIES = ("torch", "functools", "contextlib")  # whose globals lead to nothing of the user's


def walk(root: Any, parts: Callable[[Any], Iterator[Any]], most: int = _MOST_REACHED) -> Iterator[Any]:
    """Every object that can be reached, once each, the nearest first, ``root`` included.

    ``parts`` gives what an object leads to; after ``most`` objects it ends.
    """
    waiting, seen = deque([root]), {id(root): root}
    while waiting:
        value = waiting.popleft()
        yield value
        for part in parts(value):
            if id(part) not in seen and len(seen) < most:
                seen[id(part)] = part  # held, so that no other object gets its id
                waiting.append(part)


def parts_of(value: Any, attributes: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """What one object leads to directly; ``attributes`` chooses among those of an instance."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        yield from attributes(value)


def attributes_of(value: Any) -> Iterator[Any]:
    """Values of an instance's attributes, and the method of a callable one, which has globals."""
    yield from vars(value).values()
    call = vars(type(value)).get("__call__")
    if isinstance(call, types.FunctionType):
        yield call


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if str(function.__globals__.get("__name__")).partition(".")[0] in _LIBRARIES:
        return  # a decorator of theirs: the step is in its closure
    yield from (function.__globals__[name] for name in names_in(function.__code__) if name in function.__globals__)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Names that a function's code uses, with those of functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def find_outside(step: Callable[..., Any], model: nn.Module) -> list[nn.Module | torch.Tensor]:
    """Modules (the outermost) and tensors that a step reaches and that are no part of the model; the nearest first."""
    owned = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    reached = (value for value in walk(step, _lead_outside) if id(value) not in owned)
    return [value for value in reached if isinstance(value, nn.Module | torch.Tensor)]


def find_modules(function: Callable[..., Any]) -> list[nn.Module]:
    """Modules (the outermost) that a function is, or reaches; the nearest first."""
    return [value for value in walk(function, _lead_outside) if isinstance(value, nn.Module)]


def _lead_outside(value: Any) -> Iterator[Any]:
    # Optimizers hold thousands of tensors, and belong to somebody who steps them.
    is_end = isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer)
    return iter(()) if is_end else parts_of(value, attributes_of)
