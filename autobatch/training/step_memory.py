"""Chooses the size of micro-batches from the memory that is free, and enforces the budget while a step runs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from autobatch._formatting import format_bytes
from autobatch._user_errors import contextmanager
from autobatch.batch.cut import Division
from autobatch.batch.lengths import PlannedLengths
from autobatch.batch.samples import Layout, MicroBatch
from autobatch.errors import DoesNotFit
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.device import Device
from autobatch.plan import Plan
from autobatch.planning.division import compiled_ladder, eager_ladder
from autobatch.planning.pacing import CLEAN_STEPS, Pace
from autobatch.planning.sizes_by_length import scale_curve, scale_ladder
from autobatch.planning.summing import SummingPace
from autobatch.records import Summing
from autobatch.report.advice import PHASES
from autobatch.step.model_info import explain_smallest, is_compiled
from autobatch.step.workload import Workload
from autobatch.strategies.checkpointing import explain_recomputed, recompute_more
from autobatch.torch_internals.storages import bytes_of
from autobatch.training.accumulation_state import Shortage
from autobatch.training.step_events import StepEvents

_LOG = logging.getLogger("autobatch")

_WIDE_BYTES = 4  # of a number in float32

_FIRST_STEPS = 2
"""Number of steps, from the start or from a loaded state, in which a CPU's default budget is enforced.

