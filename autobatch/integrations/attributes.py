"""Replaces an attribute of one object of a library for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While this lasts, the attribute of this one object has this value; what its class has is not touched."""
    attributes = vars(owner)
    earlier = attributes.get(name, _MISSING)
    attributes[name] = value
    try:
        yield
    finally:
        if earlier is _MISSING:
            del attributes[name]
        else:
            attributes[name] = earlier
