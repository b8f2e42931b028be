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

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autobatch.errors import DoesNotFit, InvalidBatch, InvalidStep
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.planning.planner import balance
from autobatch.workload.batches import Layout, map_tensors, tensors_of
from autobatch.workload.checkpoint import Checkpoint
from autobatch.workload.gradients import GradientsAside, GradientStamps
from autobatch.workload.nests import with_fresh_containers
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
    aux: Any


@dataclass
class _Progress:
    """How far one accumulation has come: what is to do, what is done, and their loss so far."""

    todo: list[_Piece]
    total: float
    finished: list[_Finished] = field(default_factory=list)
    loss: torch.Tensor | None = None
    retries: int = 0

    def add(self, size: int, share: torch.Tensor, aux: Any) -> None:
        # One running sum: then nothing is left to allocate after the last micro-batch, however many there are.
        wide = share.detach().to(torch.promote_types(share.dtype, torch.float32))
        self.loss = wide if self.loss is None else self.loss + wide
        self.finished.append(_Finished(size, aux))

    def forget(self, pieces: list[_Piece]) -> None:
        self.todo, self.finished, self.loss = pieces, [], None

    def sum_up(self) -> Accumulated:
        assert self.loss is not None  # noqa: S101 - some weight is above 0, so some micro-batch has run
        return Accumulated(
            loss=self.loss,
            weight=self.total,
            micro_batch_sizes=tuple(finished.size for finished in self.finished),
            aux=tuple(finished.aux for finished in self.finished),
            retries=self.retries,
        )