The optimizer makes its state in the first and has it in the second."""


class StepMemory:
    """The memory of a Runner's steps, and the size of micro-batches that follows from it.

    Attributes:
        pace: Size of the next micro-batches, and why; replaced whenever it changes.
        recomputes_more: Whether more blocks are recomputed than the plan says.
        first_step: Number of the step at which the Runner began, or where a loaded state was.
        peak_bytes: Most bytes in tensors at once in the last measured step.
        held_bytes: Most bytes that the allocator held at once in that step.
    """

    def __init__(self, plan: Plan, workload: Workload, device: Device, division: Division, events: StepEvents) -> None:
        self._plan, self._workload, self._device = plan, workload, device
        self._division, self._events = division, events
        self._free = _FreeMemory(plan, workload, device)
        self.pace, self.summing = self.make_pace(plan.smallest_micro_batch), SummingPace.of(plan)
        self.recomputes_more = False
        self._most_bytes: int | None = None  # that the running step can reach
        self.first_step, self.peak_bytes, self.held_bytes, self._has_thrashed = 0, 0, 0, False

    def make_pace(self, smallest: int) -> Pace:
        """Return the pace of the first step, of micro-batches of at least so many samples.

        By length the sizes are those at the shortest samples; others follow in proportion.
        """
        plan, division = self._plan, self._division
        size, compiles = plan.micro_batch_size, is_compiled(self._workload.model, self._workload.step)
        if isinstance(division, PlannedLengths):
            most, curve = division.sizes[0].micro_batch_size, scale_curve(plan.curve, division.sizes)
            return Pace(scale_ladder(most), most, curve, min(smallest, most), patience=CLEAN_STEPS if compiles else 0)
        if compiles:
            return Pace(compiled_ladder(size), size, plan.curve, smallest, patience=CLEAN_STEPS)
        return Pace(eager_ladder(sum(plan.micro_batch_sizes), size), size, plan.curve, smallest)

    def limit(
        self, step: int, layouts: Sequence[Layout], buckets: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Enforce the budget and measure the peak; on a CPU, where that takes time, not in every step."""
        self._has_thrashed, self._most_bytes = False, None
        is_first = step - self.first_step < _FIRST_STEPS
        self._free.is_counted = is_first or self._plan.budget_passed or not isinstance(self._device, CpuDevice)
        if not self._free.is_counted:  # nothing reads the free memory: the size is the one that the last steps allow
            self.change(self.pace.before_step(None, None), step)
            return nullcontext()
        return self._measure(step, layouts, buckets)

    @contextmanager
    def _measure(self, step: int, layouts: Sequence[Layout], buckets: Sequence[torch.Tensor]) -> Iterator[None]:
        device = self._device
        device.watch(self._workload.resident_tensors())
        device.watch(buckets)
        for layout in layouts:
            device.watch(layout.tensors())
        with device.limit(self._plan.budget_bytes):
            self.change(self._look_ahead(), step)
            device.reset_peak()
            before = device.usage()
            yield
            usage = device.usage()
        self.peak_bytes, self.held_bytes = usage.peak_allocated, usage.peak_reserved
        self._has_thrashed = usage.alloc_retries > before.alloc_retries

    def _look_ahead(self) -> Pace:
        """Return the pace for this step: smaller only if too little is free even after all caches are given back."""
        self._most_bytes, limit_bytes = self._free.read()
        pace = self.pace.before_step(self._most_bytes, limit_bytes)
        if pace.size >= self.pace.size:
            return pace
        self._device.reclaim()
        self._most_bytes, limit_bytes = self._free.read()
        return self.pace.before_step(self._most_bytes, limit_bytes)

    def read_peaks(self) -> dict[str, int]:
        """Return the peaks of the step so far, or of the last one that was measured."""
        if self._free.is_counted:
            usage = self._device.usage()
            self.peak_bytes, self.held_bytes = usage.peak_allocated, usage.peak_reserved
        return {"peak_bytes": self.peak_bytes, "held_bytes": self.held_bytes}

    def begin(self, smallest: int) -> int:
        """Return the size with which a step begins, of at least so many samples."""
        if smallest > self.pace.smallest:  # of sharded parameters all ranks learn it inside a step
            self.pace = replace(self.pace, smallest=smallest)
        return self.pace.size

    def choose_summing(self) -> Summing:
        """Return how often this rank's memory lets gradients of sharded parameters be summed in the step."""
        need = self.pace.curve.peak_reserved(self.pace.size) if self.pace.curve is not None else 0
        return self.summing.choose(need, self._most_bytes)

    def check_update(self, summed: Collection[torch.Tensor] = ()) -> None:
        """Refuse an update that does not fit, while the step can still be undone; see ``Update.make_state``."""
        self._free.check_update(_WIDE_BYTES * sum(parameter.numel() for parameter in summed))

    def after_shortage(self, step: int, shortage: Shortage) -> int:
        self._device.reclaim()
        if not shortage.failed_size:  # this rank did not run out of memory
            return self.pace.size
        if shortage.has_held_sums:
            self.summing = self.summing.after_shortage()
            self._events.report_retry(step, shortage, self.pace.size, self._device.usage().allocated)
            return self.pace.size
        used, least = self._device.usage().allocated, max(shortage.least_size, self.pace.smallest)
        if shortage.failed_size <= least and shortage.ended_in != "loss" and (more := self.recompute_more()):
            self._events.report_retry(step, shortage, self.pace.size, used, recomputed=more)
            return self.pace.size
        if shortage.failed_size <= least:
            raise DoesNotFit(_explain_shortage(step, shortage, used, self._plan, self._workload))
        _, limit_bytes = self._free.read()
        self.pace = self.pace.after_shortage(shortage.failed_scale, limit_bytes, least)
        self._events.report_retry(step, shortage, self.pace.size, used)
        return self.pace.size

    def recompute_more(self) -> int:
        """Recompute all blocks that may be, from now on; return the number of those that were not recomputed yet."""
        more = recompute_more(self._workload)
        self.recomputes_more = self.recomputes_more or more > 0
        return more

    def after_step(self, next_step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Choose the next step's size, after these micro-batches have run."""
        if self.summing.left:
            self.summing = self.summing.after_step()
        largest = max([micro_batch.scale for micro_batch in micro_batches], default=0)
        self.change(self.pace.after_step(largest, thrashed=self._has_thrashed), next_step)

    def change(self, pace: Pace, step: int) -> None:
        """Take another pace, from this step on; report it if the size is another."""
        if pace.size > self.pace.size:
            self._device.reclaim()  # cached segments of the smaller sizes would stay beside those of this one
        if pace.size != self.pace.size:
            self._events.report_pace(step, self.pace.size, pace)
        self.pace = pace


@dataclass
class _FreeMemory:
    """The memory that steps of one plan can use on one device, in bytes."""

    plan: Plan
    workload: Workload
    device: Device
    is_counted: bool = True  # whether the device counts the running step
    _state_is_made: bool = False
    _has_warned: bool = False
    _parameters: int = 0  # that the optimizer trained in the last uncounted step

    def __post_init__(self) -> None:
        """Find the most that trials held of the plan's size: larger ones held more activations."""
        trials = self.plan.longest_trials
        trials = tuple(one for one in trials if one.micro_batch_size <= self.plan.micro_batch_size) or trials
        self._resident = max((one.resident_bytes + one.held_bytes for one in trials), default=0)
        # Now the model may hold activations of this step and of the one before, and the update lets go of the latter.
        before = max((one.resident_bytes + 2 * one.held_bytes for one in trials), default=0)
        self._of_update = max((one.optimizer_peak for one in trials), default=0) - before

    def read(self) -> tuple[int | None, int | None]:
        """Return what a step can reach at most, and that less the headroom; ``None`` if nothing was measured."""
        if not self.device.measures or not self.plan.trials:
            return None, None
        expected = self._resident - self._missing_state() + self._gradient_bytes()
        used, budget = self._reading()
        most = budget - max(used - expected, 0)
        return max(most, 0), max(most - self.plan.headroom_bytes, 0)

    def check_update(self, to_be_freed: int) -> None:
        """Raise DoesNotFit if the update does not fit even without caches, while the step can still be undone.

        ``to_be_freed`` is what sums of gradients in float32 take until then. The trials measured the update. If the
        optimizer trains more parameters now, it needs more in proportion.
        """
        if not self.is_counted:  # to count what each parameter holds takes as long as all else here
            parameters, self._parameters = self._parameters, self.workload.count_trained_parameters()
            if self._has_warned or self._parameters == parameters:
                return
        trained, planned = self.workload.count_trained(), self.plan.trained
        has_grown = 0 < planned < trained
        if has_grown and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the optimizer trains %d numbers now, %d when the plan was made: whether an update fits is estimated "
                "from the measured one; run fit() again",
                trained,
                planned,
            )
        if not self.is_counted or not self.device.measures or not any(one.optimizer_peak for one in self.plan.trials):
            return
        growth = trained / planned if has_grown else 1.0
        need = int(self._of_update * growth) - self._gradient_bytes() + self._missing_state(growth)
        need -= to_be_freed
        used, budget = self._reading()
        if used + need > budget:
            self.device.reclaim()
            used, budget = self._reading()
        if used + need > budget:
            grown = f"the optimizer trains {trained} numbers now, {planned} when the plan was made, and "
            raise DoesNotFit(
                f"the update does not fit: {grown if has_grown else ''}the optimizer's step needs about "
                f"{format_bytes(max(need, 0))} beside {format_bytes(used)}, and the budget is {format_bytes(budget)} "
                f"now; the step was undone: free memory, or run fit() again with a larger budget="
            )

    def _missing_state(self, growth: float = 1.0) -> int:
        if self._state_is_made and growth == 1:
            return 0  # reading the state takes most of the time of all this
        missing = max(int(self.plan.state_bytes * growth) - self.workload.state_bytes(), 0)
        self._state_is_made = self._state_is_made or missing == 0
        return missing

    def _reading(self) -> tuple[int, int]:
        return self.device.usage().allocated, self.device.limit_bytes(self.plan.budget_bytes)

    def _gradient_bytes(self) -> int:
        return sum(bytes_of(p.grad) for p in self.workload.parameters() if p.grad is not None)


def _explain_shortage(step: int, shortage: Shortage, used_bytes: int, plan: Plan, workload: Workload) -> str:
    """Explain why a step does not fit if its micro-batch cannot be smaller."""
    size = shortage.failed_size
    if shortage.ended_in == "loss":
        return (
            f"step {step} ran out of memory {PHASES['loss']}, which no smaller micro-batch makes smaller; "
            f"{format_bytes(used_bytes)} of a budget of {format_bytes(plan.budget_bytes)} were held before it; "
            f"{shortage.reason}; the step was undone: free memory, pass fewer samples a step, or compute the loss in "
            f"chunks of rows"
        )
    samples = "one sample" if size == 1 else f"{size} samples, the fewest it can have"
    reason = shortage.reason if size == 1 else f"{shortage.reason}; {explain_smallest(workload.model)}"
    return (
        f"step {step} ran out of memory {PHASES[shortage.ended_in]} at a micro-batch of {samples}; "
        f"{format_bytes(used_bytes)} of a budget of {format_bytes(plan.budget_bytes)} were held before it; {reason}"
        f"{explain_recomputed(workload)}; the step was undone: free memory or pass a larger budget="
    )
