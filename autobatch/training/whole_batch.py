"""Runs a step of ``WholeBatch`` in two passes over its micro-batches.

1. Each micro-batch is represented. Representations are kept without their graph.
2. The loss of all representations runs forward and backward, once. Parameters of its own get their gradient here.
3. All but gradients is restored to the beginning of the step, and each micro-batch is represented again: it draws the
   same numbers and finds the same state. Its backward pass begins with its rows of the loss's gradient.
4. The model stays as the second pass leaves it, moved once by each forward and backward pass. If the loss moved it too,
   it is restored to the end of the loss. So are objects in ``keep=``.

A step of one micro-batch runs plainly. Memory that runs out in any of these begins the step again, as in any step.

Invariants, asserted by the tests:

- The gradient is that of one graph over all micro-batches.
- Representations of the second pass are those of the first, or the step is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from autobatch.batch.cut import Group, cut_joined, divide, number_rows
from autobatch.batch.samples import Layout, MicroBatch
from autobatch.distributed.shared_rows import SharedRows
from autobatch.distributed.shared_step import SharedStep
from autobatch.errors import CannotRetry, InvalidArgument
from autobatch.step.whole_batch import PerRank, RankBatch, WholeBatch, read_loss, read_rows, show_rows
from autobatch.step.workload import Workload, split_output
from autobatch.training.accumulation_state import AccumulationState, Shortage
from autobatch.training.misuse import GradientWatch
from autobatch.training.rank_accumulation import RankAccumulation
from autobatch.undo.random_state import RandomState
from autobatch.undo.undo import Undo

_OTHERS = (
    "represent() returned other representations of the same samples in the second pass: it draws from a generator of "
    "its own, reads state that moves outside the model (name either in keep=), or runs an operator that is not "
    "deterministic"
)


class Kept(NamedTuple):
    """Values of one micro-batch that the first pass keeps.

    Attributes:
        generators: Their state before it.
        tensors: Its representations, without their graph; later each has its rows of the loss's gradient.
        nest: The containers that hold the tensors.
    """

    generators: RandomState
    tensors: Sequence[torch.Tensor | None]
    nest: TreeSpec


@dataclass
class WholeBatchAccumulation(RankAccumulation):
    """Accumulates the gradient of one ``WholeBatch`` on one device, batch after batch."""

    imitated: int = 0  # rows in the loss of the step that a trial imitates
    whole: Layout | None = None  # this rank's batch of that step
    _undo: Undo | None = None
    _shared: SharedRows | None = None  # of the step that runs, on several ranks
    _part: float = 1.0  # of this rank's loss in the step's, if each rank has a loss of its own
    _kept: list[Kept] = field(default_factory=list)
    _later: RandomState | None = None  # generators after the loss, and what backward passes have drawn since
    _are_same: list[torch.Tensor] = field(default_factory=list)  # not read until the end: a read waits for the device

    def begin(self, batches: Sequence[Layout], largest: int, undo: Undo, shared: Any = None) -> AccumulationState:
        """Begin as ``Accumulation`` does."""
        self._undo = undo
        return super().begin(batches, largest, undo, shared)

    def _open(self, shared: SharedStep, progress: AccumulationState, *_: Any) -> None:
        """Divide by nothing: the loss is over the rows of all ranks."""
        if not progress.micro_batches:
            raise InvalidArgument("WholeBatch needs samples on every rank, and this one has none in this step")
        rows, is_alone = shared.share_rows(), isinstance(self._step, PerRank)
        self._shared, self._part = (None, 1 / rows.size) if is_alone else (rows, 1.0)

    def attempt(self, progress: AccumulationState, undo: Undo) -> Shortage | None:
        """Run both passes; on several ranks all of them run again, or none."""
        shortage, rows = super().attempt(progress, undo), self._shared
        is_over = rows is None or (rows.is_gathered and rows.confirm(is_done=shortage is None))
        if shortage is None and not is_over:
            self._sums.clear()
            progress.restart()
            return Shortage(failed_size=0, reason="another rank ran out of memory")
        return shortage

    def _end(self, undo: Undo) -> None:
        super()._end(undo)
        self._undo = self._shared = None

    def _run_micro_batches(self, progress: AccumulationState) -> None:
        if len(progress.micro_batches) == 1 and not self.imitated and self._shared is None:
            self._run_whole(progress)
            return
        undo = self._undo
        assert undo is not None  # noqa: S101 - narrows for mypy
        try:
            for micro_batch in progress.micro_batches:
                with self.device.micro_batch(micro_batch.size) or nullcontext():
                    self._kept.append(self._keep(micro_batch, progress))
                progress.aux.append(None)
            progress.aux = []
            progress.phase = "loss"
            before, device = self._record(), self.device.torch_device
            begun = None if self._shared is None else RandomState(device)
            value, aux, count = self._run_loss(self._join_kept(progress), progress)
            if self._shared is not None and begun is not None:
                _refuse_draws(begun, RandomState(device))
                # The loss's own parameters have gradients on each rank, which are summed over the ranks.
                if (factor := self._shared.share_loss(count)) is None:
                    return
                self._correct(factor)
                value = value * factor
            if lost := undo.find_lost():
                raise CannotRetry(
                    f"the step wrote for the first time into a tensor of shape {tuple(lost[0].shape)}, so there is no "
                    f"copy with which its second pass can begin: it keeps what was written, all else was restored; "
                    f"name its owner in keep=, or run the step again, and there will be a copy"
                )
            # The second pass moves the model as the first did, and its backward hooks move it too: that state stays,
            # unless the loss moves the model itself.
            is_moved = bool(before.find_moved() or before.find_lost())
            before.release()
            after = self._record() if is_moved else Undo(None, device, keep=self.keep)
            self._later = RandomState(device)
            undo.rewind()
            super()._run_micro_batches(progress)
            after.rewind()
            self._later.restore()
            if not self.imitated and not all(map(bool, self._are_same)):
                raise InvalidArgument(_OTHERS)
        finally:
            self._kept, self._are_same, self._later = [], [], None
        progress.aux, progress.loss.value = [aux], value

    def _keep(self, micro_batch: MicroBatch, progress: AccumulationState) -> Kept:
        """Represent a micro-batch. Its graph is made, so that kernels are those of the second pass, and dropped."""
        generators = RandomState(self.device.torch_device)
        found, nest = self._represent(micro_batch, progress)
        # Clones: a representation may be a view of all positions of its samples.
        kept = Kept(generators, [None if one is None else _copy(one) for one in found], nest)
        if self._kept:
            _refuse_unlike(self._kept[0], kept)
        return kept

    def _represent(
        self, micro_batch: MicroBatch, progress: AccumulationState
    ) -> tuple[list[torch.Tensor | None], TreeSpec]:
        progress.phase, progress.running = "forward", "your represent(model, micro_batch)"
        gradients = GradientWatch(self._parameters, self._sums) if self._is_watched else None
        returned = self._call(self._step.represent, self.workload.model, self._take(micro_batch))
        progress.running = ""
        if gradients is not None:
            gradients.refuse_change()
        return read_rows(returned, micro_batch.size)

    def _run_whole(self, progress: AccumulationState) -> None:
        """Run a step of one micro-batch, in one pass."""
        [micro_batch] = progress.micro_batches
        with self.device.micro_batch(micro_batch.size) or nullcontext():
            found, nest = self._represent(micro_batch, progress)
            progress.phase = "backward"
            progress.loss.value, aux, _ = self._run_loss(tree_unflatten(_join([found], progress), nest), progress)
            self._join_sparse_rows(progress)
        progress.aux, self.leaves_are_known = [aux], True

    def _run_loss(self, representations: Any, progress: AccumulationState) -> tuple[torch.Tensor, Any, float | None]:
        """Run the loss forward and backward; return its value, what it returned beside it, and the count it states."""
        batch: Any
        if self._shared is not None:
            batch = RankBatch(self._shared.own, partial(self._join_batch, progress))
        elif self.whole is not None and self.imitated > self.whole.count:
            batch = RankBatch(slice(self.whole.count), partial(self._join_batch, progress))
        else:
            batch = self._join_batch(progress)
        progress.running = "your loss(representations, batch)"
        losses, aux = split_output(self._call(self._step.loss, representations, batch))
        progress.running = ""
        loss, count = read_loss(losses)
        loss = loss if self._part == 1 else loss * self._part
        if not self.leaves_are_known:
            self.workload.check_leaves(loss)
        progress.running = "the backward pass of your loss"
        self._run_backward(loss)
        progress.running = ""
        return loss.detach(), aux, count

    def _join_batch(self, progress: AccumulationState) -> Any:
        """All samples of this rank's step, as they were passed, in containers of their own."""
        given = {id(group.batch): group.batch for group in progress.groups}
        joined = cut_joined([*given.values()] if self.whole is None else [self.whole])
        if len(joined) > 1:
            raise InvalidArgument(
                f"the loss of WholeBatch needs the samples of a step in one batch, and these {len(given)} batches "
                f"cannot be joined: they differ in keys, dtypes or shapes; pass one batch"
            )
        [whole] = divide(Group(joined[0].batch, range(joined[0].batch.count)), joined[0].batch.count)
        return whole.take(lambda tensor: tensor, self.device.torch_device)

    def _join_kept(self, progress: AccumulationState) -> Any:
        """The representations of all micro-batches; none of them a leaf of its graph."""
        nest = self._kept[0].nest
        if self.imitated:
            self._imitate(self.imitated, progress)
            return tree_unflatten(_join([kept.tensors for kept in self._kept]), nest)
        own = _join([kept.tensors for kept in self._kept], progress)
        if self._shared is None:
            return tree_unflatten(own, nest)
        return tree_unflatten(_join(self._shared.gather(own, show_rows(own, nest), str(nest))), nest)

    def _imitate(self, samples: int, progress: AccumulationState) -> None:
        """Keep as many representations as a step of so many samples keeps."""
        first, missing = self._kept[0], samples - sum(progress.micro_batch_sizes)
        while missing > 0:
            copies = [None if one is None else _copy(one[:missing]) for one in first.tensors]
            self._kept.append(first._replace(tensors=copies))
            missing -= progress.micro_batches[0].size

    def _run_micro_batch(self, micro_batch: MicroBatch, progress: AccumulationState) -> Any:
        """Run the second pass of one micro-batch."""
        kept = self._kept[len(progress.aux)]
        kept.generators.restore()
        found, nest = self._represent(micro_batch, progress)
        if nest != kept.nest or [*map(_describe, found)] != [*map(_describe, kept.tensors)]:
            raise InvalidArgument(_OTHERS)
        pairs = [(one, first) for one, first in zip(found, kept.tensors, strict=True) if one is not None]
        self._are_same += [_is_same(one.detach(), first.detach()) for one, first in pairs if first is not None]
        trained = [(one, first.grad) for one, first in pairs if first is not None and first.grad is not None]
        if not self.leaves_are_known:
            for one, _ in trained:
                self.workload.check_leaves(one)
            self.leaves_are_known = True
        progress.phase, progress.running = "backward", "the backward pass of your representations"
        assert self._later is not None  # noqa: S101 - narrows for mypy
        self._later.restore()  # backward passes draw after the loss, as in one graph
        if trained:
            torch.autograd.backward([one for one, _ in trained], [rows for _, rows in trained])
        self._later = RandomState(self.device.torch_device)
        progress.running = ""
        self._join_sparse_rows(progress)
        return None

    @property
    def _step(self) -> WholeBatch:
        assert isinstance(self.workload.step, WholeBatch)  # noqa: S101 - narrows for mypy
        return self.workload.step

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.workload.watch() if self._is_watched else nullcontext():
            return function(*arguments)


