"""Records what Python containers below an object hold, and restores it.

Covers dicts, lists, sets, deques and byte arrays, the attributes of dataclasses and ``SimpleNamespace``, and of classes
derived from those containers, tuples of these, and by value the arrays and generators of ``value_copy``. Attributes may
be in slots. Entries are recorded by identity: a number that was counted up is another object. Does not cover the values
of tensors, nor objects of other classes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from autobatch.undo.slots import Slots, has_slots, own_attributes
from autobatch.undo.value_copy import ValueCopy, is_copied_by_value, is_fixed

__all__ = [
    "VALUES_OF",
    "Contents",
    "Found",
    "Watch",
    "are_same",
    "children_of",
    "find_contents",
    "put_entries_back",
    "record_contents",
]

_PLAIN, _CONTAINER, _OWN_CONTAINER, _TUPLE, _FIELDS, _VALUE, _TENSOR, _MODULE, _OPAQUE = range(9)
_CONTAINERS = (_CONTAINER, _OWN_CONTAINER)

_HOLD_NOTHING = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type(...), frozenset, range, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(FunctionType, BuiltinFunctionType, MethodType, partial),
    )
)
"""The types of most attributes. A function may hold a tensor, but is rarely made anew in each step."""

VALUES_OF = methodcaller("values")
"""Of a dict, in C."""

_MOST_ENTRIES = 1000
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
        """Restore all of them. Can be done any number of times."""
        for container in self.empty:
            if container:
                container.clear()
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
                found.may_hold_more |= kind in _CONTAINERS and len(value) > _MOST_ENTRIES
                content = record_contents(value)
                found.contents.extend([] if content is None else [content])
                waiting += children_of(value)
    return found


def record_contents(value: Any) -> Contents | None:
    """Record what a container, an array or a generator holds; ``None`` for a tuple, which cannot change, and others."""
    kind = _KINDS[type(value)]
    if kind == _VALUE:
        return None if is_fixed(value) else ValueCopy(value)
    if kind == _CONTAINER:
        return _Entries(value)
    if kind == _OWN_CONTAINER:
        return _Parts([_Entries(value), *_record_attributes(value)])  # in this order: a class may count what is set
    if kind == _FIELDS:
        attributes = _record_attributes(value)
        return attributes[0] if len(attributes) == 1 else _Parts(attributes)
    return None


def _record_attributes(value: Any) -> list[Contents]:
    slots: list[Contents] = [Slots(value)] if has_slots(type(value)) else []
    return [*slots, _Entries(vars(value))] if type(value).__dictoffset__ else slots


def children_of(value: Any) -> list[Any]:
    """The entries of a container, its keys too, or of a tuple, or the fields of a dataclass."""
    kind = _KINDS[type(value)]
    attributes = own_attributes(value) if kind in (_FIELDS, _OWN_CONTAINER) else []
    if kind in _CONTAINERS and len(value) > _MOST_ENTRIES:
        return attributes
    if isinstance(value, dict):
        return [*attributes, *value.keys(), *value.values()]
    return [*attributes, *value] if kind in (*_CONTAINERS, _TUPLE) else attributes


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


class Watch:
    """Whether many objects are of the same class, and their attributes, and what lies below, still what they were.

    A model has some thousand entries, and this is asked in every step: all are compared by functions in C.
    """

    def __init__(self, owners: Sequence[Any], found: Iterable[Found] = ()) -> None:
        """Record what they hold now.

        Args:
            owners: Objects with attributes, such as modules.
            found: What is below them.
        """
        self._owners, self._classes = owners, [*map(type, owners)]
        self._dicts: list[dict[Any, Any]] = [owner.__dict__ for owner in owners]
        self._names = [*chain.from_iterable(self._dicts)]
        self._rows: list[Any] = []
        self._empty: list[Any] = []
        self._others: list[Contents] = []
        for below in found:
            self._empty += below.empty
            for content in below.contents:
                self._add(content)
        self._lengths = [*map(len, self._dicts), *map(len, self._rows)]
        self._held = [*chain.from_iterable(map(VALUES_OF, self._dicts)), *chain.from_iterable(self._rows)]
        self._keys = [*chain.from_iterable(self._dicts[len(owners) :])]

    def _add(self, content: Contents) -> None:
        if not isinstance(content, _Entries):
            self._others.append(content)
        elif isinstance(content.container, dict):
            self._dicts.append(content.container)
        else:
            self._rows.append(content.container)

    def is_current(self) -> bool:
        """Whether they do; values of tensors are not compared."""
        dicts, rows, owned = self._dicts, self._rows, len(self._owners)
        return (
            not any(self._empty)
            and all(map(is_, map(type, self._owners), self._classes))
            and [*map(len, dicts), *map(len, rows)] == self._lengths
            and all(map(is_, chain(chain.from_iterable(map(VALUES_OF, dicts)), *rows), self._held))
            and [*chain.from_iterable(dicts[:owned])] == self._names  # names are strings, which compare in no time
            and all(map(is_, chain.from_iterable(dicts[owned:]), self._keys))
            and (not self._others or all(content.is_current() for content in self._others))
        )


class _Entries:
    """The entries of a container, by identity. One that has not changed is not written into."""

    __slots__ = ("_keys", "_values", "container")

    def __init__(self, container: Any) -> None:
        self.container = container
        self._keys, self._values = _entries_of(container)

    def is_current(self) -> bool:
        keys, values = _entries_of(self.container)
        return are_same(keys, self._keys) and are_same(values, self._values)

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

_STANDARD = frozenset((dict, list, set, deque, bytearray, Counter, OrderedDict, defaultdict))
"""Of which hardly one has attributes: a model has thousands."""


def _kind_of(found: type) -> int:
    has_attributes = bool(found.__dictoffset__ or has_slots(found))
    for base, kind in _KINDS_OF_BASES:
        if issubclass(found, base):
            is_own = kind == _CONTAINER and has_attributes and found not in _STANDARD
            return _OWN_CONTAINER if is_own else kind
    if is_copied_by_value(found):
        return _VALUE
    if found in _HOLD_NOTHING or issubclass(found, (type, Enum)):
        return _PLAIN
    has_fields = dataclasses.is_dataclass(found) or issubclass(found, SimpleNamespace)
    return _FIELDS if has_fields and has_attributes else _OPAQUE
