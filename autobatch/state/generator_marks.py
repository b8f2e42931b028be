"""Reads the bytes of Python's and NumPy's global random generators, to see in a microsecond whether one was drawn from.

Covers the Mersenne twisters behind ``random`` and ``numpy.random``. Their public states take 9 and 33 us to read (2 CPU
cores), several times that in a training step, which has emptied the caches. The bytes are read where CPython
(``RandomObject`` in Modules/_randommodule.c) and NumPy (``mt19937_state``, at ``ctypes.state_address``) have them; that
they are there is checked against the public state once, and where they are not there is no mark. Nothing is written.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

__all__ = ["mark_numpy", "mark_python"]

_WORDS = 624
_BYTES = 4 * (_WORDS + 1)
_PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]

Mark = tuple[Any, ...]


def mark_python() -> Mark | None:
    """What differs once ``random`` was drawn from or seeded; ``None`` where its layout is unknown."""
    return (ctypes.string_at(_ADDRESS, _BYTES), _PYTHON.gauss_next) if _ADDRESS else None  # type: ignore[attr-defined]


def mark_numpy() -> Mark | None:
    """The same of ``numpy.random``; ``None`` also while it holds back the second number of a pair of normal ones."""
    numpy = sys.modules.get("numpy.random")
    address = None if numpy is None else _find_numpy(numpy)
    return None if address is None else (address, ctypes.string_at(address, _BYTES))


_known: dict[int, bool] = {}


def _find_numpy(numpy: Any) -> int | None:
    get_generator = getattr(numpy, "get_bit_generator", None)  # NumPy before 1.24 has none
    if get_generator is None:
        return None
    address: int = get_generator().ctypes.state_address
    if address not in _known:
        _known[address] = _holds_numpy(numpy, address)
    return address if _known[address] else None


def _holds_numpy(numpy: Any, address: int) -> bool:
    state = numpy.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return False
    *key, position = struct.unpack(f"{_WORDS}Ii", ctypes.string_at(address, _BYTES))
    return bool(key == state["state"]["key"].tolist() and position == state["state"]["pos"])


def _find_python() -> int:
    """Where the twister's bytes are; 0 where they are not as expected."""
    address = id(_PYTHON) + object.__basicsize__
    if sys.implementation.name != "cpython" or _PYTHON.__sizeof__() < object.__basicsize__ + _BYTES:
        return 0
    position, *words = struct.unpack(f"i{_WORDS}I", ctypes.string_at(address, _BYTES))
    return address if (*words, position) == _PYTHON.getstate()[1] else 0


_ADDRESS = _find_python()
