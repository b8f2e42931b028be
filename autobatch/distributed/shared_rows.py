"""Gathers representations over the ranks for a loss of all rows, and lets all ranks run such a step again, or none.

1. ``gather``: each rank sends its rows, through host memory.
2. Each rank runs the loss of all rows, and its own second pass.
3. ``confirm``: if one rank ran out of memory in 2, all run the step again: smaller micro-batches draw other numbers, so
   that rank's rows change.

A rank that runs out of memory before 1 runs again alone. A rank that raises sends its error to the ranks that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from autobatch.distributed.agreement import Agreement
from autobatch.distributed.ranks import Ranks

Rows = Sequence["torch.Tensor | None"]
"""One tensor for each representation, or ``None``."""


class SharedRows:
    """The representations of one step, on every rank.

    Attributes:
        size: Number of ranks.
        is_gathered: Whether the other ranks wait for ``confirm``.
    """

    def __init__(self, ranks: Ranks, agreement: Agreement) -> None:
        """Send nothing yet."""
        self.size, self.is_gathered = ranks.size, False
        self._rank, self._channel, self._agreement = ranks.rank, ranks.channel, agreement

    def gather(self, own: Rows, nest: str) -> list[Rows]:
        """Return the representations of each rank, by rank: this one's as given, the others' without a graph."""
        mine = [None if one is None else one.detach().cpu().contiguous() for one in own]
        rows = next((len(one) for one in mine if one is not None), 0)
        kinds = [None if one is None else [*one.shape[1:], str(one.dtype), one.requires_grad] for one in own]
        sent = self._agreement.gather("representations", rows=rows, kinds=kinds, nest=nest)
        self._agreement.refuse_unlike(
            [(one["kinds"], one["nest"]) for one in sent],
            "represent() returned unlike representations on different ranks: return rows of one shape and dtype",
        )
        counts = [one["rows"] for one in sent]
        self.is_gathered = True
        parts = [self._exchange(one, counts) if one is not None else [None] * self.size for one in mine]
        by_rank: list[Rows] = [*zip(*parts, strict=True)]
        homes = [None if one is None else one.device for one in own]
        placed: list[Rows] = [
            [None if one is None else one.to(home) for one, home in zip(part, homes, strict=True)] for part in by_rank
        ]
        placed[self._rank] = own
        return placed

    def confirm(self, *, is_done: bool) -> bool:
        """Return whether every rank has done its second pass."""
        self.is_gathered = False
        return all(one["is_done"] for one in self._agreement.gather("second pass", is_done=is_done))

    def _exchange(self, mine: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor | None]:
        size = mine.element_size() * prod(mine.shape[1:])
        received = self._channel.gather_bytes(mine.reshape(-1).view(torch.uint8), [count * size for count in counts])
        return [
            part.view(mine.dtype).reshape(count, *mine.shape[1:]) for part, count in zip(received, counts, strict=True)
        ]
