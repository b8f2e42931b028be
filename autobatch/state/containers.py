"""Remembers what Python containers and generators below an object hold, and puts it back.

Covers dicts, lists, sets, deques and byte arrays, the attributes of dataclasses and ``SimpleNamespace``, tuples of
these, NumPy arrays (by value) and random number generators (torch's, Python's and NumPy's objects). Entries are
remembered by identity: a number that was counted up is another object. Does not cover the values of tensors, nor
objects of other classes, which are not looked into.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Contents", "Found", "are_same", "children_of", "find_contents", "put_entries_back", "remember"]

_PLAIN, _CONTAINER, _TUPLE, _FIELDS, _VALUE, _TENSOR, _MODULE, _OPAQUE = range(8)

_HOLD_NOTHING = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type(...), frozenset, range, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(FunctionType, BuiltinFunctionType, MethodType, partial),
    )
)
"""Types of which most attributes are. A function may hold a tensor as well, but is rarely made anew in each step."""

_MOST_ENTRIES = 1000
"""A larger container is remembered itself, but what its entries hold is not looked at: a vocabulary, a replay buffer.
With 20,000 tensors that took 84 ms a step."""

_MOST_BYTES = 16 * 1024**2
"""A larger array is not copied, and so not put back."""


class Contents(Protocol):
    """What one object held when it was looked at."""

    def is_current(self) -> bool:
        """Whether it still holds the same."""
        ...

    def put_back(self) -> None:
        """Let it hold the same again. Can be done any number of times."""
        ...


@dataclasses.dataclass
class Found:
    """What lies below some objects.

    Attributes:
        contents: What each container, array and generator held.
        empty: Containers that held nothing.
        tensors: The tensors in attributes and containers, each once.
        modules: The modules that were reached, each once.
        may_hold_more: Whether some object was not looked into that may hold tensors.
    """

    contents: list[Contents]
    empty: list[Any]
    tensors: list[torch.Tensor]
    modules: list[nn.Module]
    may_hold_more: bool = False

    def are_current(self) -> bool:
        """Whether all of them still hold the same; values of tensors are not compared."""
        return not any(self.empty) and all(content.is_current() for content in self.contents)

    def put_back(self) -> None:
        """Let all of them hold the same again. Can be done any number of times."""
        for container in self.empty:
            if container:
                container.clear()
        for content in self.contents:
            content.put_back()


def find_contents(roots: Iterable[Any], seen: set[int] | None = None) -> Found:
    """Look at everything below some objects once.

    Args:
        roots: What to begin with, such as the values of ``vars(module)``.
        seen: The ids of objects that are passed over; those that are found are added.

    Returns:
        Contents, tensors and modules. Modules are not looked into: their attributes are roots of their own.
    """
    seen = set() if seen is None else seen
    found = Found([], [], [], [])
    waiting = [*roots]
    while waiting:
        # By level, and by type first: a model has some thousand attributes, and nearly all of them are plain.
        level, waiting = [(kind, value) for value in waiting if (kind := _KINDS[type(value)])], []
        for kind, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if kind == _TENSOR:
                found.tensors.append(value)
            elif kind == _MODULE:
                found.modules.append(value)
            elif kind == _CONTAINER and not value:
                found.empty.append(value)  # most of a module's tables are: no entry is made for each
            elif kind == _OPAQUE:
                found.may_hold_more = True
            else:
                found.may_hold_more |= kind == _CONTAINER and len(value) > _MOST_ENTRIES
                content = remember(value)
                found.contents.extend([] if content is None else [content])
                waiting += children_of(value)
    return found


def remember(value: Any) -> Contents | None:
    """What a container, an array or a generator holds; ``None`` for a tuple, which cannot change, and anything else."""
    kind = _KINDS[type(value)]
    if kind == _VALUE:
        return None if _is_fixed(value) else _Value(value)
    if kind == _FIELDS:
        return _Entries(vars(value))
    return _Entries(value) if kind == _CONTAINER else None


def children_of(value: Any) -> list[Any]:
    """The entries of a container, its keys too, or of a tuple, or the fields of a dataclass."""
    kind = _KINDS[type(value)]
    if kind == _FIELDS:
        return list(vars(value).values())
    if kind == _CONTAINER and len(value) > _MOST_ENTRIES:
        return []
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if kind in (_CONTAINER, _TUPLE) else []


def put_entries_back(held: dict[str, Any], entries: dict[str, Any]) -> None:
    """Make an object's ``__dict__`` hold these entries again; one that has not changed is not touched."""
    if are_same([*held.keys()], [*entries.keys()]) and are_same([*held.values()], [*entries.values()]):
        return
    for name in [name for name in held if name not in entries]:
        del held[name]
    held.update(entries)


