"""Compares a later batch with its parts where the samples of the first one are all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autobatch.batch.samples import describe
from autobatch.batch.tree import leaves_of
from autobatch.integrations.lightning.outputs import is_equal
from autobatch.records import Verdict

__all__ = ["LaterCheck", "are_alike"]

_MOST_SAMPLES = 16


@dataclass
class LaterCheck:
    """Asks at batches 2, 4, 8 and so on, until the samples of one differ.

    Attributes:
        compare: Compares a batch with its parts.
        is_open: Whether no batch has been compared.
    """

    compare: Callable[[Any], Verdict]
    is_open: bool = False
    _batches: int = 1

    def ask(self, batch: Any) -> Verdict | None:
        """Return the verdict on this batch, ``None`` where it is not asked for."""
        self._batches += 1
        is_due = self._batches & (self._batches - 1) == 0
        if not self.is_open or not is_due or are_alike(batch):
            return None
        self.is_open = False
        return self.compare(batch)


def are_alike(batch: Any) -> bool:
    """Return whether all samples of a batch are the same: such a batch does not show whether splitting is exact."""
    layout = describe(batch)
    few = layout.spread(min(layout.count, _MOST_SAMPLES))
    first, *others = [[*leaves_of(few.take(range(index, index + 1)))] for index in range(few.count)]
    return bool(others) and all(all(map(is_equal, first, other)) for other in others)
