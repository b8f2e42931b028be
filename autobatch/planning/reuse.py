"""Decides which remembered plan may stand in for a search, and whether a trial of its size confirms it.

Does not cover where plans are stored (``ledger``) nor how a model is recognised (``step.model_info``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autobatch._formatting import format_bytes
from autobatch.planning.curve import growing_reserved
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.planner import Objective, useful_sizes
from autobatch.records import Record, Trial

__all__ = ["Remembered", "Wanted", "choose_remembered", "why_not_confirmed"]

_CHANGED = 0.05  # a peak that differs by more is of another step: the allocator's segments alone move it by less
_SEGMENTS = 2 * 20 * 2**20  # bytes by which two runs of one step may differ on a small budget, on CUDA
_QUESTION = ("max_micro_batch", "objective", "accumulate_in_float32")  # in which a plan must agree


class Wanted(Record):
    """What is asked for now, as far as a plan depends on it beside its fingerprint."""

    target_batch: int  # of this rank: its share, where there are several
    max_micro_batch: int  # the user's own bound, or the target
    objective: Objective
    accumulate_in_float32: bool
    limit_bytes: int  # what a step may hold today; 0 where that is not known


class Remembered(NamedTuple):
    """A plan to confirm; or ``None``, and why the newest one that answers the question does not serve."""

    plan: PlanRecord | None
    reason: str = ""
    passed_over: str = ""


def choose_remembered(plans: Sequence[PlanRecord], wanted: Wanted) -> Remembered:
    """The plan that answers the same question best within today's limit; of equal ones the newest.

    ``plans`` are of one fingerprint, the newest first. A start under a lower limit leaves a plan with smaller
    micro-batches, which must not hide the better one.
    """
    measured = [plan for plan in plans if not plan.predicted]
    asked = [plan for plan in measured if not _describe_question(plan, wanted)]
    usable = [plan for plan in asked if not _why_not(plan, wanted)]
    if usable:
        fewest_steps = wanted.objective == "throughput"
        return Remembered(max(usable, key=lambda plan: plan.micro_batch_size if fewest_steps else 0))
    if asked:
        return Remembered(None, _why_not(asked[0], wanted), asked[0].id)
    if measured:
        return Remembered(None, f"it was made for {_describe_question(measured[0], wanted)}", measured[0].id)
    return Remembered(None)


def why_not_confirmed(plan: PlanRecord, trial: Trial, limit_bytes: int) -> str:
    """Why the trial of a remembered plan's size does not confirm it; empty where it does.

    The trial is compared with the curve of the search, which is handed on from plan to plan: compared with the last
    confirmation, many small changes would pass one by one. ``limit_bytes`` is what a step may hold today.
    """
    size, curve, peak = trial.micro_batch_size, plan.curve, trial.peak_reserved
    if trial.outcome == "oom":
        return f"{size} samples ran out of memory this time"
    if trial.outcome == "thrash":
        return f"{size} samples fit this time only because the allocator gave memory back"
    if peak > limit_bytes:
        return f"{size} samples took {format_bytes(peak)}, and the limit is {format_bytes(limit_bytes)}"
    compared = [(peak, plan.peak_bytes)]
    if curve is not None:  # at the peak, and in the passes alone, which the update may hide
        compared = [(peak, curve.peak_reserved(size)), (growing_reserved(trial), curve.growing_reserved(size))]
    for found, known in compared:
        if abs(found - known) > _tolerance(plan, known):
            return (
                f"{size} samples took {format_bytes(found)} this time and {format_bytes(known)} then: something that "
                f"the fingerprint cannot see has changed"
            )
    return ""


def _tolerance(plan: PlanRecord, known: int) -> float:
    share = _CHANGED * known
    return max(share, _SEGMENTS) if plan.device.kind == "cuda" else share  # elsewhere bytes are counted one by one


def _describe_question(plan: PlanRecord, wanted: Wanted) -> str:
    """What else the plan was made for; empty where it answers the same question."""
    samples = "target_batch" if plan.world_size == 1 else "samples of this rank"
    pairs = [
        (samples, sum(plan.micro_batch_sizes), wanted.target_batch),
        *((name, getattr(plan, name), getattr(wanted, name)) for name in _QUESTION),
    ]
    return ", and ".join(f"{name}={then!r}, not {now!r}" for name, then, now in pairs if then != now)


def _why_not(plan: PlanRecord, wanted: Wanted) -> str:
    """Why a plan cannot serve today: it needs more than there is, or there is enough to save a step.

    Beyond the sizes that ran the curve is a lower bound. Where a size up to the next one has failed, a few bytes more
    would only make it fail again.
    """
    limit, then = wanted.limit_bytes, plan.searched_bytes
    if plan.peak_bytes > limit:
        return f"it needs {format_bytes(plan.peak_bytes)}, and the limit is {format_bytes(limit)} today"
    sizes = useful_sizes(wanted.target_batch, wanted.max_micro_batch)
    larger = next((size for size in sizes if size > plan.micro_batch_size), None)
    if wanted.objective == "memory" or larger is None or plan.curve is None:
        return ""
    has_failed = 0 < plan.failing_size <= larger
    if limit <= then + (_tolerance(plan, then) if has_failed else 0) or plan.curve.peak_reserved(larger) > limit:
        return ""
    return (
        f"the limit is {format_bytes(limit)} today and was {format_bytes(then)} then: more than its "
        f"{plan.micro_batch_size} samples may fit"
    )
