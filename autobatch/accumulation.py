"""The gradient of a whole batch, summed over micro-batches: all of it, or nothing happened.

Covers weights, what is kept and what is redone when memory ends, and the return to the state before on any error. It is
what a trial measures and what a training step runs, the same code. Does not cover the optimizer's step (``runner``,
``probe``) nor which size comes after a failed one (the caller's ``shrink``).

The rule: micro-batch i is weighed by w_i / sum(w), so the sum is the gradient of the batch's mean for any division.
    After an
out-of-memory error the finished micro-batches are kept if the failed one touched no ``.grad``, else the batch begins
anew; both are exact, and redoing only the failed micro-batch on touched gradients is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch.errors import DoesNotFit, InvalidBatch
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.planning.planner import balance
from autobatch.workload.batches import Layout, describe, map_tensors, tensors_of
from autobatch.workload.checkpoint import Checkpoint
from autobatch.workload.gradients import GradientsAside, GradientStamps
from autobatch.workload.step import Workload

__all__ = ["Accumulated", "Accumulation", "Shortage"]


@dataclass(frozen=True)
class Shortage:
    """Memory ended in a micro-batch: what is known when the next size is chosen, after the clean-up.

    Attributes:
        failed_size: Samples in the micro-batch that failed.
        samples_kept: Samples whose gradient stands.
        samples_redone: Samples that are still to do, or to do again.
        reason: The error's first line.
    """

    failed_size: int
    samples_kept: int
    samples_redone: int
    reason: str


@dataclass(frozen=True)
class Accumulated:
    """A finished accumulation; ``.grad`` holds the gradient of the mean over ``weight`` units."""

    loss: torch.Tensor
    weight: float
    micro_batch_sizes: tuple[int, ...]
    aux: tuple[Any, ...]
    retries: int


@dataclass(frozen=True)
class _Piece:
    """Samples ``start`` to ``stop`` of one of the given batches, and what they count for."""

    layout: Layout
    start: int
    stop: int
    weight: float

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Finished:
    """What remains of a micro-batch once its backward pass is complete."""

    size: int
    loss_so_far: torch.Tensor  # summed here, so that nothing is left to allocate after the last micro-batch
    aux: Any


@dataclass
class Accumulation:
    """One accumulation at a time of a workload on a device.

    Attributes:
        workload: Model, step, weights, optimizer.
        device: Where micro-batches go.
        shrink: Called after each shortage; returns the new largest micro-batch, smaller than the failed one, or raises.
        scale: Applied to each weighed loss before its backward pass: a ``GradScaler``'s ``scale``.
    """

    workload: Workload
    device: Device
    shrink: Callable[[Shortage], int]
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    _finished: list[_Finished] = field(default_factory=list)
    _layout: Layout | None = None

    def run(self, batches: Sequence[Any], largest: int) -> Accumulated:
        """Accumulate the gradient of the mean over all samples of ``batches`` into ``.grad``.

        Args:
            batches: One batch or several that belong together; each is divided by itself.
            largest: The most samples a micro-batch may have.

        Returns:
            The loss and the committed sizes. Gradients that were there before are added, as ``backward`` would.

        Raises:
            InvalidBatch: There is nothing to take a mean over, or ``weigh`` is not additive.
        """
        parameters = self.workload.parameters()
        before = self._remember()
        aside = GradientsAside(parameters)
        try:
            accumulated = self._run_all(self._divide(batches, largest), before)
        except BaseException:
            before.restore()
            aside.put_back()
            raise
        finally:
            self._finished = []
        aside.add()
        return accumulated

    def _run_all(self, pieces: list[_Piece], before: Checkpoint) -> Accumulated:
        total = _total_weight(pieces)
        everything, retries = pieces, 0
        while pieces:
            stamps = GradientStamps(self.workload.parameters())
            here = self._remember() if self._finished else before
            reason = self._attempt(pieces[0], total)
            if reason is None:
                pieces = pieces[1:]
                continue
            failed_size, retries = pieces[0].size, retries + 1
            if stamps.unchanged():
                here.restore()
            else:
                before.restore()
                stamps.clear()
                self._finished, pieces = [], everything
            # Only now, after the ``except`` block, are the frames of the failed attempt gone.
            self.device.reclaim()
            pieces = self._shrink(pieces, failed_size, reason)
            if not self._finished:
                everything = pieces
        return self._sum_up(total, retries)

    def _remember(self) -> Checkpoint:
        """A checkpoint; where memory ends even for that, another try with all caches given back."""
        for _ in range(2):
            try:
                return Checkpoint(self.workload.model, self.device.torch_device)
            except Exception as error:
                if not is_oom(error):
                    raise
                reason = describe_error(error)
            self.device.reclaim()
        raise DoesNotFit(
            f"there is no room for a copy of the model's buffers ({reason}); everything is as before the step"
        )

    def _attempt(self, piece: _Piece, total: float) -> str | None:
        """Run one micro-batch; returns None, or why memory ended. Nothing of the error outlives this call."""
        if piece.weight == 0:  # 0 x nan is nan: a micro-batch whose labels are all ignored must not be run
            return None
        try:
            with self.device.micro_batch(piece.size):
                self._finished.append(self._backward(piece, total))
        except Exception as error:
            if not is_oom(error):
                raise
            return describe_error(error)
        return None

    def _backward(self, piece: _Piece, total: float) -> _Finished:
        output = self.workload.run(map_tensors(piece.layout.take(piece.start, piece.stop), self.device.place_tensor))
        share = output.loss * (piece.weight / total)
        (share if self.scale is None else self.scale(share)).backward()
        earlier = self._finished[-1].loss_so_far if self._finished else 0.0
        return _Finished(piece.size, share.detach() + earlier, output.aux)

    def _divide(self, batches: Sequence[Any], largest: int) -> list[_Piece]:
        pieces: list[_Piece] = []
        for batch in batches:
            self.device.watch(tensors_of(batch))
            layout = describe(batch, like=self._layout)
            pieces += self._cut(layout, 0, layout.count, largest)
            self._layout = dataclasses.replace(layout, batch=None)  # a list stays what it was; the batch is not kept
        return pieces

    def _cut(self, layout: Layout, start: int, stop: int, largest: int) -> list[_Piece]:
        pieces = []
        for size in balance(stop - start, largest):
            weight = self.workload.weight_of(layout.take(start, start + size), size)
            pieces.append(_Piece(layout, start, start + size, weight))
            start += size
        return pieces

    def _shrink(self, pieces: list[_Piece], failed_size: int, reason: str) -> list[_Piece]:
        kept = sum(finished.size for finished in self._finished)
        redone = sum(piece.size for piece in pieces)
        largest = self.shrink(Shortage(failed_size, kept, redone, reason))
        smaller = [part for run in _join(pieces) for part in self._cut(run.layout, run.start, run.stop, largest)]
        _check_additive(pieces, smaller)
        return smaller

    def _sum_up(self, total: float, retries: int) -> Accumulated:
        return Accumulated(
            loss=self._finished[-1].loss_so_far,
            weight=total,
            micro_batch_sizes=tuple(finished.size for finished in self._finished),
            aux=tuple(finished.aux for finished in self._finished),
            retries=retries,
        )


def _join(pieces: list[_Piece]) -> list[_Piece]:
    """Neighbours of the same batch as one, so that the rest is divided anew as a whole."""
    joined: list[_Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.layout is piece.layout and last.stop == piece.start:
            joined[-1] = _Piece(last.layout, last.start, piece.stop, last.weight + piece.weight)
        else:
            joined.append(piece)
    return joined


def _total_weight(pieces: list[_Piece]) -> float:
    total = math.fsum(piece.weight for piece in pieces)
    if total == 0:
        samples = sum(piece.size for piece in pieces)
        message = f"weigh() gave 0 for all {samples} samples of the batch: there is nothing to take a mean over"
        raise InvalidBatch(message)
    return total


def _check_additive(pieces: list[_Piece], smaller: list[_Piece]) -> None:
    whole, parts = math.fsum(p.weight for p in pieces), math.fsum(p.weight for p in smaller)
    if not math.isclose(whole, parts, rel_tol=1e-5):
        message = (
            f"weigh() is not additive: it gave {whole:g} for {[p.size for p in pieces]} samples and {parts:g} for the "
            f"same "
            f"samples as {[p.size for p in smaller]}; it must count something, such as tokens, that adds up"
        )
        raise InvalidBatch(message)
