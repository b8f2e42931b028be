"""Reads and restores attributes in ``__slots__`` of a class and its bases, which are in no ``__dict__``."""

from __future__ import annotations

from operator import is_
from types import MemberDescriptorType
from typing import Any

from autobatch._wrappers import own_table

__all__ = ["Slots", "has_slots", "own_attributes"]

_UNSET = object()
"""Stands for a slot to which nothing was assigned."""


def has_slots(found: type) -> bool:
    """Whether objects of this type have attributes in slots."""
    return bool(_SLOTS[found])


def own_attributes(value: Any) -> list[Any]:
    """The values of an object's own attributes, in slots or not."""
    return [*own_table(value).values()] + [one for one in _read(value) if one is not _UNSET]


class Slots:
    """The values of an object's slots, by identity."""

    __slots__ = ("_object", "_values")

    def __init__(self, value: Any) -> None:
        """Record them."""
        self._object, self._values = value, _read(value)

    def is_current(self) -> bool:
        """Whether they are the same objects still."""
        return all(map(is_, _read(self._object), self._values))

    def put_back(self) -> None:
        """Restore them by the slots themselves: a frozen dataclass refuses assignments."""
        for slot, now, earlier in zip(_SLOTS[type(self._object)], _read(self._object), self._values, strict=True):
            if now is earlier:
                continue
            if earlier is _UNSET:
                slot.__delete__(self._object)
            else:
                slot.__set__(self._object, earlier)


class _SlotTable(dict[type, tuple[Any, ...]]):
    """The descriptors of the slots that each type and its bases define, found once a type."""

    def __missing__(self, found: type) -> tuple[Any, ...]:
        defined = [vars(base) for base in found.__mro__ if "__slots__" in vars(base)]
        members = (member for attributes in defined for member in attributes.values())
        self[found] = slots = tuple(member for member in members if isinstance(member, MemberDescriptorType))
        return slots


_SLOTS = _SlotTable()


def _read(value: Any) -> list[Any]:
    """In the order of ``_SLOTS``."""
    return [_read_one(slot, value) for slot in _SLOTS[type(value)]]


def _read_one(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET
