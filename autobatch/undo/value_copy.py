"""Copies the values of NumPy arrays and of random generator objects (torch, Python, NumPy), and restores them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["ValueCopy", "is_copied_by_value", "is_fixed"]

_MOST_BYTES = 16 * 1024**2
"""A larger array is not copied, and so not put back."""


class ValueCopy:
    """The value of an array, or the state of a generator, at one moment."""

    __slots__ = ("_object", "_state")

    def __init__(self, value: Any) -> None:
        """Copy it."""
        self._object, self._state = value, _read(value)

    def is_current(self) -> bool:
        """Whether it has the same value still."""
        try:
            return _equal(_read(self._object), self._state)
        except torch.OutOfMemoryError:  # not even a few kilobytes to compare: as if it had changed
            return False

    def put_back(self) -> None:
        """Restore the value. Can be done any number of times."""
        _write(self._object, self._state)


def is_fixed(value: Any) -> bool:
    """Whether it is an array that cannot be written into, that is mapped from a file, or that is too large to copy."""
    flags = getattr(value, "flags", None)
    if flags is None:
        return False
    return not flags.writeable or value.nbytes > _MOST_BYTES or isinstance(value, sys.modules["numpy"].memmap)


def is_copied_by_value(found: type) -> bool:
    """Whether objects of this type are arrays or random generators."""
    if issubclass(found, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")  # a program that never imported it has no arrays
    if numpy is None:
        return False
    kinds = [numpy.ndarray]
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        kinds += [generators.Generator, generators.RandomState]
    return issubclass(found, tuple(kinds))


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
