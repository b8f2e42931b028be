"""Replaces an attribute of one object of another library inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give this one object another attribute inside the block; its class is not touched."""
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
