"""Checks a Runner's plan, and writes the errors of a step that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from autobatch._formatting import format_bytes, name_type, plural
from autobatch.batch.cut import Group
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.plan import Plan
from autobatch.planning.division import least_size
from autobatch.records import DeviceInfo
from autobatch.report.advice import PHASES
from autobatch.step.batch_norm import explain_smallest
from autobatch.training.accumulation_state import Shortage

__all__ = [
    "check_plan",
    "check_rank",
    "device_differences",
    "explain_no_retry",
    "explain_shortage",
    "refuse_larger_micro_batches",
]

_SAME_MEMORY = 0.03
"""By how much of its memory a card may differ from the one of a prediction, which knows cards by other names."""


def check_plan(plan: Any, weigh: Any) -> None:
    """Refuse an object that is not a plan, or a plan that was made with ``weigh`` if the Runner has none.

    Raises:
        InvalidArgument: It cannot be used.
    """
    if not isinstance(plan, Plan):
        if isinstance(getattr(plan, "plan", None), Plan) or type(plan).__name__ == "Prediction":
            raise InvalidArgument(f"plan is {name_type(plan)}: pass prediction.plan, which is None if nothing fits")
        raise InvalidArgument(f"plan is {name_type(plan)}: pass what fit() returned, or Plan.load(path)")
    if plan.weighed and weigh is None:
        raise InvalidArgument("the plan was made with weigh=, and this Runner has none: pass the same weigh= to both")


def check_rank(plan: Plan, rank: int, size: int) -> None:
    """Refuse a plan of another number of ranks, or another rank's.

    Raises:
        InvalidArgument: Each rank has to run its own part of a plan for all.
    """
    if plan.world_size != size:
        ranks, running = plural(plan.world_size, "rank"), "1 is" if size == 1 else f"{size} are"
        raise InvalidArgument(f"the plan is for {ranks}, and {running} running: run fit() again")
    if plan.rank != rank:
        raise InvalidArgument(
            f"the plan is that of rank {plan.rank} of the model's process group, and this is rank {rank} of it: pass "
            f"each rank its own"
        )


def device_differences(plan: Plan, device: DeviceInfo) -> Iterator[str]:
    """One sentence where the plan is of another device than the one that runs it."""
    planned = plan.device
    is_near = abs(planned.total_bytes - device.total_bytes) <= _SAME_MEMORY * device.total_bytes
    is_same_card = planned.name == device.name or (plan.predicted and is_near)
    if planned.kind != device.kind or not is_same_card:
        yield f"it was {'predicted for' if plan.predicted else 'made on'} {planned.name}, and this is {device.name}"


def find_bound(plan: Plan) -> int | None:
    """Return the ``max_micro_batch`` of the user; ``None`` where it is all of this rank's share, as fit's own is."""
    most = plan.max_micro_batch
    return None if most is None or most >= sum(plan.micro_batch_sizes) else most


def refuse_larger_micro_batches(groups: Iterable[Group], most: int, smallest: int, model: nn.Module) -> None:
    """Refuse samples that can only be cut into micro-batches larger than the user's ``max_micro_batch``.

    Raises:
        DoesNotFit: A batch cannot be cut otherwise without a micro-batch below ``smallest``.
    """
    for group in groups:
        least = least_size(len(group.rows), smallest)
        if least > most:
            raise DoesNotFit(
                f"a batch of {len(group.rows)} samples in micro-batches of at most {most} (the plan's max_micro_batch) "
                f"leaves one of a single sample, and {explain_smallest(model)}: pass an even number of samples, or "
                f"plan with fit(max_micro_batch={least}) or more"
            )


def explain_no_retry(step: int, plan: Plan) -> str:
    """End the message of an update that ran out of memory."""
    return (
        f"so step {step} was not retried; load your last checkpoint and give fit() the optimizer and more headroom= "
        f"than {format_bytes(plan.headroom_bytes)}"
    )


def explain_shortage(step: int, shortage: Shortage, used_bytes: int, plan: Plan, model: nn.Module) -> str:
    """Explain why a step does not fit if its micro-batch cannot be smaller.

    Args:
        step: Its number.
        shortage: The micro-batch that ran out of memory.
        used_bytes: Bytes that were held before it.
        plan: The plan, for its budget.
        model: The model, for the layers that need more than one sample.
    """
    size = shortage.failed_size
    samples = "one sample" if size == 1 else f"{size} samples, the fewest it can have"
    reason = shortage.reason if size == 1 else f"{shortage.reason}; {explain_smallest(model)}"
    return (
        f"step {step} ran out of memory {PHASES[shortage.ended_in]} at a micro-batch of {samples}; "
        f"{format_bytes(used_bytes)} of a budget of {format_bytes(plan.budget_bytes)} were held before it; {reason}; "
        f"everything is as before the step: free memory or give fit() a larger budget="
    )
