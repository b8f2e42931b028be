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
from collections import OrderedDict, deque
from collections.abc import ItemsView, Iterable
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["plain", "container", "tuple", "fields", "value", "tensor", "module"]
"""Way in which objects of a type are recorded; those of a plain type hold nothing that can change."""

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


class Contents:
    """Record of what containers held at one moment, with copies of arrays and generators.

    Attributes:
        tensors: The tensors that were reached, each once.
        modules: The modules that were reached, each once. They are not looked into.
    """

    def __init__(self, roots: Iterable[Any] = (), *, whole: bool = False) -> None:
        """Record everything below these objects; ``whole``: in containers and arrays of any size, too."""
        self.tensors: list[torch.Tensor] = []
        self.modules: list[nn.Module] = []
        self._whole, self._seen = whole, set[int]()
        self._containers: list[Any] = []
        self._copies: list[Any] = []  # of each container, in a list of its own: pairs would be more for the collector
        self._values: list[tuple[Any, Any]] = []  # of arrays and generators, each with its state
        if roots:
            self.add([*roots])

    def add(self, waiting: list[Any]) -> list[nn.Module]:  # noqa: C901 - one loop: a call for each container takes 30 %
        """Record everything below more objects; return the modules that are reached for the first time."""
        seen, containers, copies, tensors = self._seen, self._containers, self._copies, self.tensors
        reached = len(self.modules)
        for value in waiting:  # grows while it is read
            kind = KINDS[type(value)]
            if kind == "plain" or id(value) in seen:
                continue
            seen.add(id(value))
            if kind == "tensor":
                tensors.append(value)
            elif kind == "container":
                copy = value.copy() if type(value) is dict else _copy_entries(value)
                containers.append(value)
                copies.append(copy)
                if self._whole or len(copy) <= MOST_ENTRIES:
                    for key in copy:  # of a list the entries
                        if type(key) is not str:
                            waiting.append(key)  # noqa: PERF401 - as above: each comprehension is a call
                    if type(copy) is dict:
                        waiting += copy.values()
            elif kind == "module":
                self.modules.append(value)
            elif kind == "value":
                self._values += _copy_value(value, whole=self._whole)
            elif kind == "fields":
                waiting.append(vars(value))
            else:  # the entries of a tuple may change, the tuple cannot
                waiting += value
        return self.modules[reached:]

    def add_tables(self, tables: Iterable[Any]) -> None:
        """Record tables of modules; the caller looks into them."""
        found = [table for table in tables if isinstance(table, dict)]
        self._containers += found
        self._copies += [table.copy() if type(table) is dict else _copy_entries(table) for table in found]
        self._seen.update(map(id, found))

    def is_empty(self) -> bool:
        """Return whether nothing was found that can change."""
        return not (self._copies or self._values or self.tensors)

    def restore(self) -> None:
        """Restore all of it, in place. Can be done any number of times."""
        for container, copy in zip(self._containers, self._copies, strict=True):
            put_entries(container, copy)
        for value, state in self._values:
            _write_value(value, state)

    def find_changed(self) -> set[int]:
        """Return the ids of containers, arrays and generators that changed."""
        pairs = zip(self._containers, self._copies, strict=True)
        changed = {id(container) for container, copy in pairs if not is_same(container, copy)}
        return changed | {id(value) for value, state in self._values if not _has_value(value, state)}

    def has(self, container: Any) -> bool:
        return id(container) in self._seen


def find_parts(value: Any) -> list[Any]:
    """Return what a container, a tuple or a dataclass holds."""
    kind = KINDS[type(value)]
    if kind == "fields":
        return [vars(value)]
    if kind in ("container", "tuple"):
        return [part for item in _items_of(value) for part in item] if isinstance(value, dict) else [*value]
    return []


def is_same(container: Any, copy: Any) -> bool:
    """Return whether a container holds the very objects that its copy holds, in the same order."""
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(_items_of(container), _items_of(copy), strict=True)
        return all(key is old_key and value is old for (key, value), (old_key, old) in pairs)
    return all(a is b for a, b in zip(container, copy, strict=True))


def _items_of(container: dict[Any, Any]) -> ItemsView[Any, Any]:
    """The entries as they lie there: a class of the user's, such as a cache, may count or drop what is read."""
    return OrderedDict.items(container) if isinstance(container, OrderedDict) else dict.items(container)


def _copy_entries(container: Any) -> Any:
    return dict(_items_of(container)) if isinstance(container, dict) else [*container]


def put_entries(container: Any, copy: Any) -> None:
    """Make a container hold what its copy holds. Write into it only if it has changed."""
    if is_same(container, copy):
        return
    container.clear()
    if isinstance(container, dict):
        # One by one: Counter.update() adds, transformers' ModelOutput refuses it, and dict's breaks an OrderedDict.
        for key, value in copy.items():
            container[key] = value
    elif isinstance(container, set):
        container.update(copy)
    else:
        container.extend(copy)


def _copy_value(value: Any, *, whole: bool) -> list[tuple[Any, Any]]:
    """An array or a generator with its state; nothing for an array that is read-only, mapped from a file, or large."""
    flags = getattr(value, "flags", None)
    if flags is not None:
        is_large = value.nbytes > _MOST_BYTES and not whole
        if not flags.writeable or is_large or isinstance(value, sys.modules["numpy"].memmap):
            return []
    return [(value, _read_value(value))]


def _read_value(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state(legacy=False) if hasattr(value, "get_state") else value.copy()


def _write_value(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value[...] = state


def _has_value(value: Any, state: Any) -> bool:
    """Return whether an array or a generator has this state, bit for bit."""
    found = _read_value(value)
    if isinstance(state, torch.Tensor):
        return torch.equal(found, state)
    if hasattr(state, "tobytes"):
        return bool(found.shape == state.shape and found.tobytes() == state.tobytes())
    return pickle.dumps(found) == pickle.dumps(state)


class _Kinds(dict[type, Kind]):
    """The kind of each type, decided once a type."""

    def __missing__(self, found: type) -> Kind:
        self[found] = kind = _kind_of(found)
        return kind


KINDS = _Kinds()

_KINDS_OF_BASES: tuple[tuple[Any, Kind], ...] = (
    (torch.Tensor, "tensor"),
    (nn.Module, "module"),
    ((dict, list, set, deque, bytearray), "container"),
    (tuple, "tuple"),
)


def _kind_of(found: type) -> Kind:
    for base, kind in _KINDS_OF_BASES:
        if issubclass(found, base):
            return kind
    if is_copied_by_value(found):
        return "value"
    if found in _HOLD_NOTHING or issubclass(found, (type, Enum)):
        return "plain"
    has_fields = dataclasses.is_dataclass(found) or issubclass(found, SimpleNamespace)
    return "fields" if has_fields and found.__dictoffset__ else "plain"


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
