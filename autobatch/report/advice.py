"""Says what would help: towards a larger micro-batch, and where nothing fits at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from autobatch._bounds import SHORTEST
from autobatch._formatting import format_bytes, plural
from autobatch.planning.division import seconds_by_speed
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import DeviceInfo, Phase, Saving, Trial
from autobatch.report.sections import format_seconds

PHASES: dict[Phase, str] = {
    "forward": "in the forward pass",
    "loss": "in the loss over the whole batch",
    "backward": "in the backward pass",
    "gradients": "in the backward pass",
    "optimizer state": "where the optimizer made its state",
    "update": "in the optimizer's step",
}
_NO_USE = "smaller micro-batches and activation checkpointing would not help"
_PASSES = (
    "activation checkpointing",
    "bfloat16 autocast",
    "smaller inputs",
    "an optimizer with less state",
    "fewer trained parameters",
)
_SHORTER = "parameters in bfloat16"
_MODEL = ("fewer parameters", _SHORTER, "a batch that is not on the device as a whole")
_AT_ANY_SIZE: dict[Phase, tuple[str, Sequence[str]]] = {
    "loss": (
        "the loss over the whole batch does not fit on {device} beside the model and all representations",
        ("a smaller target_batch=", "a loss that runs in chunks of rows, each with torch.utils.checkpoint"),
    ),
    "gradients": (
        "the gradients do not fit on {device} beside the model",
        ("fewer trained parameters (freeze some, or LoRA)", _SHORTER),
    ),
    "optimizer state": (
        "the optimizer's state does not fit on {device} beside model and gradients",
        ("an optimizer with less state (SGD, Adafactor, Adam in 8 bits)", "fewer trained parameters", _SHORTER),
    ),
    "update": (
        "the optimizer's update does not fit on {device} beside model, gradients and its state",
        (
            "an optimizer without temporaries of all parameters at once (foreach=False or fused=True)",
            "one with less state",
            "fewer trained parameters",
        ),
    ),
}
"""Parts that do not fit at any micro-batch size, with what would help."""


_WORTH_IT = 1.25
"""How many times as long the slowest must take as all would with shares by speed, before these are advised.

Two equal ranks on two cores with much else to do came to 1.00 to 1.18 over 50 steps, in six runs; by single trials, of
which a plan knows no more, to 1.10 in the median of 25 plans and above this in eight.
"""


def advise(plan: PlanRecord) -> Iterator[str]:
    """Yield a sentence for each way to a larger micro-batch; none if memory does not limit the size."""
    share = sum(plan.micro_batch_sizes)
    need = plan.curve.peak_reserved(share) if plan.curve is not None else 0
    # Within the limit it was the user's own bound or objective that divided the batch, and memory is not what to save.
    if plan.accumulation_steps > 1 and need > plan.limit_bytes:
        missing = format_bytes(need - plan.limit_bytes)
        yield f"the whole {share} at once would need about {format_bytes(need)}, {missing} more than the limit"
        if shrinks := _not_yet(_PASSES[:2], plan.savings):
            yield f"{_either(shrinks)} would shrink what each sample needs"
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


def advise_ranks(samples: Sequence[int], seconds: Sequence[float]) -> Iterator[str]:
    """Advise shares by speed, if they would save more than two measurements of equal devices differ."""
    together = seconds_by_speed(samples, seconds)
    if together > SHORTEST and max(seconds) > _WORTH_IT * together:
        now, then = format_seconds(max(seconds)), format_seconds(together)
        yield (
            f"all ranks wait for the slowest: fit(..., share='speed') divides the target so that each would end after "
            f"about {then} instead of {now}"
        )


def tenant_lines(device: DeviceInfo) -> Iterator[str]:
    """Yield a sentence for each other process that holds memory of the device."""
    for tenant in device.tenants:
        name = f" ({tenant.name})" if tenant.name else ""
        yield f"process {tenant.pid}{name} holds {format_bytes(tenant.used_bytes)}"


def _not_yet(advice: Iterable[str], savings: Collection[Saving]) -> list[str]:
    """Return the advice that the step does not follow yet."""
    followed: set[str] = {_BY_SAVING[saving] for saving in savings}
    if "16-bit parameters" in savings:  # autocast to 16 bits changes little more
        followed.add("bfloat16 autocast")
    return [one for one in advice if one not in followed]


_BY_SAVING: dict[Saving, str] = {
    "activation checkpointing": "activation checkpointing",
    "autocast": "bfloat16 autocast",
    "16-bit parameters": _SHORTER,
}


def _either(items: Sequence[str]) -> str:
    """Return ``a``, ``a or b``, or ``a, b, or c``."""
    if len(items) < 3:
        return " or ".join(items)
    return f"{', '.join(items[:-1])}, or {items[-1]}"


def explain_refusal(
    trial: Trial,
    reason: str,
    limit_bytes: int,
    budget_bytes: int,
    device: DeviceInfo,
    *,
    savings: Collection[Saving] = (),
) -> str:
    """Explain why nothing fits: the place in the step, the bytes held, other processes, and what would help.

    ``trial`` has the smallest size that was tried, ``reason`` is the error's first line, and ``savings`` are not
    advised, since the step has them.
    """
    phase = trial.ended_in or "forward"
    advice: Sequence[str]
    subject, advice, no_use = (
        f"a micro-batch of {plural(trial.micro_batch_size, 'sample')} does not fit on {device.name}",
        _PASSES,
        "",
    )
    if phase in _AT_ANY_SIZE:
        subject, advice = _AT_ANY_SIZE[phase]
        subject, no_use = f"{subject.format(device=device.name)}, at any micro-batch size", f"; {_NO_USE}"
    elif 0 < limit_bytes <= trial.resident_bytes:
        subject, advice, no_use = f"{subject}, as the model by itself does not", _MODEL, f"; {_NO_USE}"
    held_bytes = max(trial.peak_reserved, trial.resident_bytes)  # memory may end before the first reading
    return (
        f"{subject}: memory ended {PHASES[phase]}; "
        f"{format_bytes(held_bytes)} were held, {format_bytes(trial.resident_bytes)} of that before the first sample, "
        f"and the limit is {format_bytes(limit_bytes)} of a budget of {format_bytes(budget_bytes)}; {reason}; "
        f"{'; '.join(tenant_lines(device)) or 'no other process is known to hold memory there'}; what would help: "
        f"a larger budget= or smaller headroom=, {_either(_not_yet(advice, savings))}{no_use}"
    )
