"""How far an accumulation has come: what is done, what is left, and what is known when memory ends.

Covers the running sum of the loss and its count. Does not cover gradients, which stand in ``.grad``, nor what is undone
(``transaction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch

from autobatch.errors import InvalidStep
from autobatch.records import Phase
from autobatch.training.loss_denominators import Share, Totals
from autobatch.training.micro_batches import Piece

__all__ = ["Progress", "Shortage"]

_COUNTS = attrgetter("counts")
_SIZE = attrgetter("size")
_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class Shortage:
    """Memory ended in a micro-batch: what is known when the next size is chosen, after the clean-up.

    Attributes:
        failed_size: Samples in the micro-batch that failed.
        samples_kept: Samples whose gradient stands.
        samples_redone: Samples that are still to do, or to do again.
        reason: The error's first line.
        least_size: The least size into which what is still to do can be divided: any piece has to be one that the
            model can run.
        ended_in: The pass of the micro-batch in which memory ended.
    """

    failed_size: int
    samples_kept: int
    samples_redone: int
    reason: str
    least_size: int = 1
    ended_in: Phase = "forward"


class Progress:
    """How far one accumulation has come; at the end ``loss`` is the mean over all samples.

    Attributes:
        batch: The tensors of which pieces are parts, but those that count no writes.
        versions: Writes into them, a view's with its base's, when this was made.
        todo: Pieces that are still to run.
        done: Those that have run.
        totals: What the step's losses are divided by.
        counts: Whether any piece counts for anything.
        aux: What each finished piece gave beside its loss.
        loss: The running sum of all shares.
        counted: What shares that were divided by a unit have counted for so far.
        unit: What shares are divided by instead of the total, until the end; ``None`` where it is the total.
        retries: How often memory ended.
        failed_size: Samples of the piece in which it last did.
        phase: The pass in which the next piece is.
    """

    def __init__(self, pieces: list[Piece], batch: Sequence[torch.Tensor], *, weighed: bool) -> None:
        """Begin.

        Args:
            pieces: To be run.
            batch: The tensors of which they are parts.
            weighed: Whether ``weigh`` counted in the pieces.
        """
        self.todo, self._weighed = pieces, weighed
        self.counts = any(map(_COUNTS, pieces))
        self.batch = [*filterfalse(torch.Tensor.is_inference, batch)]
        self.versions = list(map(_VERSION, self.batch))
        self.totals = Totals.of(pieces, weighed=weighed)
        self.retries = self.failed_size = 0
        self.phase: Phase = "forward"
        self._forget()

    def _forget(self) -> None:
        self.done: list[Piece] = []
        self.aux: list[Any] = []
        self.loss: torch.Tensor | None = None
        self.counted = 0.0
        self.unit: float | None = None

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each finished piece."""
        return tuple(map(_SIZE, self.done))

    def finish(self, piece: Piece, share: Share | None, aux: Any) -> None:
        """Count a piece as done.

        Raises:
            InvalidStep: The step counts for one piece and not for another.
        """
        if share is not None:
            loss, count, unit = share
            if self.loss is None:
                self.loss, self.unit = loss.detach(), unit
            elif (self.unit is None) != (unit is None):
                raise InvalidStep(
                    "step() states a count (Mean, Sum) for one micro-batch and none for another: always state it"
                )
            elif self.loss.dtype == loss.dtype:
                # One running sum: then nothing is left to allocate after the last micro-batch, however many there are.
                self.loss.add_(loss.detach())
            else:
                self.loss = self.loss + loss.detach()
            self.counted += count
        # Last: where memory ends in the addition, the piece is not done, and comes again.
        piece.leaves = ()  # the step may have given them gradients
        self.done.append(piece)
        self.aux.append(aux)
        self.todo = self.todo[1:]

    def fail(self) -> None:
        """Memory has ended in the next piece."""
        failed = self.todo[0]
        failed.leaves = ()  # what is left is cut anew, and these may have gradients
        self.failed_size, self.retries = failed.size, self.retries + 1

    def begin_anew(self) -> None:
        """Nothing is done."""
        self.todo = [*self.done, *self.todo]
        self._forget()

    def retry_with(self, pieces: list[Piece]) -> None:
        """Go on with what is left as these pieces.

        Where nothing is done yet, the totals are summed over them: sums of other parts may be rounded otherwise, and
        the step is to be the one that would have used these pieces from the start.
        """
        self.todo = pieces
        if not self.done:
            self.totals = Totals.of(pieces, weighed=self._weighed)

    def correct(self) -> float:
        """Divide the loss by the true total, where that was not known before; returns the gradients' factor."""
        factor = 1.0 if self.unit is None else self.unit / self.counted
        if factor != 1 and self.loss is not None:
            self.loss = self.loss * factor
        return factor