@dataclass
class Accumulation:
    """Accumulates the gradients of one workload on one device, batch after batch.

    Attributes:
        workload: Model, step, weights, optimizer.
        device: Where micro-batches go.
        shrink: Called after each shortage; returns the new largest micro-batch, smaller than the failed one, or raises.
        scale: Applied to each weighed loss before its backward pass: a ``GradScaler``'s ``scale``.
        before_commit: Called when all micro-batches are done; what it raises undoes them.
    """

    workload: Workload
    device: Device
    shrink: Callable[[Shortage], int]
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    before_commit: Callable[[], None] | None = None
    _is_additive: bool = False

    def run(self, batches: Sequence[Layout], largest: int) -> Accumulated:
        """Accumulate the gradient of the mean over all samples of ``batches`` into ``.grad``.

        Args:
            batches: One batch or several that belong together, described; each is divided by itself.
            largest: The most samples a micro-batch may have.

        Returns:
            The loss and the committed sizes. Gradients that were there before are added, as ``backward`` would.

        Raises:
            InvalidBatch: There is nothing to take a mean over, or ``weigh`` is not additive.
            InvalidStep: The step wrote into its batch, or into gradients.
            DoesNotFit: There is no room for a copy of the model's buffers. Whatever ``shrink`` raises comes out too.
        """
        modules = [*self.workload.model.modules()]
        before = self._remember(modules)
        aside = GradientsAside(self.workload.parameters())
        try:
            pieces = self._divide(batches, largest)
            progress = _Progress(pieces, _total_weight(pieces))
            self._advance(progress, before, modules)
            if self.before_commit is not None:
                self.before_commit()
        except BaseException:
            before.restore()
            aside.put_back()
            raise
        aside.add()
        return progress.sum_up()

    def _advance(self, progress: _Progress, before: Checkpoint, modules: Sequence[nn.Module]) -> None:
        """Run all micro-batches, with ever smaller ones where memory ends."""
        everything, parameters = progress.todo, self.workload.parameters()
        while progress.todo:
            stamps = GradientStamps(parameters)
            here = self._remember(modules) if progress.finished else before
            reason = self._attempt(progress, stamps)
            if reason is None:
                progress.todo = progress.todo[1:]
                continue
            failed_size = progress.todo[0].size
            if stamps.unchanged():
                here.restore()
            else:
                before.restore()
                stamps.clear()
                progress.forget(everything)
            # Only now, after the ``except`` block, are the frames of the failed attempt gone.
            self.device.reclaim()
            progress.todo = self._divide_anew(progress, failed_size, reason)
            progress.retries += 1
            if not progress.finished:
                everything = progress.todo

    def _attempt(self, progress: _Progress, stamps: GradientStamps) -> str | None:
        """Run the next micro-batch; returns None, or why memory ended. Nothing of the error outlives this call."""
        piece = progress.todo[0]
        if piece.weight == 0:  # 0 x nan is nan: a micro-batch whose labels are all ignored must not be run
            progress.finished.append(_Finished(piece.size, None))
            return None
        handled = sys.exc_info()[1]  # the caller may be handling an OOM of its own, which is in every error's context
        try:
            with self.device.micro_batch(piece.size):
                self._backward(piece, progress, stamps)
        except Exception as error:
            if not is_oom(error, handled=handled):
                raise
            return describe_error(error, handled=handled)
        return None

    def _backward(self, piece: _Piece, progress: _Progress, stamps: GradientStamps) -> None:
        samples = piece.layout.take(piece.start, piece.stop)
        versions = _versions_of(samples)
        output = self.workload.run(with_fresh_containers(map_tensors(samples, self._place)))
        if not stamps.unchanged():
            raise InvalidStep(
                "step() changed .grad: leave backward() and zero_grad() to the Runner, return the loss only"
            )
        share = output.loss * (piece.weight / progress.total)
        (share if self.scale is None else self.scale(share)).backward()
        if _versions_of(samples) != versions:
            raise InvalidStep(
                "step() wrote into its batch in place, so a retry, or the next epoch, would see it changed; work on a "
                "copy"
            )
        progress.add(piece.size, share, output.aux)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        # A leaf of its own: the step may ask for its gradient, and none is added up in the user's batch.
        return self.device.place_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

    def _remember(self, modules: Sequence[nn.Module]) -> Checkpoint:
        """A checkpoint; where memory ends even for that, another try with all caches given back."""
        for _ in range(2):
            try:
                return Checkpoint(modules, self.device.torch_device)
            except Exception as error:
                if not is_oom(error):
                    raise
                reason = describe_error(error)
            self.device.reclaim()
        raise DoesNotFit(
            f"there is no room for a copy of the model's buffers ({reason}); everything is as before the step"
        )

    def _divide(self, batches: Sequence[Layout], largest: int) -> list[_Piece]:
        pieces: list[_Piece] = []
        for layout in batches:
            self.device.watch(tensors_of(layout.batch))
            pieces += self._cut(layout, 0, layout.count, largest)
        if self.workload.weigh is not None and not self._is_additive:
            _check_additive(
                [part for layout in batches for part in self._cut(layout, 0, layout.count, layout.count)], pieces
            )
            self._is_additive = True  # once: it is the user's function that is wrong or right, not one batch
        return pieces

    def _cut(self, layout: Layout, start: int, stop: int, largest: int) -> list[_Piece]:
        pieces = []
        for size in balance(stop - start, largest):
            weight = self.workload.weight_of(layout.take(start, start + size), size)
            pieces.append(_Piece(layout, start, start + size, weight))
            start += size
        return pieces

    def _divide_anew(self, progress: _Progress, failed_size: int, reason: str) -> list[_Piece]:
        kept = sum(finished.size for finished in progress.finished)
        redone = sum(piece.size for piece in progress.todo)
        largest = self.shrink(Shortage(failed_size, kept, redone, reason))
        smaller = [part for run in _join(progress.todo) for part in self._cut(run.layout, run.start, run.stop, largest)]
        _check_additive(progress.todo, smaller)
        return smaller


def _versions_of(samples: Any) -> list[int]:
    """How often each tensor has been written to; a view counts with its base. Inference tensors do not count."""
    return [tensor._version for tensor in tensors_of(samples) if not tensor.is_inference()]


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
        raise InvalidBatch(
            f"weigh() gave 0 for all {samples} samples of the batch: there is nothing to take a mean over"
        )
    return total


def _check_additive(pieces: list[_Piece], smaller: list[_Piece]) -> None:
    whole, parts = math.fsum(p.weight for p in pieces), math.fsum(p.weight for p in smaller)
    if not math.isclose(whole, parts, rel_tol=1e-5):
        raise InvalidBatch(
            f"weigh() is not additive: it gave {whole:g} for {[p.size for p in pieces]} samples and {parts:g} for the "
            f"same "
            f"samples as {[p.size for p in smaller]}; it must count something, such as tokens, that adds up"
        )
