"""The gradient of a whole batch, summed over micro-batches: all of it, or nothing happened.

Covers what is kept and what is redone when memory ends, and the return to the state before on any error. It is what a
trial measures and what a training step runs, the same code. Does not cover what a micro-batch counts for (``pieces``,
``shares``), the optimizer's step (``update``, ``probe``), nor which size comes after a failed one (the caller's
``shrink``).

After an out-of-memory error the finished micro-batches are kept if the failed one touched no gradient, else the batch
begins anew; both are exact, and redoing only the failed micro-batch on touched gradients is not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from autobatch.accumulation.pieces import Piece, check_additive, cut, find_least_size, join, refuse_graphs
from autobatch.accumulation.progress import Accumulated, Progress, Shortage
from autobatch.accumulation.shares import Share
from autobatch.accumulation.watched_batch import WatchedBatch
from autobatch.batch.layout import Layout, map_tensors, tensors_of
from autobatch.batch.tree import with_fresh_containers
from autobatch.errors import AutobatchError, CannotRetry, DoesNotFit, InvalidStep
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.state.gradients import Float32Sums, GradientsAside, GradientStamps
from autobatch.state.rewind_point import RewindPoint, StepState
from autobatch.state.sparse_gradients import coalesce_gradients, widen_gradients
from autobatch.step.compilation import is_compiled
from autobatch.step.workload import Workload

__all__ = ["Accumulation", "TakesGradient"]

TakesGradient = Callable[[Callable[[], None]], None]
"""Takes a gradient: prepares, then calls what it was given, then begins what cannot be undone."""

_T = TypeVar("_T")
_LOG = logging.getLogger("autobatch")


@dataclass
class Accumulation:
    """Accumulates the gradients of one workload on one device, batch after batch.

    Attributes:
        workload: Model, step, weights, optimizer.
        device: Where micro-batches go.
        shrink: Called after each shortage; returns the new largest micro-batch, smaller than the failed one, or raises.
        scale: Applied to each share of the loss before its backward pass: a ``GradScaler``'s ``scale``.
        in_float32: Whether gradients in bfloat16 and float16 are added up in float32 when there are several pieces.
        smallest: The fewest samples that the model can run; no batch is cut into smaller pieces.
        leaves_are_known: Whether the first micro-batch need not be looked through for parameters that nobody knows.
        known_state: What its steps are known to change; default: nothing yet.
        stands_for: How many micro-batches a step has of which the first two are run here, in a trial: sparse gradients
            are given the rows that those may have. 0: all are run.
        keep: Objects of the user that the step changes; see ``state.user_objects``.
        owns_batches: Whether the batches are copies that no user sees.
    """

    workload: Workload
    device: Device
    shrink: Callable[[Shortage], int]
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    in_float32: bool = True
    smallest: int = 1
    leaves_are_known: bool = False
    known_state: StepState | None = None
    stands_for: int = 0
    keep: Sequence[Any] = ()
    owns_batches: bool = False
    _is_additive: bool = False
    _sums: Float32Sums = field(default_factory=Float32Sums)

    def __post_init__(self) -> None:
        """Know nothing of what steps change, if nothing is known."""
        compiled = is_compiled(self.workload.model, self.workload.step)
        self._state = self.known_state or StepState(
            self.workload.model, self.device.torch_device, self.keep, records=not compiled
        )

    def run(self, batches: Sequence[Layout], largest: int, update: TakesGradient | None = None) -> Accumulated | None:
        """Accumulate the gradient of the mean over all samples of ``batches`` into ``.grad``.

        Args:
            batches: One batch or several that belong together, described; each is divided by itself.
            largest: The most samples a micro-batch may have.
            update: Called last, when ``.grad`` holds the sum, with a function that it must call right before it begins
                what cannot be undone. What it raises before that undoes everything; from there on nothing is put back,
                and no gradient is left for another update. Without it the gradients are the result, and stand in the
                tensors in which earlier ones stood.

        Returns:
            The loss and the committed sizes. Gradients that were there before are added, as ``backward`` would.
            ``None`` where there is nothing to take a mean over, all weights being 0: then nothing has happened.

        Raises:
            InvalidBatch: ``weigh`` does not count, or a batch carries a graph.
            InvalidStep: The step wrote into its batch or into gradients, trains what is in neither model nor optimizer,
                or its losses or counts are none.
            DoesNotFit: There is no room for a copy of the model's buffers, for counting, or for what comes after the
                last backward pass. Whatever ``shrink`` and ``update`` raise comes out too.
        """
        parameters = self.workload.parameters()
        before, aside = self._remember(self._state.begin), GradientsAside(parameters)
        try:
            aside.take()
            progress = self._begin(batches, largest)
            self._advance(progress, before, parameters)
            self._state.learn(before)
            self._state.stop_recording()
            reason = self._complete(progress, before, aside, update)
        finally:
            try:
                self._state.stop_recording()
                if not aside.is_final:
                    self._undo(before)
            finally:
                aside.end()
                self._sums.end()
                self._state.end()  # last: it only frees memory, and an interrupt may come in the middle of it
        if reason is None:
            return progress.sum_up()
        self.device.reclaim()
        raise DoesNotFit(
            f"memory ended after the last backward pass, before the update ({reason}); everything is as before the "
            f"step: free memory or give fit() more headroom="
        )

    def _undo(self, before: RewindPoint) -> None:
        """Put everything back; what cannot be is logged, since the error that comes out may be the user's own."""
        lost = self._state.learn(before)
        before.restore()
        if lost:
            _LOG.warning(
                "the step was undone but for a tensor of shape %s, into which step() had never written before: there "
                "was no copy of it",
                tuple(lost[0].shape),
            )

    def _complete(
        self, progress: Progress, before: RewindPoint, aside: GradientsAside, update: TakesGradient | None
    ) -> str | None:
        """Make ``.grad`` the whole gradient and hand it over; returns None, or why memory ended before that."""
        if progress.loss is None:
            return None

        def begin() -> None:
            lasting = before.modules.select_lasting()  # first: an interrupt after spend() leaves the step half done
            aside.spend(self.workload.parameters())
            before.forget()  # the trials' optimizer steps had no such copy beside them, nor earlier activations
            before.modules.forget(lasting)

        handled = sys.exc_info()[1]
        try:
            self._correct(progress)
            aside.add()
            aside.settle() if update is None else update(begin)
        except Exception as error:
            if aside.is_final or isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                raise
            return describe_error(error, handled=handled)
        return None

    def _advance(self, progress: Progress, before: RewindPoint, parameters: Sequence[nn.Parameter]) -> None:
        """Run all micro-batches, with ever smaller ones where memory ends."""
        if not any(piece.counts for piece in progress.todo):
            return
        while progress.todo:
            if self._state.moves_modules:  # a forward pass may make parameters
                parameters = self.workload.parameters()
            if len(progress.todo) > 1 and self.in_float32:
                self._sums.begin(parameters)
            stamps = GradientStamps(parameters, self._sums)
            here = self._remember(lambda: self._state.begin_piece(before)) if progress.sizes else before
            reason = self._attempt(progress, stamps, before, here)
            if reason is None:
                progress.todo = progress.todo[1:]
                continue
            progress.fail()
            self._rewind(progress, stamps, before, here, reason)
            # Only now, after the ``except`` block, are the frames of the failed attempt gone.
            self.device.reclaim()
            self._divide_anew(progress, reason)

    def _rewind(
        self, progress: Progress, stamps: GradientStamps, before: RewindPoint, here: RewindPoint, reason: str
    ) -> None:
        """Undo a failed micro-batch; the finished ones too, where they cannot be kept."""
        lost = self._state.learn(before)
        if lost:
            raise CannotRetry(
                f"memory ended ({reason}) after step() had written into a tensor of shape {tuple(lost[0].shape)} that "
                f"it had never written into before, and of which there was no copy: this tensor stays as it is, all "
                f"else is as before the step; load your last checkpoint"
            )
        is_clean = stamps.unchanged() and progress.totals.are_exact
        can_divide_rest = self._least_size(progress.todo) < progress.failed_size
        if self._state.returns_to(here, before) and is_clean and can_divide_rest:
            here.restore()
        else:
            before.restore()
            stamps.clear()
            progress.begin_anew()

    def _attempt(
        self, progress: Progress, stamps: GradientStamps, before: RewindPoint, here: RewindPoint
    ) -> str | None:
        """Run the next micro-batch; returns None, or why memory ended. Nothing of the error outlives this call."""
        piece = progress.todo[0]
        if not piece.counts:  # 0 x nan is nan: a micro-batch whose labels are all ignored must not be run
            progress.finish(piece, None, None)
            return None
        handled = sys.exc_info()[1]  # the caller may be handling an OOM of its own, which is in every error's context
        try:
            apart = [*stamps.tensors(), *tensors_of(piece.layout.batch)]
            with self.device.micro_batch(piece.size):
                with self._watch(piece) as watched, self._state.record([before, here], apart, watched.save):
                    share, aux = self._backward(piece, watched.samples, progress, stamps)
                progress.finish(piece, share, aux)
        except Exception as error:
            if isinstance(error, InvalidStep) or not is_oom(error, handled=handled):
                raise
            return describe_error(error, handled=handled)
        return None

    def _watch(self, piece: Piece) -> WatchedBatch:
        return WatchedBatch(piece.take(), copies_arrays=self._state.is_recorded_step, is_copy=self.owns_batches)

    def _backward(
        self, piece: Piece, samples: Any, progress: Progress, stamps: GradientStamps
    ) -> tuple[Share | None, Any]:
        progress.phase = "forward"
        output = self.workload.run(with_fresh_containers(map_tensors(samples, self._place)))
        stamps.refuse_change()
        share = progress.totals.share(piece, output.terms, progress.unit)
        progress.phase = "backward"
        if share is not None:
            if not self.leaves_are_known:
                self.workload.check_leaves(share.loss)
                self.leaves_are_known = True  # once: going through the graph takes as long as a small forward pass
            (share.loss if self.scale is None else self.scale(share.loss)).backward()
        if self.stands_for and not progress.done:
            widen_gradients(stamps.parameters, self.stands_for)
            self._sums.widen(self.stands_for)
        coalesce_gradients(stamps.parameters)
        return share, output.aux

    def _correct(self, progress: Progress) -> None:
        """Divide by the true total, where it was not known before; then round what was summed in float32."""
        factor = progress.correct()
        if factor != 1:
            self._sums.multiply(factor)
            for parameter in self.workload.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self._sums.write()

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        # A leaf of its own: the step may ask for its gradient, and none is added up in the user's batch.
        return self.device.place_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

    def _remember(self, make: Callable[[], RewindPoint]) -> RewindPoint:
        return self._try_twice(make, "for a copy of what the step changes, such as buffers")

    def _try_twice(self, action: Callable[[], _T], purpose: str) -> _T:
        """What takes little memory; where that ends even here, another try with all caches given back."""
        handled = sys.exc_info()[1]
        for _ in range(2):
            try:
                return action()
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
            self.device.reclaim()
        raise DoesNotFit(f"there is no room {purpose} ({reason}); everything is as before the step")

    def _begin(self, batches: Sequence[Layout], largest: int) -> Progress:
        for layout in batches:
            tensors = [*tensors_of(layout.batch)]
            refuse_graphs(tensors)
            self.device.watch(tensors)
        pieces = self._cut([(layout, 0, layout.count) for layout in batches], largest)
        weighed = self.workload.weigh is not None
        if weighed and not self._is_additive:
            check_additive(self._cut([(layout, 0, layout.count) for layout in batches], None), pieces)
            self._is_additive = True  # once: it is the user's function that is wrong or right, not one batch
        return Progress(pieces, weighed=weighed)

    def _cut(self, ranges: Sequence[tuple[Layout, int, int]], largest: int | None) -> list[Piece]:
        return self._try_twice(
            lambda: [
                piece
                for samples in ranges
                for piece in cut(self.workload, samples, largest or samples[0].count, self.smallest)
            ],
            "to count with weigh()",
        )

    def _least_size(self, pieces: Sequence[Piece]) -> int:
        return find_least_size(join(pieces), self.smallest)

    def _divide_anew(self, progress: Progress, reason: str) -> None:
        """Cut what is left into smaller micro-batches; where nothing is done yet, its total is that of the new ones."""
        failed, todo = progress.failed_size, progress.todo
        kept, redone = sum(progress.sizes), sum(piece.size for piece in todo)
        shortage = Shortage(failed, kept, redone, reason, self._least_size(todo), progress.phase)
        smaller = self._cut(join(todo), self.shrink(shortage))
        check_additive(todo, smaller)
        progress.retry_with(smaller)