def are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


class _Entries:
    """What a container holds, by identity. One that has not changed is not touched: whoever watches it sees nothing."""

    __slots__ = ("_container", "_keys", "_values")

    def __init__(self, container: Any) -> None:
        self._container = container
        self._keys, self._values = _entries_of(container)

    def is_current(self) -> bool:
        keys, values = _entries_of(self._container)
        return are_same(keys, self._keys) and are_same(values, self._values)

    def put_back(self) -> None:
        if self.is_current():
            return
        container = self._container
        container.clear()
        if isinstance(container, dict):
            # One by one: transformers' ModelOutput refuses update(), and dict.update() breaks an OrderedDict.
            for key, value in zip(self._keys, self._values, strict=True):
                container[key] = value
        elif isinstance(container, set):
            container.update(self._values)
        else:
            container.extend(self._values)


class _Value:
    """The state of an array or a generator, by value."""

    __slots__ = ("_object", "_state")

    def __init__(self, value: Any) -> None:
        self._object, self._state = value, _read(value)

    def is_current(self) -> bool:
        try:
            return _equal(_read(self._object), self._state)
        except torch.OutOfMemoryError:  # not even a few kilobytes to compare: as if it had changed
            return False

    def put_back(self) -> None:
        _write(self._object, self._state)


def _entries_of(container: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(container, dict):
        return list(container.keys()), list(container.values())
    return [], list(container)


def _read(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state(legacy=False) if hasattr(value, "get_state") else value.copy()


def _write(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value[...] = state


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(_equal(found[key], expected[key]) for key in expected)
    if hasattr(expected, "tobytes"):
        # Bit for bit: what is not a number does not equal itself. Objects are compared as they are.
        return found.shape == expected.shape and (
            bool((found == expected).all()) if found.dtype.hasobject else found.tobytes() == expected.tobytes()
        )
    return bool(found == expected)


class _Kinds(dict[type, int]):
    """What kind of object each type makes, decided once a type."""

    def __missing__(self, found: type) -> int:
        self[found] = kind = _kind_of(found)
        return kind


_KINDS = _Kinds()


_KINDS_OF_BASES = (
    (torch.Tensor, _TENSOR),
    (nn.Module, _MODULE),
    ((dict, list, set, deque, bytearray), _CONTAINER),
    (tuple, _TUPLE),
)


def _kind_of(found: type) -> int:
    for base, kind in _KINDS_OF_BASES:
        if issubclass(found, base):
            return kind
    if issubclass(found, torch.Generator | random.Random) or _is_numpy_state(found):
        return _VALUE
    if found in _HOLD_NOTHING or issubclass(found, (type, Enum)):
        return _PLAIN
    has_fields = dataclasses.is_dataclass(found) or issubclass(found, SimpleNamespace)
    return _FIELDS if has_fields and found.__dictoffset__ else _OPAQUE  # one with slots has no dict to look into


def _is_fixed(value: Any) -> bool:
    """Whether it is an array that nobody can write into, that lies in a file, or that is too large to copy."""
    flags = getattr(value, "flags", None)
    if flags is None:
        return False
    return not flags.writeable or value.nbytes > _MOST_BYTES or isinstance(value, sys.modules["numpy"].memmap)


def _is_numpy_state(found: type) -> bool:
    numpy = sys.modules.get("numpy")  # a program that never imported it has no arrays
    if numpy is None:
        return False
    kinds = [numpy.ndarray]
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        kinds += [generators.Generator, generators.RandomState]
    return issubclass(found, tuple(kinds))
