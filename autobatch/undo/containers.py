"""Records what Python containers below an object hold, and restores it.

Containers are dicts, lists, sets, deques and byte arrays, classes derived from them, dataclasses and
``SimpleNamespace``, with their slots, tuples of these, and arrays and generators, which are copied. Entries are
recorded by identity: a number that was counted up is another object. Values of tensors are recorded elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from autobatch.undo.slots import Slots, has_slots, own_attributes
from autobatch.undo.value_copy import ValueCopy, is_copied_by_value, is_fixed


class Kind(Enum):
    """What is done with an object of some type."""

    PLAIN = 0
    CONTAINER = 1
    OWN_CONTAINER = 2  # of a class with attributes
    TUPLE = 3
    FIELDS = 4
    VALUE = 5
    TENSOR = 6
    MODULE = 7


_CONTAINERS = (Kind.CONTAINER, Kind.OWN_CONTAINER)

_HOLD_NOTHING = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type(...), frozenset, range, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(FunctionType, BuiltinFunctionType, MethodType, partial),
    )
)
"""The types of most attributes. A function may hold a tensor, but is rarely made anew in each step."""

MOST_ENTRIES = 1000
"""Of a larger container, such as a vocabulary or a replay buffer, only the entries are recorded, not what they hold:
with 20,000 tensors that took 84 ms a step."""


class Contents(Protocol):
    """What one object held at one moment."""

    def is_current(self) -> bool:
        """Whether it still holds the same."""
        ...

    def put_back(self) -> None:
        """Restore it. Can be done any number of times."""
        ...


@dataclasses.dataclass
class Found:
    """What lies below some objects.

    Attributes:
        contents: What each container, array and generator held.
        tensors: The tensors in attributes and containers, each once.
        modules: The modules that were reached, each once.
    """

    contents: list[Contents]
    tensors: list[torch.Tensor]
    modules: list[nn.Module]

    def are_current(self) -> bool:
        """Whether all of them still hold the same; values of tensors are not compared."""
        return all(content.is_current() for content in self.contents)

    def put_back(self) -> None:
        """Restore all of them. Can be done any number of times."""
        for content in self.contents:
            content.put_back()


def find_contents(roots: Iterable[Any], seen: set[int] | None = None) -> Found:
    """Record everything below some objects.

    Args:
        roots: Where to begin, such as the values of ``vars(module)``.
        seen: The ids of objects that are skipped; those that are found are added.

    Returns:
        Contents, tensors and modules. Modules are not looked into: their attributes are roots of their own.
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
            content = record_contents(value)
            found.contents += [] if content is None else [content]
            waiting += children_of(value)
    return found


def find_containers(roots: Iterable[Any]) -> set[int]:
    """The ids of the containers below some objects; modules are not looked into."""
    seen: set[int] = set()
    waiting = [*roots]
    for value in waiting:  # grows while it is read
        if KINDS[type(value)] in (*_CONTAINERS, Kind.TUPLE, Kind.FIELDS) and id(value) not in seen:
            seen.add(id(value))
            waiting += children_of(value)
    return seen


def record_contents(value: Any) -> Contents | None:
    """Record what a container, an array or a generator holds; ``None`` for a tuple, which cannot change, and others."""
    kind = KINDS[type(value)]
    if kind is Kind.VALUE:
        return None if is_fixed(value) else ValueCopy(value)
    if kind is Kind.CONTAINER:
        return _Entries(value)
    if kind is Kind.OWN_CONTAINER:
        return _Parts([_Entries(value), *_record_attributes(value)])  # in this order: a class may count what is set
    if kind is Kind.FIELDS:
        attributes = _record_attributes(value)
        return attributes[0] if len(attributes) == 1 else _Parts(attributes)
    return None


def _record_attributes(value: Any) -> list[Contents]:
    slots: list[Contents] = [Slots(value)] if has_slots(type(value)) else []
    return [*slots, _Entries(vars(value))] if type(value).__dictoffset__ else slots


def children_of(value: Any) -> list[Any]:
    """Entries of a container or a tuple, keys too, or fields of a dataclass."""
    kind = KINDS[type(value)]
    attributes = own_attributes(value) if kind in (Kind.FIELDS, Kind.OWN_CONTAINER) else []
    if kind in _CONTAINERS and len(value) > MOST_ENTRIES:
        return attributes
    if isinstance(value, dict):
        return [*attributes, *value.keys(), *value.values()]
    return [*attributes, *value] if kind in (*_CONTAINERS, Kind.TUPLE) else attributes


def put_entries_back(held: dict[str, Any], entries: dict[str, Any]) -> None:
    """Make an object's ``__dict__`` hold these entries; one that has not changed is not written into."""
    if is_same([*held.keys()], [*entries.keys()]) and is_same([*held.values()], [*entries.values()]):
        return
    for name in [name for name in held if name not in entries]:
        del held[name]
    held.update(entries)


def is_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


class _Entries:
    """The entries of a container, by identity. One that has not changed is not written into."""

    __slots__ = ("_keys", "_values", "container")

    def __init__(self, container: Any) -> None:
        self.container = container
        self._keys, self._values = _entries_of(container)

    def is_current(self) -> bool:
        keys, values = _entries_of(self.container)
        return is_same(keys, self._keys) and is_same(values, self._values)

    def put_back(self) -> None:
        if self.is_current():
            return
        container = self.container
        container.clear()
        if isinstance(container, dict):
            # One by one: transformers' ModelOutput refuses update(), and dict.update() breaks an OrderedDict.
            for key, value in zip(self._keys, self._values, strict=True):
                container[key] = value
        elif isinstance(container, set):
            container.update(self._values)
        else:
            container.extend(self._values)


class _Parts:
    """Several contents of one object."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Contents]) -> None:
        self._parts = parts

    def is_current(self) -> bool:
        return all(part.is_current() for part in self._parts)

    def put_back(self) -> None:
        for part in self._parts:
            part.put_back()


def _entries_of(container: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(container, dict):
        return list(container.keys()), list(container.values())
    return [], list(container)


_KINDS_OF_BASES = (
    (torch.Tensor, Kind.TENSOR),
    (nn.Module, Kind.MODULE),
    ((dict, list, set, deque, bytearray), Kind.CONTAINER),
    (tuple, Kind.TUPLE),
)

_STANDARD = frozenset((dict, list, set, deque, bytearray, Counter, OrderedDict, defaultdict))
"""Of which hardly one has attributes: a model has thousands."""


class _Kinds(dict[type, Kind]):
    """What is done with objects of each type, decided once a type."""

    def __missing__(self, found: type) -> Kind:
        self[found] = kind = _kind_of(found)
        return kind


KINDS = _Kinds()


def _kind_of(found: type) -> Kind:
    has_attributes = bool(found.__dictoffset__ or has_slots(found))
    for base, kind in _KINDS_OF_BASES:
        if issubclass(found, base):
            is_own = kind is Kind.CONTAINER and has_attributes and found not in _STANDARD
            return Kind.OWN_CONTAINER if is_own else kind
    if is_copied_by_value(found):
        return Kind.VALUE
    if found in _HOLD_NOTHING or issubclass(found, (type, Enum)):
        return Kind.PLAIN
    has_fields = dataclasses.is_dataclass(found) or issubclass(found, SimpleNamespace)
    return Kind.FIELDS if has_fields and has_attributes else Kind.PLAIN
