"""Reads a few bytes of Python's and NumPy's global random generators, to see at once whether one was drawn from.

Covers the Mersenne twisters behind ``random`` and ``numpy.random``: 624 words, and a position that each draw moves on;
after the last word all of them are made anew. So the position and seven words are enough. The public states take 9 and
33 us to read (2 CPU cores), several times that in a training step, which has emptied the caches. The bytes are read
where CPython (``RandomObject`` in Modules/_randommodule.c) and NumPy (``mt19937_state``, at ``ctypes.state_address``)
have them; this is checked once against the public state, and without agreement a generator gets no mark. Nothing is
written.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

__all__ = ["copy_python", "mark_numpy", "mark_python", "restore_python"]

_WORDS = 624
_BYTES = 4 * (_WORDS + 1)
_LAYOUT = f"i{_WORDS}I"
_HEADER = object.__basicsize__
_MARK = ctypes.c_char * 32  # the position, and the seven words beside it
_PYTHON: random.Random | None = getattr(random, "_inst", None)

Mark = tuple[Any, ...]


def mark_python() -> Mark | None:
    """What differs once ``random`` was drawn from or seeded.

    Returns:
        ``None`` where its layout is unknown, or where ``random.getstate`` is replaced or wrapped.
    """
    if _MEMORY is None or getattr(random.getstate, "__self__", None) is not _PYTHON:
        return None
    return _MEMORY.raw, _PYTHON.gauss_next  # type: ignore[union-attr]


def copy_python() -> tuple[Any, ...]:
    """The state of ``random`` by value: its bytes where the layout is known, 625 Python numbers elsewhere."""
    mark = mark_python()
    return random.getstate() if mark is None else (ctypes.string_at(id(_PYTHON) + _HEADER, _BYTES), mark[1])


def restore_python(state: tuple[Any, ...]) -> None:
    """Restore what ``copy_python`` returned."""
    if isinstance(state[0], bytes):
        position, *words = struct.unpack(_LAYOUT, state[0])
        state = (random.Random.VERSION, (*words, position), state[1])
    random.setstate(state)


def mark_numpy() -> Mark | None:
    """What differs once ``numpy.random`` was drawn from, seeded, or given another bit generator.

    Returns:
        ``None`` where its layout is unknown. The second number of a pair of normal ones, which NumPy may hold back, is
        not part of it.
    """
    numpy = sys.modules.get("numpy.random")
    get_generator = getattr(numpy, "get_bit_generator", None)  # NumPy before 1.24 has none
    if get_generator is None:
        return None
    generator = get_generator()
    if generator is not _latest[0]:  # held, so that no other one can come to lie at its address
        address = generator.ctypes.state_address
        _latest[:] = generator, _MARK.from_address(address + _BYTES - 32) if _holds_numpy(numpy, address) else None
    return None if _latest[1] is None else (generator, _latest[1].raw)


_latest: list[Any] = [None, None]
"""NumPy's bit generator, and the end of its bytes; ``None`` where they are not as expected."""


def _holds_numpy(numpy: Any, address: int) -> bool:
    state = numpy.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return False
    *key, position = struct.unpack(f"{_WORDS}Ii", ctypes.string_at(address, _BYTES))
    return bool(key == state["state"]["key"].tolist() and position == state["state"]["pos"])


def _find_python() -> Any:
    """The beginning of the twister's bytes; ``None`` where they are not as expected."""
    if sys.implementation.name != "cpython" or type(_PYTHON) is not random.Random:
        return None
    address = id(_PYTHON) + _HEADER
    if _PYTHON.__sizeof__() < _HEADER + _BYTES:
        return None
    position, *words = struct.unpack(_LAYOUT, ctypes.string_at(address, _BYTES))
    return _MARK.from_address(address) if (*words, position) == _PYTHON.getstate()[1] else None


_MEMORY = _find_python()