def accumulation_for(workload: Workload) -> type[RankAccumulation]:
    """Return the class that accumulates the gradients of a workload whose parameters are not sharded."""
    return WholeBatchAccumulation if isinstance(workload.step, WholeBatch) else RankAccumulation


def _join(
    parts: Sequence[Sequence[torch.Tensor | None]], progress: AccumulationState | None = None
) -> list[torch.Tensor | None]:
    """Join representations of parts; those of a step's micro-batches in the order of its batch."""
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    numbered = () if progress is None else number_rows(progress.groups, progress.micro_batches)
    rows = [row for numbers in numbered for row in numbers]
    if rows != [*range(len(rows))]:
        places = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__))
        columns = [one if one is None else one.index_select(0, places.to(one.device)) for one in columns]
    return columns


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _refuse_draws(before: RandomState, after: RandomState) -> None:
    """Refuse a loss that draws, on several ranks: each would run another loss."""
    pairs = [(before.cpu, after.cpu), (before.of_device, after.of_device)]
    same = all(torch.equal(one, other) for one, other in pairs if one is not None and other is not None)
    if not same or pickle.dumps((before.python, before.numpy)) != pickle.dumps((after.python, after.numpy)):
        raise InvalidArgument(
            "the loss of WholeBatch drew random numbers, which differ between the ranks: draw in represent()"
        )


def _describe(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether all values are equal; nan equals nan, as in a step whose scaler finds it later."""
    return ((one == other) | ((one != one) & (other != other))).all()  # noqa: PLR0124 - nan alone is not itself


def _refuse_unlike(first: Kept, kept: Kept) -> None:
    """Refuse representations that cannot be joined with those of the first micro-batch."""
    if first.nest == kept.nest and [*map(_describe_row, first.tensors)] == [*map(_describe_row, kept.tensors)]:
        return
    one, other = (show_rows(its.tensors, its.nest) for its in (first, kept))
    raise InvalidArgument(
        f"represent() returned unlike representations of two micro-batches ({one} in one and {other} in another): "
        f"return rows of one shape, such as one vector a sample, or pad them to a fixed length"
    )


def _describe_row(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.requires_grad)
