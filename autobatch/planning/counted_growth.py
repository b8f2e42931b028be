"""Decides which steps need not be counted, from what counted steps of the same kind and sizes took.

On a CPU, counting doubles the time of a small step. What a step takes nearly always follows from the sizes it is
given, so a few counted steps say what the next ones take, and one in ``COUNT_EVERY`` is counted again to see that they
still do. Where a step takes more than one of at least its sizes did, sizes do not decide alone, and more must agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import ge

__all__ = ["COUNT_EVERY", "CountedGrowth"]

COUNT_EVERY = 31
"""One step in so many is counted in any case. A prime, so that what a training does every second, tenth or sixteenth
step is met sooner or later: each 32nd step might never be one of them."""

_AGREEING = 3
_MOST_AGREEING = 4096
_TOLERANCE = 0.01
_MOST_ROWS = 8
_MOST_KINDS = 64


@dataclass(slots=True)
class _Row:
    """The most bytes that counted steps of at most these sizes took beyond those that were held before."""

    sizes: tuple[float, ...]
    growth: int
    held: int
    agreed: int = 0
    needed: int = _AGREEING
    uncounted: int = 0

    def disagree(self) -> None:
        self.agreed, self.needed = 0, min(2 * self.needed, _MOST_AGREEING)


class CountedGrowth:
    """What counted steps took, by their kind and sizes."""

    def __init__(self) -> None:
        """Nothing has been counted."""
        self._kinds: dict[Hashable, list[_Row]] = {}

    def covers(self, kind: Hashable, sizes: Sequence[float], held_bytes: int, limit_bytes: int) -> bool:
        """Whether a step can run uncounted now, within ``limit_bytes``; called once before each step.

        ``kind`` is what must be equal (the micro-batch size, train or eval mode...), ``sizes`` what takes more memory
        the larger each is. ``held_bytes`` lacks what uncounted steps made and others hold, so what was held before the
        last counted step is taken where that is more.
        """
        for row in self._kinds.get(kind, ()):
            fits = max(held_bytes, row.held) + row.growth <= limit_bytes
            if fits and row.agreed >= row.needed and _at_least(row.sizes, sizes):
                row.uncounted = (row.uncounted + 1) % COUNT_EVERY
                return row.uncounted != 0
        return False

    def add(
        self, kind: Hashable, sizes: Sequence[float], *, held_bytes: int, peak_bytes: int, left_bytes: int = 0
    ) -> None:
        """A step that began with ``held_bytes`` was counted, and left so much behind, gradients apart.

        Where that is much, its memory is not given back, as in the step that makes the optimizer's state: it says
        nothing of the steps that follow.
        """
        growth = peak_bytes - held_bytes
        is_lasting = left_bytes > _TOLERANCE * growth
        row = self._find(kind, sizes)
        if row is None:
            if not is_lasting:
                self._append(kind, _Row(tuple(sizes), growth, held_bytes))
        elif is_lasting:
            row.agreed = 0
        else:
            row.held, row.agreed = held_bytes, row.agreed + 1
            if growth > (1 + _TOLERANCE) * row.growth:
                row.disagree()
            row.growth = max(row.growth, growth)

    def add_shortage(self, kind: Hashable, sizes: Sequence[float]) -> None:
        """A step ran out of memory, counted or not: what was counted did not say so."""
        if row := self._find(kind, sizes):
            row.disagree()

    def _find(self, kind: Hashable, sizes: Sequence[float]) -> _Row | None:
        return next((row for row in self._kinds.get(kind, ()) if _at_least(row.sizes, sizes)), None)

    def _append(self, kind: Hashable, row: _Row) -> None:
        """Add the row of the largest step so far, which takes the place of those of smaller ones."""
        rows = self._kinds.pop(kind, [])
        row.needed = max([row.needed, *(other.needed for other in rows)])
        smaller = [other for other in rows if _at_least(row.sizes, other.sizes)]
        most = max((other.growth for other in smaller), default=0)
        if most > (1 + _TOLERANCE) * row.growth:
            row.disagree()
        row.growth = max(row.growth, most)
        larger = [other for other in rows if other not in smaller]
        self._kinds[kind] = [*larger[1 - _MOST_ROWS :], row]
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]


def _at_least(sizes: Sequence[float], others: Sequence[float]) -> bool:
    return all(map(ge, sizes, others))
