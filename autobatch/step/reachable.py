"""Finds the objects that a step can reach: bound arguments, its closure, globals that it names, attributes of those.

Among them are modules and tensors of neither the model nor its optimizer: a teacher, a memory bank, a queue. Installed
libraries are not searched. No object is called and no property is read.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autobatch._wrappers import own_attributes

_MOST_REACHED = 2_000  # most objects to look at from one step; a dataset in a list may be among them
MOST_OBJECTS = 10_000  # most objects to look at for modules alone, which copies none: some 20 ms
_AT_ONCE = 100  # entries of one object; further ones come after all others, since a dataset is longer than all else

_LIBRARIES = ("torch", "functools", "contextlib")  # whose globals lead to nothing of the user's

_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]

_PLAIN = frozenset((str, int, float, complex, bool, bytes, type(None)))  # they lead nowhere


def walk(
    root: Any,
    parts: Callable[[Any], Iterator[Any]],
    most: int = _MOST_REACHED,
    when_cut: Callable[[], object] | None = None,
) -> Iterator[Any]:
    """Yield every object that can be reached, once each, the nearest first, ``root`` included.

    Plain values (texts, numbers) are left out. The first parts of a long list come in their turn, the others after all
    other objects. ``when_cut`` is called if there are more than ``most``.
    """
    waiting, seen = deque([root]), {id(root): root}
    rest: deque[Iterator[Any]] = deque()
    while waiting or rest:
        if waiting:
            yield (value := waiting.popleft())
            leads: Iterator[Any] = filter(_leads_on, parts(value))
        else:
            leads = rest.popleft()
        taken = [*islice(leads, _AT_ONCE)]
        if len(taken) == _AT_ONCE:
            rest.append(leads)
        for part in taken:
            if id(part) in seen:
                continue
            if len(seen) >= most:
                if when_cut is not None:
                    when_cut()
                yield from waiting
                return
            seen[id(part)] = part  # held, so that no other object gets its id
            waiting.append(part)


def _leads_on(part: Any) -> bool:
    kind = type(part)
    if kind in _PLAIN:
        return False
    if kind in (list, tuple, dict):
        return not _PLAIN.issuperset(map(type, part.values() if kind is dict else part))
    return True


def parts_of(value: Any, attributes: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yield the direct parts of one object; ``attributes`` chooses among those of an instance."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from [*value.values()]  # a copy, as the walk may come back to it later
    elif isinstance(value, type):
        yield from _held_by_class(value)
    elif not isinstance(value, types.ModuleType):
        yield from attributes(value)


def attributes_of(value: Any) -> Iterator[Any]:
    """Yield the values of an instance's attributes, its ``__call__``, and its class if that is the user's own."""
    yield from own_attributes(value)
    call = vars(type(value)).get("__call__")
    if isinstance(call, types.FunctionType):
        yield call
    if not _is_library(type(value).__module__):
        yield type(value)


def _held_by_class(kind: type) -> Iterator[Any]:
    """Yield the values of a class's attributes, without methods, classes and descriptors."""
    for base in kind.__mro__:
        if not _is_library(base.__module__):
            for name, value in [*vars(base).items()]:
                is_code = isinstance(value, types.FunctionType | type) or hasattr(type(value), "__get__")
                if not is_code and not name.startswith("__"):
                    yield value


def _is_library(name: object) -> bool:
    """Return whether a Python module of this name is not the user's own; ``__module__`` may be any object."""
    return isinstance(name, str) and _is_known(name)


@cache
def _is_known(name: str) -> bool:
    package = name.partition(".")[0]
    if package in ("autobatch", *_LIBRARIES) or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and any(folder in Path(file).parents for folder in _INSTALLED)


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    held: list[Any] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            held.append(cell.cell_contents)
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from held
    if str(function.__globals__.get("__name__")).partition(".")[0] in _LIBRARIES:
        return  # a decorator of theirs: the step is in its closure
    tables = [function.__globals__, *(vars(value) for value in held if _is_users_module(value))]
    yield from _look_up(dict.fromkeys(names_in(function.__code__)), tables)


def _look_up(names: Iterable[str], tables: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the values of these names in the tables, and in the user's own Python modules found there."""
    waiting, seen = deque(tables), set[int]()
    while waiting:
        table = waiting.popleft()
        if id(table) in seen:
            continue
        seen.add(id(table))
        for value in [table[name] for name in names if name in table]:
            if _is_users_module(value):
                waiting.append(vars(value))
            else:
                yield value


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not _is_library(value.__name__)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, with those of functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def find_outside(step: Callable[..., Any], model: nn.Module) -> list[nn.Module | torch.Tensor]:
    """Return modules (the outermost) and tensors in the step's reach, outside the model; the nearest first."""
    owned = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    reached = (value for value in walk(step, _lead_outside) if id(value) not in owned)
    return [value for value in reached if issubclass(type(value), nn.Module | torch.Tensor)]


def find_modules(function: Callable[..., Any], when_cut: Callable[[], object]) -> list[nn.Module]:
    """Return the outermost modules that a function reaches; ``when_cut`` is called if it reaches too many objects."""

    def lead_on(value: Any) -> Iterator[Any]:
        return (part for part in _lead_outside(value) if not issubclass(type(part), torch.Tensor))

    return [one for one in walk(function, lead_on, MOST_OBJECTS, when_cut) if issubclass(type(one), nn.Module)]


def _lead_outside(value: Any) -> Iterator[Any]:
    # Optimizers hold thousands of tensors, and other code steps them.
    is_end = issubclass(type(value), nn.Module | torch.Tensor | torch.optim.Optimizer)
    return iter(()) if is_end else parts_of(value, attributes_of)
