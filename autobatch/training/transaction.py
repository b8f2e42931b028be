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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch

from autobatch.batch.layout import Layout
from autobatch.errors import AutobatchError, CannotRetry, DoesNotFit, InvalidStep
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.state.gradients import Float32Sums, GradientsAside, GradientStamps
from autobatch.state.module_state import ModuleState
from autobatch.state.rewind_point import RewindPoint, StepState
from autobatch.state.sparse_gradients import coalesce_gradients, widen_gradients
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload, split_output
from autobatch.training.accumulation_state import Progress, Shortage
from autobatch.training.batch_mutation import WatchedBatch, refuse_write
from autobatch.training.loss_denominators import Share
from autobatch.training.micro_batches import Piece, check_additive, cut, find_least_size, join, refuse_graphs

__all__ = ["Accumulation", "TakesGradient", "Transaction"]

TakesGradient = Callable[[Callable[[], None]], None]
"""Takes a gradient: prepares, then calls what it was given, then begins what cannot be undone."""

_T = TypeVar("_T")
_LOG = logging.getLogger("autobatch")
_PARAMS, _VERSION = itemgetter("params"), attrgetter("_version")


class Transaction:
    """Everything that a step changes is as before when this ends, unless the update has begun.

    Attributes:
        start: How all was before the step.
        here: How all was before the micro-batch that runs.
        stamps: The gradients before it.
        aside: Gradients from before the step.
    """

    def __init__(
        self,
        state: StepState,
        start: RewindPoint,
        workload: Workload,
        parameters: Sequence[torch.Tensor],
        sums: Float32Sums,
    ) -> None:
        """Nothing is moved yet."""
        self._state, self._workload, self._sums = state, workload, sums
        self.parameters, self._has_let_go = parameters, False
        self.start = self.here = start
        self.aside = GradientsAside(parameters)
        self.stamps = GradientStamps(parameters, sums)

    def __enter__(self) -> Transaction:
        """All is as it was when this was made."""
        return self

    def set_aside(self) -> None:
        """Take earlier gradients away."""
        self.aside.take()
        self.stamps.renew()

    def begin_piece(self, here: RewindPoint) -> None:
        """Remember ``here`` instead of the start, and gradients that a forward pass may have made."""
        self.here = here
        if self._state.moves_modules:
            self.stamps.parameters = self._workload.parameters()
            self.stamps.renew()

    def end_pieces(self) -> None:
        """All have run: let go of what only the last one needed, such as its activations in attributes."""
        self.here = self.start
        self.stamps.forget()
        self._state.learn(self.start)
        if self._state.is_recording:
            self._state.stop_recording()

    def begin_update(self) -> None:
        """From here on nothing is put back, and no gradient of this step is left at the end."""
        made_some = not self.start.modules.attributes_are_current()  # a forward pass may have made parameters
        self.aside.spend(self._workload.parameters() if made_some else self.parameters)
        self.start.forget()  # the trials' optimizer steps had no such copy beside them, nor earlier activations
        self._state.end()
        self._has_let_go = True

    def __exit__(self, *error: object) -> None:
        """Put everything back, or clear the gradients of an update."""
        try:
            if self._state.is_recording:
                self._state.stop_recording()
            if not self.aside.is_final:
                self._undo()
        finally:
            self.aside.end()
            self._sums.end()
            if not self._has_let_go:
                self._state.end()  # last: it only frees memory, and an interrupt may come in the middle of it

    def _undo(self) -> None:
        """Put everything back; what cannot be is logged, since the error that comes out may be the user's own."""
        lost = self._state.learn(self.start)
        self.start.restore()
        if lost:
            _LOG.warning(
                "the step was undone but for a tensor of shape %s, into which step() had never written before: there "
                "was no copy of it",
                tuple(lost[0].shape),
            )

    def rewind(self, progress: Progress, reason: str, *, can_divide_rest: bool) -> None:
        """Undo a failed micro-batch; the finished ones too, where they cannot be left as they are.

        Raises:
            CannotRetry: The step has written into memory of which there is no copy.
        """
        lost = self._state.learn(self.start)
        if lost:
            raise CannotRetry(
                f"memory ended ({reason}) after step() had written into a tensor of shape {tuple(lost[0].shape)} that "
                f"it had never written into before, and of which there was no copy: this tensor stays as it is, all "
                f"else is as before the step; load your last checkpoint"
            )
        is_clean = self.stamps.unchanged() and progress.totals.are_exact
        if self._state.returns_to(self.here, self.start) and is_clean and can_divide_rest:
            self.here.restore()
        else:
            self.start.restore()
            self.here, self.stamps.parameters = self.start, self.parameters
            self.stamps.clear()
            progress.begin_anew()


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
        had_gradients: Whether there were gradients before the last batch, which have become part of its gradient.
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
    had_gradients: bool = False
    owns_batches: bool = False
    _is_additive: bool = False
    _sums: Float32Sums = field(default_factory=Float32Sums)
    _parameters: Sequence[torch.Tensor] = ()
    _seen_modules: ModuleState | None = None
    _seen_held: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        """Know nothing of what steps change, if nothing is known."""
        self._home = self.device.torch_device
        compiled = is_compiled(self.workload.model, self.workload.step)
        self._state = self.known_state or StepState(
            self.workload.model, self.device.torch_device, self.keep, records=not compiled
        )

    def run(self, batches: Sequence[Layout], largest: int, update: TakesGradient | None = None) -> Progress | None:
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
        start = self._try_twice("for a copy of what the step changes, such as buffers", self._state.begin)
        parameters = self._find_parameters(start.modules)
        with Transaction(self._state, start, self.workload, parameters, self._sums) as transaction:
            self.had_gradients = transaction.aside.are_there
            if self.had_gradients:
                transaction.set_aside()
            progress = self._begin(batches, largest)
            while (reason := self._run_pieces(progress, transaction)) is not None:
                # Only now, after the ``except`` block, are the frames of the failed attempt gone.
                progress.fail()
                can_divide_rest = self._least_size(progress.todo) < progress.failed_size
                transaction.rewind(progress, reason, can_divide_rest=can_divide_rest)
                self.device.reclaim()
                self._divide_anew(progress, reason)
            transaction.end_pieces()
            reason = None if progress.loss is None else self._complete(progress, transaction, update)
        if reason is None:
            return progress if progress.loss is not None else None
        self.device.reclaim()
        raise DoesNotFit(
            f"memory ended after the last backward pass, before the update ({reason}); everything is as before the "
            f"step: free memory or give fit() more headroom="
        )

    def _find_parameters(self, modules: ModuleState) -> Sequence[torch.Tensor]:
        """The workload's, which are listed again where modules or the optimizer hold other ones."""
        groups = self.workload.optimizer.param_groups if self.workload.optimizer is not None else ()
        held = [*chain.from_iterable(map(_PARAMS, groups))]
        is_same = len(held) == len(self._seen_held) and all(map(is_, held, self._seen_held))
        if modules is not self._seen_modules or not is_same:
            self._parameters = self.workload.parameters()
            self._seen_modules, self._seen_held = modules, held
        return self._parameters

    def _run_pieces(self, progress: Progress, transaction: Transaction) -> str | None:
        """Run all micro-batches that are left; returns None, or why memory ended. Nothing of the error stays."""
        state, stamps = self._state, transaction.stamps
        handled = sys.exc_info()[1]  # the caller may be handling an OOM of its own, which is in every error's context
        is_watched = state.is_looked_over or self.device.micro_batch(progress.todo[0].size) is not None
        if self.in_float32 and len(progress.todo) > 1:
            self._sums.begin(stamps.parameters)
        try:
            with self.workload.guard(transaction.parameters):
                while progress.todo and progress.counts:
                    if progress.done and not state.is_still:
                        self._begin_piece(progress, transaction)
                    piece = progress.todo[0]
                    if not piece.counts:  # 0 x nan is nan: one whose labels are all ignored must not be run
                        progress.finish(piece, None, None)
                    elif is_watched:
                        self._run_watched(piece, progress, transaction)
                    else:  # the loss has no name here: its graph may hold what the next micro-batch needs
                        progress.finish(piece, *self._run_piece(piece, progress, stamps))
                    stamps.renew()
        except Exception as error:
            if isinstance(error, InvalidStep) or not is_oom(error, handled=handled):
                raise
            if [*map(_VERSION, progress.batch)] != progress.versions and not state.is_looked_over:
                refuse_write(stays=not self.owns_batches)
            return describe_error(error, handled=handled)
        return None

    def _begin_piece(self, progress: Progress, transaction: Transaction) -> None:
        purpose = "for a copy of what the step changes, such as buffers"
        transaction.begin_piece(self._try_twice(purpose, self._state.begin_piece, transaction.start))
        if self.in_float32 and self._state.moves_modules and len(progress.todo) > 1:
            self._sums.begin(transaction.stamps.parameters)

    def _run_watched(self, piece: Piece, progress: Progress, transaction: Transaction) -> None:
        """Run a micro-batch in a range of the device's, and in the first steps look at all that it writes into."""
        with self.device.micro_batch(piece.size) or nullcontext():
            if not self._state.is_looked_over:
                progress.finish(piece, *self._run_piece(piece, progress, transaction.stamps))
                return
            samples = piece.layout.take(piece.start, piece.stop)
            watched = WatchedBatch(samples, copies_arrays=True, is_copy=self.owns_batches)
            with watched, self._record(piece, transaction, watched):
                share, aux = self._run_piece(piece, progress, transaction.stamps)
            progress.finish(piece, share, aux)

    def _record(self, piece: Piece, transaction: Transaction, watched: WatchedBatch) -> AbstractContextManager[Any]:
        if not self._state.is_recording:
            return nullcontext()
        apart = [*transaction.stamps.tensors(), *piece.layout.tensors()]
        return self._state.record([transaction.start, transaction.here], apart, watched.save)

    def _run_piece(self, piece: Piece, progress: Progress, stamps: GradientStamps) -> tuple[Share | None, Any]:
        """Add a micro-batch's gradient; returns its share of the loss, and what the step returned beside it."""
        layout = piece.layout
        if layout.spec is not None and layout.spec.is_pair and layout.home == self._home:
            samples: Any = piece.leaves
        else:
            samples = layout.micro_batch(piece.start, piece.stop, piece.leaves, self.device.move_tensor, self._home)
        progress.phase = "forward"
        returned = self.workload.call_step(samples)
        losses, aux = (returned, None) if type(returned) is torch.Tensor else split_output(returned)
        if not stamps.unchanged():
            stamps.refuse_change()
        share = progress.totals.share(piece, losses, progress.unit)
        progress.phase = "backward"
        if share is not None:
            loss = share[0]
            if not self.leaves_are_known:
                self.workload.check_leaves(loss)
                self.leaves_are_known = True  # once: going through the graph takes as long as a small forward pass
            (loss if self.scale is None else self.scale(loss)).backward()
        if self.stands_for and not progress.done:
            widen_gradients(stamps.parameters, self.stands_for)
            self._sums.widen(self.stands_for)
        if stamps.any_sparse or not progress.done or len(progress.todo) == 1:  # torch appends rows to those before
            coalesce_gradients(stamps.parameters)
        if [*map(_VERSION, progress.batch)] != progress.versions and not self._state.is_looked_over:
            refuse_write(stays=not self.owns_batches)
        return share, aux

    def _complete(self, progress: Progress, transaction: Transaction, update: TakesGradient | None) -> str | None:
        """Make ``.grad`` the whole gradient and hand it over; returns None, or why memory ended before that."""
        aside, handled = transaction.aside, sys.exc_info()[1]
        try:
            if progress.unit is not None:
                self._correct(progress.correct())
            if self._sums.writes:
                self._sums.write()
            if aside.are_there:
                aside.add()
            if update is None:
                aside.settle()
            else:
                update(transaction.begin_update)
        except Exception as error:
            if aside.is_final or isinstance(error, AutobatchError) or not is_oom(error, handled=handled):
                raise
            return describe_error(error, handled=handled)
        return None

    def _correct(self, factor: float) -> None:
        """Divide by the true total, which was not known before, what is not rounded yet."""
        if factor != 1:
            self._sums.multiply(factor)
            for parameter in self.workload.parameters():  # a forward pass may have made some
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _try_twice(self, purpose: str, action: Callable[..., _T], *arguments: Any) -> _T:
        """What takes little memory; where that ends even here, another try with all caches given back."""
        handled = sys.exc_info()[1]
        for _ in range(2):
            try:
                return action(*arguments)
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
            self.device.reclaim()
        raise DoesNotFit(f"there is no room {purpose} ({reason}); everything is as before the step")

    def _begin(self, batches: Sequence[Layout], largest: int) -> Progress:
        tensors = [*chain.from_iterable(map(Layout.tensors, batches))]
        refuse_graphs(tensors)
        ranges = [(layout, 0, layout.count) for layout in batches]
        pieces = self._cut(ranges, largest)
        weighed = self.workload.weigh is not None
        if weighed and not self._is_additive:
            check_additive(self._cut(ranges, None), pieces)
            self._is_additive = True  # once: it is the user's function that is wrong or right, not one batch
        return Progress(pieces, tensors, weighed=weighed)

    def _cut(self, ranges: Sequence[tuple[Layout, int, int]], largest: int | None) -> list[Piece]:
        if self.workload.weigh is None:
            return cut(self.workload, ranges, largest, self.smallest)
        return self._try_twice("to count with weigh()", cut, self.workload, ranges, largest, self.smallest)

    def _least_size(self, pieces: Sequence[Piece]) -> int:
        return find_least_size(join(pieces), self.smallest)

    def _divide_anew(self, progress: Progress, reason: str) -> None:
        """Cut what is left into smaller micro-batches; where nothing is done yet, its total is that of the new ones."""
        failed, todo = progress.failed_size, progress.todo
        kept, redone = sum(progress.micro_batch_sizes), sum(piece.size for piece in todo)
        shortage = Shortage(failed, kept, redone, reason, self._least_size(todo), progress.phase)
        smaller = self._cut(join(todo), self.shrink(shortage))
        check_additive(todo, smaller)
        progress.retry_with(smaller)
