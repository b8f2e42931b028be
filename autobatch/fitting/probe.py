"""Runs and measures one micro-batch size under the conditions of training.

1. The first step of two samples makes the optimizer's state and loads kernels. Its writes are recorded.
2. A trial accumulates two micro-batches with the code that trains, gradients and optimizer state resident, and then
   runs the optimizer's own step on the user's tensors.
3. After each of them the state is rewound, from copies in host memory. Copies on the device would move the limit that
   is measured, and a fake trace does not know custom optimizers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autobatch._user_errors import contextmanager, note_where
from autobatch.batch.samples import Layout
from autobatch.batch.tree import count_bytes, map_tensors, tensors_of
from autobatch.distributed.division import SharedTrials
from autobatch.distributed.sharded import gathered_tensors, is_tried, unsharded_parameters
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.planning.next_trial import FIRST_SIZE
from autobatch.records import IN_EACH, MemoryUsage, Phase, Saving, Summing, Trial
from autobatch.step.model_info import find_savings, is_compiled, watch_savings
from autobatch.step.whole_batch import PerRank, WholeBatch
from autobatch.step.workload import Workload, read_output
from autobatch.torch_internals.storages import bytes_of
from autobatch.training.accumulation_state import AccumulationState
from autobatch.training.update import count_state, is_making_state, make_state
from autobatch.training.weights import check_names
from autobatch.training.whole_batch import WholeBatchAccumulation, accumulation_for
from autobatch.undo.training_state import TrainingState
from autobatch.undo.written_memory import WrittenMemory

_SLOWED_BY_SPILLS = 4  # a PCIe link has less than a tenth of a card's bandwidth; no larger size is so slow otherwise
_SLOW_SECONDS = 0.25  # of a shorter trial the time says little
_LITTLE = 0.001  # of a step's memory may outlive it, such as a loss in an attribute, without another trial


@dataclass
class Readings:
    """Memory and time of one trial so far. Fields that a ``Trial`` has too mean the same there."""

    resident: int = 0
    held: int = 0
    after_forward: int = 0  # bytes in tensors after the forward pass of the first step
    backward: MemoryUsage = field(default_factory=MemoryUsage)
    optimizer: MemoryUsage = field(default_factory=MemoryUsage)
    retries_before: int = 0  # how often the allocator had freed its cache before the trial
    seconds: float = 0.0
    update_seconds: float = 0.0
    phase: Phase = "forward"

    @contextmanager
    def read(self, device: Device, part: str) -> Iterator[None]:
        """Read the peak of a block as that of a part: ``"backward"`` or ``"optimizer"``."""
        device.reset_peak()
        try:
            yield
            device.synchronize()
        finally:
            setattr(self, part, device.usage())

    def summarise(
        self, size: int, device: Device, limit_bytes: int, parameters: Sequence[torch.Tensor], *, has_ended: bool
    ) -> Trial:
        retries = max(device.usage().alloc_retries - self.retries_before, 0)  # the step may reset the statistics
        # The backward pass cannot hold all gradients, whatever the size is.
        gradients = sum(bytes_of(parameter) for parameter in parameters if parameter.requires_grad)
        is_hopeless = self.phase == "backward" and self.resident < limit_bytes < self.resident + gradients
        phase: Phase = "gradients" if is_hopeless else self.phase
        return Trial(
            micro_batch_size=size,
            outcome="oom" if has_ended else "thrash" if retries > 0 else "fits",
            peak_allocated=max(self.backward.peak_allocated, self.optimizer.peak_allocated),
            peak_reserved=max(self.backward.peak_reserved, self.optimizer.peak_reserved),
            optimizer_peak=self.optimizer.peak_allocated,
            alloc_retries=retries,
            seconds=self.seconds,
            update_seconds=self.update_seconds,
            backward_allocated=self.backward.peak_allocated,
            backward_reserved=self.backward.peak_reserved,
            resident_bytes=self.resident,
            held_bytes=self.held,
            ended_in=phase if has_ended else None,
        )


@dataclass
class Probe:
    """Runs trials of one workload on one device, and undoes each."""

    workload: Workload
    example: Layout  # every size repeats its samples
    device: Device
    limit_bytes: int
    state: TrainingState
    in_float32: bool = True  # as in Accumulation
    target: int = 0  # samples in a step, of which a trial runs two micro-batches; 0: no more than those
    target_of_all: int = 0  # and on all ranks, whose rows the loss of ``WholeBatch`` compares
    shared: SharedTrials = field(default_factory=lambda: SharedTrials(None))  # trials of the other ranks
    summing: Summing = IN_EACH  # of gradients of sharded parameters
    errors: dict[int, str] = field(default_factory=dict)  # for each size that ran out of memory, the first line
    state_bytes: int = 0  # the most that the optimizer's state has taken
    trained: int = 0  # numbers that the optimizer has moved, also those of lazy modules
    aux_bytes: int = 0  # the most that a step has returned beside the loss of one micro-batch
    savings: set[Saving] = field(default_factory=set)  # ways in which the step already saves memory
    _written: WrittenMemory = field(default_factory=WrittenMemory)
    _now: Readings = field(default_factory=Readings)
    _best_rate: float = 0.0  # samples a second, of the trials that fit
    _is_warm: bool = False
    _to_watch: int = 2  # steps that may not do the training loop's work: the first one, and that of the first trial
    _leaves_are_known: bool = False
    _holds_activations: bool = False
    _whole: Layout | None = None

    def __post_init__(self) -> None:
        """Drop gradients, so that the first attempt begins like the later ones."""
        # Writes of compiled code are not recorded in trials, since it would run eagerly.
        self._is_compiled = is_compiled(self.workload.model, self.workload.step)
        self._sees_all = is_tried() or not self.shared.are_shared  # else torch's own tensors look like the step's
        self.savings = find_savings(self.workload.model)
        self.state.drop_gradients()

    def run(self, size: int) -> Trial:
        """Try one size. Running out of memory is an outcome with its measurements; other errors are raised."""
        self.device.watch(self.workload.resident_tensors())
        usage = self.device.usage()
        self._now, reason = Readings(resident=usage.allocated, retries_before=usage.alloc_retries), None
        if not self._is_warm:
            reason = self._run_first_step(min(size, FIRST_SIZE))
        if reason is None:
            was_known = self._holds_activations
            reason = self._attempt(self._measure, size)
            self._holds_activations = self.shared.any(self._holds_activations)
            if self._holds_activations and not was_known:  # once more, now that they are known to outlive their step
                reason = self._attempt(self._measure, size)
        if reason is not None:
            self.errors[size] = reason
        parameters = self.workload.parameters()
        trial = self._now.summarise(size, self.device, self.limit_bytes, parameters, has_ended=reason is not None)
        return self.shared.agree(self._judge_speed(trial))

    def examine(self, action: Callable[[Any], object], size: int) -> str | None:
        """Run something else on so many samples inside the limit, and undo it; return the reason of an OOM.

        It runs twice: first its writes are recorded, which takes time of its own.
        """
        self.device.watch(self.workload.resident_tensors())
        reason = None
        for records in (True, False):
            run = partial(self._run_on_copies, action)
            reason = reason or self._attempt(run, size, records=records)
        return reason

    def _run_on_copies(self, action: Callable[[Any], object], size: int) -> None:
        action(self._copy_batch(size).batch)

    def find_smallest(self) -> int:
        """Return the fewest samples whose forward pass runs: 1, or 2 if one alone raises an error (trials run two)."""
        handled = sys.exc_info()[1]
        try:
            self._attempt(lambda size: self.workload.run(self._copy_batch(size).batch), 1, records=True)
        except Exception as error:
            if is_oom(error, handled=handled):
                raise
        else:
            return 1
        self.device.reclaim()  # after the ``except`` block, whose error holds the tensors of the failed pass
        return 2

    def measure_forward(self) -> int | None:
        """Run the first step now; return the bytes that its forward pass leaves, ``None`` after an OOM."""
        self.device.watch(self.workload.resident_tensors())
        self._now = Readings(resident=self.device.usage().allocated)
        if self._is_warm or self._run_first_step(FIRST_SIZE) is not None:
            return None
        return self._now.after_forward - self._now.resident

    def _attempt(self, action: Callable[[int], object], size: int, *, records: bool = False) -> str | None:
        """Run one part of a trial from the user's own state, and rewind that; return the reason of an OOM.

        ``records`` copies tensors outside the model before the step writes into them. Recording takes time, so
        measured steps do not record.
        """
        if not self.workload.model.training:  # restored so; in a model in train mode single layers may be in eval mode
            self.workload.model.train()
        reason, handled, records = None, sys.exc_info()[1], records and self._sees_all
        try:
            with (
                self.shared.block(),
                self.device.limit(self.limit_bytes),
                self.state.record(gathered_tensors(self.workload.model)) if records else nullcontext(),
            ):
                action(size)
        except DoesNotFit as ended:
            reason = str(ended)
        except Exception as error:
            if not is_oom(error, handled=handled):
                self.state.rewind()
                raise
            reason = describe_error(error, handled=handled)
        # After the ``except`` block, whose error holds the attempt's tensors; outside the limit, as copies count.
        self.state.rewind()
        self.device.reclaim()
        return reason

    def _run_first_step(self, size: int) -> str | None:
        """Run the step before the first trial, and record its writes; return the reason of an OOM."""
        before = self.device.usage()
        # The device's bytes in the state of a resumed run; state on another device is not counted.
        others = sum(bytes_of(tensor) for tensor in (*self.workload.parameters(), *self.workload.model.buffers()))
        resumed = min(self.workload.state_bytes(), max(before.allocated - others, 0))
        types = {parameter.device.type for parameter in self.workload.parameters()}
        with nullcontext() if self._is_compiled else watch_savings(self.savings, *types):
            reason = self._attempt(self._warm_up, size, records=True)
        if reason is None and self._is_compiled:  # recorded, it ran eagerly: now it is compiled
            reason = self._attempt(self._warm_up, size)
        if reason is None:
            self._is_warm = True
            # As the device counts: a substitute for a device does not count the optimizer's real tensors.
            made = min(self.workload.state_bytes() - resumed, self.device.usage().allocated - before.allocated)
            self.state_bytes = resumed + max(made, 0)
        else:
            self.state.reset_optimizer()
            self.device.reclaim()
        return reason

    def _warm_up(self, size: int) -> None:
        batch = self._copy_batch(size)
        with self._now.read(self.device, "backward"):
            self._accumulate([batch], size)
            if self.workload.optimizer is not None:
                self._now.phase = "optimizer state"
                make_state(self.workload.optimizer)
            self._update()

    def _measure(self, size: int) -> None:
        batch, now = self._make_batch(size), self._now
        before = self.device.usage()
        now.resident, now.retries_before = before.allocated, before.alloc_retries
        if self._holds_activations:
            # Those of the step before are still held.
            with now.read(self.device, "backward"):
                self._accumulate([batch], size)
                self._drop_gradients()
            begun = self.device.usage().allocated
            now.resident = min(before.allocated, begun)  # before it there may have been an earlier trial's
            now.held = begun - now.resident
        batches = self._make_batches(batch)
        started = time.perf_counter()
        with now.read(self.device, "backward"):
            accumulated = self._accumulate(batches, size)
        updating = time.perf_counter()
        with now.read(self.device, "optimizer"):
            self._update()
        now.update_seconds = time.perf_counter() - updating
        del accumulated  # not before: in training its loss is held during the optimizer's step, too
        passes = (updating - started) * 2 * size / sum(one.count for one in batches)
        now.seconds = passes + now.update_seconds
        self._drop_gradients()
        left, grown = self.device.usage().allocated - before.allocated, now.backward.peak_allocated
        self._holds_activations = self._holds_activations or left > _LITTLE * (grown - before.allocated)

    def _make_batches(self, batch: Layout) -> Sequence[Layout]:
        """The two micro-batches of a trial; one where ``WholeBatch`` would run its whole batch in one."""
        if not isinstance(self.workload.step, WholeBatch):
            return [batch, batch]
        rest = self.target - batch.count
        return [batch, self._make_batch(min(batch.count, rest))] if rest > 0 else [batch]

    def _accumulate(self, batches: Sequence[Layout], size: int) -> AccumulationState:
        user, passes_left = self.workload.step, len(batches)
        self.shared.expect(passes_left, self.summing)

        def run(model: nn.Module, samples: Any) -> tuple[torch.Tensor, Any]:
            nonlocal passes_left
            self.shared.begin_micro_batch()
            self._now.phase = "forward"
            terms, aux = read_output(user(model, samples))  # not call_step, which runs this function
            if not self._leaves_are_known:
                check_names(terms, self.workload.weights_of(samples, size))
            if not self._is_warm:
                self._now.after_forward = self.device.usage().allocated
            self._now.phase, passes_left = "backward", passes_left - 1
            first, *others = [term.loss for term in terms]
            return sum(others, start=first), aux

        # By samples: a trial has to run a micro-batch of the example even if its labels are all ignored.
        # The loss of a ``PerRank`` compares no rows of other ranks.
        compared = self.target if isinstance(user, PerRank) else max(self.target, self.target_of_all)
        is_split = len(batches) > 1 or compared > self.target
        passes = self._note_passes(user, is_split=is_split) if isinstance(user, WholeBatch) else run
        workload = self.workload.around(passes, weigh=None)
        accumulation = accumulation_for(workload)(
            workload,
            self.device,
            in_float32=self.in_float32,
            leaves_are_known=self._leaves_are_known or not self._sees_all,
            stand_ins=partial(unsharded_parameters, self.workload.model),
            written=self._written,
            records=not self._is_warm and self._sees_all,
            watched=self._to_watch,
            stands_for=-(-self.target // size) if self.target > size else 0,
        )
        if isinstance(accumulation, WholeBatchAccumulation) and is_split:
            accumulation.imitated, accumulation.whole = compared, self._grow_whole()
        self._now.phase = "forward"
        try:
            accumulated = accumulation.run(batches, size)
        except DoesNotFit:
            raise
        except Exception:
            if passes_left == 0:
                self._now.phase = "gradients"  # after the last pass they are rounded, or added to earlier ones
            raise
        assert accumulated is not None  # noqa: S101 - all samples count here
        self._leaves_are_known, self._to_watch = True, max(self._to_watch - 1, 0)
        self.aux_bytes = max(self.aux_bytes, *(count_bytes(aux) for aux in accumulated.aux))
        return accumulated

    def _note_passes(self, user: WholeBatch, *, is_split: bool) -> WholeBatch:
        """Return the same step, which notes what runs now. A batch that runs whole has one backward pass."""

        def represent(model: nn.Module, samples: Any) -> Any:
            self._now.phase = "forward"
            returned = user.represent(model, samples)
            self._now.phase = "backward"
            return returned

        def loss(representations: Any, batch: Any) -> Any:
            if is_split:
                self._now.phase = "loss"
            return user.loss(representations, batch)

        return type(user)(represent, loss)

    def _grow_whole(self) -> Layout:
        """The batch of a whole step: its loss is run, and not only that of the two micro-batches."""
        if self._whole is None:
            self._whole = self._make_batch(self.target)
        return self._whole

    def _update(self) -> None:
        optimizer = self.workload.optimizer
        if optimizer is None:
            return
        before, handled = count_state(optimizer), sys.exc_info()[1]
        self._now.phase = "update"
        try:
            optimizer.step()
        except Exception as error:
            if is_making_state(optimizer, before):
                self._now.phase = "optimizer state"
            if not is_oom(error, handled=handled):
                note_where(error, "your optimizer.step()", self.workload.called_by)
            raise
        self.trained = self.workload.count_trained()

    def _judge_speed(self, trial: Trial) -> Trial:
        """Change the outcome of a very slow trial to ``thrash`` on a card that may move memory to the host."""
        if not getattr(self.device, "may_spill", False) or trial.outcome != "fits":
            return trial
        rate, self._best_rate = trial.samples_per_second, max(self._best_rate, trial.samples_per_second)
        is_slow = trial.seconds > _SLOW_SECONDS and 0 < rate < self._best_rate / _SLOWED_BY_SPILLS
        return trial.model_copy(update={"outcome": "thrash"}) if is_slow else trial

    def _drop_gradients(self) -> None:
        for parameter in self.workload.parameters():  # a forward pass may have made some
            parameter.grad = None

    def _copy_batch(self, size: int) -> Layout:
        batch = self._make_batch(size)
        return Layout(map_tensors(batch.batch, self._copy), batch.count, batch.lists)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.move_tensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)

    def _make_batch(self, size: int) -> Layout:
        batch = self.example.grown(size)
        self.device.watch(tensors_of(batch.batch))
        return batch
