"""Decides which remembered plan may replace a search, and whether a trial of its size confirms it."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch._formatting import format_bytes
from autobatch.planning.curve import growing_reserved
from autobatch.planning.division import Objective, useful_sizes
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import Record, Trial

_CHANGED = 0.05  # a peak that differs by more belongs to another step; the allocator's segments move it by less
_SEGMENTS = 2 * 20 * 2**20  # bytes by which two runs of one step may differ on CUDA
_QUESTION = ("max_micro_batch", "objective", "accumulate_in_float32")  # in which a plan must agree


class Wanted(Record):
    """The request of today, as far as a plan depends on it beside its fingerprint."""

    target_batch: int  # this rank's share, if there are several ranks
    max_micro_batch: int  # the user's bound, or the target
    objective: Objective
    accumulate_in_float32: bool
    limit_bytes: int  # bytes that a step may hold today; 0 if unknown


def choose_remembered(plans: Sequence[PlanRecord], wanted: Wanted) -> tuple[PlanRecord | None, str]:
    """Return the plan that answers the same request best within today's limit, and the newest of equal ones.

    ``plans`` have one fingerprint, the newest first. If none is usable, return the newest for this request with the
    reason, which is empty otherwise.
    """
    measured = [plan for plan in plans if not plan.predicted]
    asked = [plan for plan in measured if not _describe_question(plan, wanted)]
    usable = [plan for plan in asked if not _why_not(plan, wanted)]
    if usable:
        fewest_steps = wanted.objective == "throughput"
        return max(usable, key=lambda plan: plan.micro_batch_size if fewest_steps else 0), ""
    if asked:
        return asked[0], _why_not(asked[0], wanted)
    if measured:
        return measured[0], f"it was made for {_describe_question(measured[0], wanted)}"
    return None, ""


def why_not_confirmed(plan: PlanRecord, trial: Trial, limit_bytes: int) -> str:
    """Return the reason why the trial of a remembered plan's size does not confirm it; empty if it does.

    It is compared with the curve of the search, which each confirmed plan keeps: compared with the last confirmation,
    many small changes would pass one by one.
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
    return max(share, _SEGMENTS) if plan.device.kind == "cuda" else share  # other devices count each byte


def _describe_question(plan: PlanRecord, wanted: Wanted) -> str:
    samples = "target_batch" if plan.world_size == 1 else "samples of this rank"
    pairs = [
        (samples, sum(plan.micro_batch_sizes), wanted.target_batch),
        *((name, getattr(plan, name), getattr(wanted, name)) for name in _QUESTION),
    ]
    return ", and ".join(f"{name}={then!r}, not {now!r}" for name, then, now in pairs if then != now)


def _why_not(plan: PlanRecord, wanted: Wanted) -> str:
    """Return the reason why a plan is not used today: it needs more than there is, or a larger size may fit.

    The curve is a lower bound beyond the sizes that ran. If a size up to the next one failed then, a few more bytes
    would only make it fail again.
    """
    limit, then = wanted.limit_bytes, plan.searched_bytes
    if plan.peak_bytes > limit:
        return f"it needs {format_bytes(plan.peak_bytes)}, and the limit is {format_bytes(limit)} today"
    if (plan.checkpointing or plan.chunked_loss) and limit > then + _tolerance(plan, then):
        return f"the limit is {format_bytes(limit)} today and was {format_bytes(then)} then: fewer strategies may do"
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
