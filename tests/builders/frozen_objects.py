"""Remembers how many objects the garbage collector leaves out: Python counts them one by one each time it is asked.

The count took 30 to 60 ms of each ``fit`` and each trace, with the 0.7 million objects of a process of tests.
"""

from __future__ import annotations

import gc


class _Remembered:
    """How many there were when the first of them were frozen."""

    def __init__(self) -> None:
        self._freeze, self._unfreeze, self._count = gc.freeze, gc.unfreeze, gc.get_freeze_count
        self._found = 0

    def freeze(self) -> None:
        self._freeze()
        self._found = self._found or self._count()

    def unfreeze(self) -> None:
        self._unfreeze()
        self._found = 0

    def get_freeze_count(self) -> int:
        return self._found


def remember_count() -> None:
    remembered = _Remembered()
    gc.freeze, gc.unfreeze, gc.get_freeze_count = (
        remembered.freeze,
        remembered.unfreeze,
        remembered.get_freeze_count,
    )
