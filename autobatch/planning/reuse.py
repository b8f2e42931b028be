"""Which remembered plan may stand in for a search, and whether its one trial confirms it.

Covers the choice among plans of one fingerprint, and the reasons against each in words. Does not cover where plans are
kept (``ledger``) nor how the trial is run (``probe``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autobatch._formatting import format_bytes
from autobatch.planning.curve import growing_reserved
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.planner import Objective, useful_sizes
from autobatch.records import Record, Trial

__all__ = ["Recollection", "Wanted", "find_remembered", "why_not_confirmed"]

_CHANGED = 0.05
"""A peak that differs by more than this is of another step. The allocator's segments alone move it by less."""
_SEGMENTS = 2 * 20 * 2**20
"""Bytes by which two runs of one step may differ on a small budget: two segments of CUDA's allocator."""


class Wanted(Record):
    """What is asked for now, as far as a plan depends on it beside its fingerprint.

    Attributes:
        target_batch: Samples an optimizer step should see.
        max_micro_batch: The most samples that a trial may have: the user's own bound, or the target.
        objective: What the best size is.
        accumulate_in_float32: Whether narrow gradients are added up in float32.
        limit_bytes: What a step may hold today; 0 where the device cannot tell.
    """

    target_batch: int
    max_micro_batch: int
    objective: Objective
    accumulate_in_float32: bool
    limit_bytes: int


class Recollection(NamedTuple):
    """A plan to confirm; or ``None``, and why the newest one that answers the question does not serve."""

    plan: PlanRecord | None
    reason: str = ""
    passed_over: str = ""


def find_remembered(plans: Sequence[PlanRecord], wanted: Wanted) -> Recollection:
    """The plan that answers the same question best within today's limit; of equal ones the newest.

    A start under a lower limit leaves a plan with smaller micro-batches, which must not hide the better one.

    Args:
        plans: Of the same fingerprint, the newest first.
        wanted: What is asked for now.
    """
    asked = [plan for plan in plans if not plan.predicted and _asks_the_same(plan, wanted)]
    against = [_why_not(plan, wanted) for plan in asked]
    usable = [plan for plan, reason in zip(asked, against, strict=True) if not reason]
    if usable:
        fewest_steps = wanted.objective == "throughput"
        return Recollection(max(usable, key=lambda plan: plan.micro_batch_size if fewest_steps else 0))
    if asked:
        return Recollection(None, against[0], asked[0].id)
    other = next((plan for plan in plans if not plan.predicted), None)
    return Recollection(None, _describe_question(other, wanted), other.id) if other else Recollection(None)


def why_not_confirmed(plan: PlanRecord, trial: Trial, limit_bytes: int) -> str:
    """Why the trial of a remembered plan's size does not confirm it; empty where it does.

    The trial is held against the curve of the search, which is handed on from plan to plan: held against the last
    confirmation, many small changes would pass one by one.

    Args:
        plan: The remembered one.
        trial: Of its size.
        limit_bytes: What a step may hold today; 0 where the device cannot tell.
    """
    size = trial.micro_batch_size
    if trial.outcome == "oom":
        return f"{size} samples ran out of memory this time"
    if trial.outcome == "thrash":
        return f"{size} samples fit this time only because the allocator gave memory back"
    if trial.peak_reserved > limit_bytes:
        return f"{size} samples took {format_bytes(trial.peak_reserved)}, and the limit is {format_bytes(limit_bytes)}"
    for found, known in _compare(plan, trial):
        if abs(found - known) > _tolerance(plan, known):
            return (
                f"{size} samples took {format_bytes(found)} this time and {format_bytes(known)} then: something that "
                f"the fingerprint cannot see has changed"
            )
    return ""


def _compare(plan: PlanRecord, trial: Trial) -> Iterator[tuple[int, int]]:
    """What the trial took and what was found then: at the peak, and in the passes alone, which the update may hide."""
    size, curve = trial.micro_batch_size, plan.curve
    yield trial.peak_reserved, plan.peak_bytes if curve is None else curve.peak_reserved(size)
    if curve is not None:
        yield growing_reserved(trial), curve.growing_reserved(size)


def _tolerance(plan: PlanRecord, known: int) -> float:
    share = _CHANGED * known
    return max(share, _SEGMENTS) if plan.device.kind == "cuda" else share  # elsewhere bytes are counted one by one


def _describe_question(plan: PlanRecord, wanted: Wanted) -> str:
    """What else it was made for, in words."""
    names = ("target_batch", "max_micro_batch", "objective", "accumulate_in_float32")
    differing = [name for name in names if getattr(plan, name) != getattr(wanted, name)]
    told = (f"{name}={getattr(plan, name)!r}, not {getattr(wanted, name)!r}" for name in differing)
    return f"it was made for {', and '.join(told)}"


def _asks_the_same(plan: PlanRecord, wanted: Wanted) -> bool:
    return (
        plan.target_batch == wanted.target_batch
        and plan.max_micro_batch == wanted.max_micro_batch
        and plan.objective == wanted.objective
        and plan.accumulate_in_float32 == wanted.accumulate_in_float32
    )


def _why_not(plan: PlanRecord, wanted: Wanted) -> str:
    limit = wanted.limit_bytes
    if plan.peak_bytes > limit:
        return f"it needs {format_bytes(plan.peak_bytes)}, and the limit is {format_bytes(limit)} today"
    larger = _next_size(plan, wanted)
    if larger and _may_fit(plan, larger, limit):
        return (
            f"the limit is {format_bytes(limit)} today and was {format_bytes(plan.searched_bytes)} then: more than its "
            f"{plan.micro_batch_size} samples may fit"
        )
    return ""


def _may_fit(plan: PlanRecord, larger: int, limit: int) -> bool:
    """Whether a search would find a larger size now: only with more memory than it had then.

    Beyond the sizes that ran the curve is a lower bound. Where a size up to this one has failed, a few bytes more would
    only make it fail again.
    """
    if plan.curve is None or plan.curve.peak_reserved(larger) > limit:
        return False
    has_failed = 0 < plan.failing_size <= larger
    return limit > plan.searched_bytes + (_tolerance(plan, plan.searched_bytes) if has_failed else 0)


def _next_size(plan: PlanRecord, wanted: Wanted) -> int | None:
    """The next larger size that would need fewer steps, as far as memory is what bounds the size."""
    if wanted.objective == "memory":
        return None
    sizes = useful_sizes(wanted.target_batch, wanted.max_micro_batch)
    return next((size for size in sizes if size > plan.micro_batch_size), None)
