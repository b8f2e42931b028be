"""Records what containers hold, and the values of NumPy arrays and random generators, and restores them.

Containers are dicts, lists, sets, deques and byte arrays, with classes derived from them, dataclasses and
``SimpleNamespace``. Their entries are recorded by identity. Not restored: slots, and attributes of classes derived from
containers.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn


class Kind(Enum):
    """Way in which objects of a type are recorded."""

    PLAIN = 0
    CONTAINER = 1
    TUPLE = 2
    FIELDS = 3
    VALUE = 4
    TENSOR = 5
    MODULE = 6


_HOLD_NOTHING = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type(...), frozenset, range, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(FunctionType, BuiltinFunctionType, MethodType, partial),
    )
)
"""Types of most attributes. A function may hold a tensor, but steps rarely make functions."""

MOST_ENTRIES = 1000
"""Entries of the largest container whose entries are looked into. A vocabulary or a replay buffer is larger: with
20,000 tensors that took 84 ms a step."""

_MOST_BYTES = 16 * 1024**2
"""Bytes of the largest array that is copied."""


class Entries:
    """The entries of one container, by identity."""

    __slots__ = ("_container", "_keys", "_values")

    def __init__(self, container: Any) -> None:
        """Record them."""
        self._container = container
        self._keys, self._values = _entries_of(container)

    def is_current(self) -> bool:
        """Return whether the container still holds the same objects, in the same order."""
        keys, values = _entries_of(self._container)
        return is_same(keys, self._keys) and is_same(values, self._values)

    def put_back(self) -> None:
        """Restore them. A container that has not changed is not written into."""
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


class Value:
    """The value of one array, or the state of one random generator."""

    __slots__ = ("_object", "_state")

    def __init__(self, value: Any) -> None:
        """Copy it."""
        self._object, self._state = value, _read_value(value)

    def is_current(self) -> bool:
        """Return whether the object has the same value, bit for bit."""
        found, expected = _read_value(self._object), self._state
        if isinstance(expected, torch.Tensor):
            return torch.equal(found, expected)
        if hasattr(expected, "tobytes"):
            return bool(found.shape == expected.shape and found.tobytes() == expected.tobytes())
        return pickle.dumps(found) == pickle.dumps(expected)

    def put_back(self) -> None:
        """Restore the value."""
        value, state = self._object, self._state
        if isinstance(value, random.Random):
            value.setstate(state)
        elif hasattr(value, "bit_generator"):
            value.bit_generator.state = state
        elif hasattr(value, "set_state"):
            value.set_state(state)
        else:
            value[...] = state


Contents = Entries | Value
"""What one object held at one moment. ``put_back`` can be called any number of times."""


@dataclasses.dataclass
class Found:
    """The objects below some others.

    Attributes:
        contents: Content of each container, array and generator.
        tensors: The tensors in attributes and containers, each once.
        modules: The modules that were reached, each once.
    """

    contents: list[Contents]
    tensors: list[torch.Tensor]
    modules: list[nn.Module]

    def put_back(self) -> None:
        """Restore all of them. Can be done any number of times."""
        for content in self.contents:
            content.put_back()


def find_contents(roots: Iterable[Any], seen: set[int] | None = None, *, whole: bool = False) -> Found:
    """Record everything below some objects.

    Args:
        roots: Objects to begin with, such as the values of ``vars(module)``.
        seen: Ids of objects to skip. Ids of objects that are found are added.
        whole: Whether containers and arrays of any size are recorded, as of objects that the user has named.

    Returns:
        Contents, tensors and modules. The walk ends at modules.
    """
    seen = set() if seen is None else seen
    found = Found([], [], [])
    waiting = [*roots]
    for value in waiting:  # grows while it is read
        kind = KINDS[type(value)]
        if kind is Kind.PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is Kind.TENSOR:
            found.tensors.append(value)
        elif kind is Kind.MODULE:
            found.modules.append(value)
        else:
            content = record_contents(value, whole=whole)
            found.contents += [] if content is None else [content]
            waiting += children_of(value, whole=whole)
    return found


def record_contents(value: Any, *, whole: bool = False) -> Contents | None:
    """Record what a container, an array or a generator holds. Return ``None`` for objects that cannot change."""
    kind = KINDS[type(value)]
    if kind is Kind.VALUE:
        return None if _is_fixed(value, whole=whole) else Value(value)
    if kind is Kind.FIELDS:
        return Entries(vars(value))
    return Entries(value) if kind is Kind.CONTAINER else None


def children_of(value: Any, *, whole: bool = False) -> list[Any]:
    """Return the entries of a container or a tuple, with its keys, or the fields of a dataclass."""
    kind = KINDS[type(value)]
    if kind is Kind.FIELDS:
        return [*vars(value).values()]
    if kind is Kind.TUPLE or (kind is Kind.CONTAINER and (whole or len(value) <= MOST_ENTRIES)):
        return [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
    return []


def is_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two sequences hold the very same objects in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _entries_of(container: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(container, dict):
        return list(container.keys()), list(container.values())
    return [], list(container)


def _read_value(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state(legacy=False) if hasattr(value, "get_state") else value.copy()


def _is_fixed(value: Any, *, whole: bool) -> bool:
    """Return whether an array cannot be written into, is mapped from a file, or is too large to copy."""
    flags = getattr(value, "flags", None)
    if flags is None:
        return False
    is_large = value.nbytes > _MOST_BYTES and not whole
    return not flags.writeable or is_large or isinstance(value, sys.modules["numpy"].memmap)


class _Kinds(dict[type, Kind]):
    """The kind of each type, decided once a type."""

    def __missing__(self, found: type) -> Kind:
        self[found] = kind = _kind_of(found)
        return kind


KINDS = _Kinds()

_KINDS_OF_BASES = (
    (torch.Tensor, Kind.TENSOR),
    (nn.Module, Kind.MODULE),
    ((dict, list, set, deque, bytearray), Kind.CONTAINER),
    (tuple, Kind.TUPLE),
)


def _kind_of(found: type) -> Kind:
    for base, kind in _KINDS_OF_BASES:
        if issubclass(found, base):
            return kind
    if is_copied_by_value(found):
        return Kind.VALUE
    if found in _HOLD_NOTHING or issubclass(found, (type, Enum)):
        return Kind.PLAIN
    has_fields = dataclasses.is_dataclass(found) or issubclass(found, SimpleNamespace)
    return Kind.FIELDS if has_fields and found.__dictoffset__ else Kind.PLAIN


def is_copied_by_value(found: type) -> bool:
    """Return whether objects of this type are arrays or random generators."""
    if issubclass(found, torch.Generator | random.Random):
        return not issubclass(found, random.SystemRandom)  # the operating system draws: there is no state
    numpy = sys.modules.get("numpy")  # a program that never imported it has no arrays
    if numpy is None:
        return False
    kinds = [numpy.ndarray]
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        kinds += [generators.Generator, generators.RandomState]
    return issubclass(found, tuple(kinds))
