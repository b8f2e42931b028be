"""Says what would help: towards a larger micro-batch, and where nothing fits at all.

Covers sentences, each with its number, and the text of ``DoesNotFit`` after a search in which no size ran. Does not
cover predictions of what a change would save (``prediction.what_if``).
"""

from __future__ import annotations

from collections.abc import Iterator

from autobatch._formatting import format_bytes, plural
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import DeviceInfo, Phase, Trial
from autobatch.report.ranks import advise_ranks

__all__ = ["PHASES", "advise", "explain_refusal", "tenant_lines"]

PHASES: dict[Phase, str] = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "gradients": "in the backward pass",
    "optimizer state": "where the optimizer made its state",
    "update": "in the optimizer's step",
}
_NO_USE = "smaller micro-batches and activation checkpointing would not help"
_PASSES = (
    "activation checkpointing, bfloat16 autocast, smaller inputs, an optimizer with less state, or fewer trained "
    "parameters"
)
_MODEL_ADVICE = f"fewer parameters, parameters in bfloat16, or a batch that is not on the device as a whole; {_NO_USE}"
_AT_ANY_SIZE: dict[Phase, tuple[str, str]] = {
    "gradients": (
        "the gradients do not fit on {device} beside the model",
        f"fewer trained parameters (freeze some, or LoRA), or parameters in bfloat16; {_NO_USE}",
    ),
    "optimizer state": (
        "the optimizer's state does not fit on {device} beside model and gradients",
        (
            "an optimizer with less state (SGD, Adafactor, Adam in 8 bits), fewer trained parameters, or parameters in "
            f"bfloat16; {_NO_USE}"
        ),
    ),
    "update": (
        "the optimizer's update does not fit on {device} beside model, gradients and its state",
        (
            "an optimizer without temporaries of all parameters at once (foreach=False or fused=True), one with less "
            f"state, or fewer trained parameters; {_NO_USE}"
        ),
    ),
}
"""What does not fit whatever the micro-batch size, and what would help."""


def advise(plan: PlanRecord) -> Iterator[str]:
    """A sentence for each thing that a user could do for a larger micro-batch; none where memory does not matter."""
    share = sum(plan.micro_batch_sizes)
    need = plan.curve.peak_reserved(share) if plan.curve is not None else 0
    # Within the limit it was the user's own bound or objective that divided the batch, and memory is not what to save.
    if plan.accumulation_steps > 1 and need > plan.limit_bytes:
        missing = format_bytes(need - plan.limit_bytes)
        yield f"the whole {share} at once would need about {format_bytes(need)}, {missing} more than the limit"
        yield "activation checkpointing or bfloat16 autocast shrink what each sample needs"
    used = max(
        (t.peak_allocated for t in plan.longest_trials if t.micro_batch_size == plan.micro_batch_size), default=0
    )
    gap = plan.peak_bytes - used
    if used and plan.device.kind == "cuda" and gap > plan.peak_bytes // 5:
        setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield f"{format_bytes(gap)} are held but not used by tensors: {setting} often gives most of it back"
    yield from advise_ranks([one.share for one in plan.ranks], [one.seconds for one in plan.ranks])
    for tenant in plan.device.tenants:
        held = format_bytes(tenant.used_bytes)
        yield f"process {tenant.pid} holds {held} of this device; without it the budget would be larger"


def tenant_lines(device: DeviceInfo) -> Iterator[str]:
    """Who else holds memory of the device, a sentence each."""
    for tenant in device.tenants:
        name = f" ({tenant.name})" if tenant.name else ""
        yield f"process {tenant.pid}{name} holds {format_bytes(tenant.used_bytes)}"


def explain_refusal(trial: Trial, reason: str, limit_bytes: int, budget_bytes: int, device: DeviceInfo) -> str:
    """Why nothing fits: where memory ended, how much was held, who else is on the device, what would help.

    ``trial`` is of the smallest size that was tried, and ``reason`` the error's first line.
    """
    phase = trial.ended_in or "forward"
    subject, advice = (
        f"a micro-batch of {plural(trial.micro_batch_size, 'sample')} does not fit on {device.name}",
        _PASSES,
    )
    if phase in _AT_ANY_SIZE:
        subject, advice = _AT_ANY_SIZE[phase]
        subject = f"{subject.format(device=device.name)}, at any micro-batch size"
    elif 0 < limit_bytes <= trial.resident_bytes:
        subject, advice = f"{subject}, as the model by itself does not", _MODEL_ADVICE
    held_bytes = max(trial.peak_reserved, trial.resident_bytes)  # memory may end before the first reading
    return (
        f"{subject}: memory ended {PHASES[phase]}; "
        f"{format_bytes(held_bytes)} were held, {format_bytes(trial.resident_bytes)} of that before the first sample, "
        f"and the limit is {format_bytes(limit_bytes)} of a budget of {format_bytes(budget_bytes)}; {reason}; "
        f"{'; '.join(tenant_lines(device)) or 'no other process is known to hold memory there'}; what would help: "
        f"a larger budget= or smaller headroom=, {advice}"
    )
