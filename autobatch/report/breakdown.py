"""Divides the budget into parts: where the memory goes at the planned size."""

from __future__ import annotations

from typing import NamedTuple

from autobatch._formatting import format_bytes
from autobatch.planning.curve import ran
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import Trial


class Part(NamedTuple):
    """A share of the budget: a word, more than 0 bytes, and a description."""

    key: str
    size_bytes: int
    about: str


def held_bytes(trial: Trial) -> int:
    """Return a trial's peak, or its first bytes if it ran out of memory before a reading."""
    return max(trial.peak_reserved, trial.peak_allocated, trial.resident_bytes)


def chosen_trial(plan: PlanRecord) -> Trial | None:
    """Return the trial of the planned size with the largest peak, which is the plan's."""
    same = [trial for trial in plan.longest_trials if trial.micro_batch_size == plan.micro_batch_size and ran(trial)]
    return max(same, key=held_bytes, default=None)


def memory_parts(plan: PlanRecord) -> tuple[Part, ...]:
    """Return the memory of the chosen trial (or the predicted peak), the rest of the limit, and the headroom.

    They add up to the budget, or to the peak if that is larger or the budget is unknown.
    """
    trial = chosen_trial(plan)
    used: tuple[Part, ...] = (Part("peak", plan.peak_bytes, "peak: predicted, nothing was run at this size"),)
    if trial is not None and held_bytes(trial):
        used = _parts_of_trial(trial, plan)
    peak = sum(part.size_bytes for part in used)
    within = min(peak, plan.budget_bytes)
    headroom = min(plan.headroom_bytes, plan.budget_bytes - within)
    left = plan.budget_bytes - within - headroom
    parts = (
        *used,
        Part("free", left, "free: within the limit, not needed at this size"),
        Part("headroom", headroom, "headroom: left free on purpose"),
    )
    return tuple(part for part in parts if part.size_bytes > 0)


def _parts_of_trial(trial: Trial, plan: PlanRecord) -> tuple[Part, ...]:
    """Two moments of one trial on top of each other: the optimizer's step counts with what it needs beyond the first.

    The backward's peak and the optimizer's are not at once, so only the higher one meets the limit.
    """
    tensors = max(trial.peak_allocated, trial.resident_bytes, trial.optimizer_peak)
    backward = trial.peak_allocated if trial.backward_allocated is None else trial.backward_allocated
    beyond = max(trial.optimizer_peak - max(backward, trial.resident_bytes), 0)
    state = f" ({format_bytes(plan.state_bytes)})" if plan.state_bytes else ""
    peak = f" (its peak: {format_bytes(trial.optimizer_peak)})" if trial.optimizer_peak else ""
    growing = tensors - trial.resident_bytes - beyond
    resident = f"resident: parameters, buffers, optimizer state{state}, the batch"
    return (
        Part("resident", trial.resident_bytes, resident),
        Part("passes", growing, "on top in forward and backward: gradients, activations, temporaries"),
        Part("update", beyond, f"more than that in the optimizer's step{peak}"),
        Part("unused", held_bytes(trial) - tensors, "held by the allocator, in no tensor"),
    )
