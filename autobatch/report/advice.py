"""What would help, from what a plan's trials have shown.

Covers sentences, each with its number. Does not cover predictions of what a change would save (``prediction.changes``).
"""

from __future__ import annotations

from collections.abc import Iterator

from autobatch._formatting import format_bytes
from autobatch.planning.plan_record import PlanRecord

__all__ = ["advise"]


def advise(plan: PlanRecord) -> Iterator[str]:
    """A sentence for each thing that a user could do for a larger micro-batch; none where memory is no matter."""
    share = sum(plan.micro_batch_sizes)
    need = plan.curve.peak_reserved(share) if plan.curve is not None else 0
    # Within the limit it was the user's own bound or objective that divided the batch, and memory is not what to save.
    if plan.accumulation_steps > 1 and need > plan.limit_bytes:
        missing = format_bytes(need - plan.limit_bytes)
        yield f"the whole {share} at once would need about {format_bytes(need)}, {missing} more than the limit"
        yield "activation checkpointing or bfloat16 autocast shrink what each sample needs"
    used = max((t.peak_allocated for t in plan.trials if t.micro_batch_size == plan.micro_batch_size), default=0)
    gap = plan.peak_bytes - used
    if used and plan.device.kind == "cuda" and gap > plan.peak_bytes // 5:
        setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield f"{format_bytes(gap)} are held but not used by tensors: {setting} often gives most of it back"
    for tenant in plan.device.tenants:
        held = format_bytes(tenant.used_bytes)
        yield f"process {tenant.pid} holds {held} of this device; without it the budget would be larger"
