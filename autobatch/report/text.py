"""A plan as text: one line, and the whole story.

Covers words and tables in 80 to 120 columns. Does not cover any measurement: every number shown stands in the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autobatch.planning.plan_record import PlanRecord
from autobatch.records import DeviceInfo, Trial
from autobatch.wording import format_bytes, plural, spell

__all__ = ["describe_division", "explain_plan", "explain_refusal", "summarise_plan"]


def summarise_plan(plan: PlanRecord) -> str:
    """``autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 18.7 of 21.6 GiB; 3 trials, 0 out of memory, 1.2 s``."""
    return (
        f"autobatch: {describe_division(plan)} on {plan.device.name}; {_peak(plan)}; "
        f"{plural(len(plan.trials), 'trial')}, {plan.out_of_memory_trials} out of memory, {plan.seconds:.1f} s"
    )


def describe_division(plan: PlanRecord) -> str:
    """``256 = 6 x 43 (two of 42)``."""
    share = sum(plan.micro_batch_sizes)
    sizes = Counter(plan.micro_batch_sizes)
    smaller = [f"{spell(count)} of {size}" for size, count in sizes.items() if size != plan.micro_batch_size]
    ragged = f" ({', '.join(smaller)})" if smaller else ""
    ranks = "" if plan.world_size == 1 else f" on each of {plan.world_size} ranks, {plan.target_batch} in all"
    return f"{share} = {plan.accumulation_steps} x {plan.micro_batch_size}{ragged}{ranks}"


def explain_plan(plan: PlanRecord) -> str:
    """All that is known about a plan, in sections; ends without a newline."""
    return "\n".join(
        [
            summarise_plan(plan),
            *_section("Budget", _budget_lines(plan)),
            *_section("Trials", _trial_lines(plan)),
            *_section("Where the memory goes", _breakdown_lines(plan)),
            *_section("Memory curve", _curve_lines(plan)),
            *_section("Is splitting exact?", _verdict_lines(plan)),
            *_section("What would help", _advice_lines(plan)),
            *_section("Warnings", (f"! {warning}" for warning in plan.warnings)),
        ]
    )


def explain_refusal(trial: Trial, reason: str, limit_bytes: int, budget_bytes: int, device: DeviceInfo) -> str:
    """Why nothing fits: what the smallest micro-batch needed, what there was, who else is there, what would help."""
    held = "; ".join(_tenant_lines(device)) or "no other process is known to hold memory there"
    advice = (
        "a larger budget= or smaller headroom=, activation checkpointing, bfloat16 autocast, smaller inputs, or an "
        "optimizer with less state"
    )
    held_bytes = max(trial.peak_reserved, trial.resident_bytes)  # memory may end before the first reading
    return (
        f"a micro-batch of {plural(trial.micro_batch_size, 'sample')} does not fit on {device.name}: "
        f"{format_bytes(held_bytes)} were held when memory ended, {format_bytes(trial.resident_bytes)} of "
        f"that before the first sample, and the limit is {format_bytes(limit_bytes)} of a budget of "
        f"{format_bytes(budget_bytes)}; {reason}; {held}; what would help: {advice}"
    )


def _peak(plan: PlanRecord) -> str:
    kind = "predicted peak" if plan.predicted else "peak"
    if not plan.peak_bytes:
        return "peak not measured"
    peak, budget = format_bytes(plan.peak_bytes), format_bytes(plan.budget_bytes)
    if peak.split()[1:] == budget.split()[1:]:
        peak = peak.split()[0]
    return f"{kind} {peak} of {budget}"


def _section(title: str, lines: Iterator[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    return ["", title, *body] if body else []


def _budget_lines(plan: PlanRecord) -> Iterator[str]:
    if not plan.budget_bytes:
        yield f"{plan.device.name} does not tell its memory; sizes were found by running out of it"
        return
    yield f"budget    {format_bytes(plan.budget_bytes):>12}   what this process may hold on {plan.device.name}"
    yield f"headroom  {format_bytes(plan.headroom_bytes):>12}   left free on purpose"
    yield f"limit     {format_bytes(plan.limit_bytes):>12}   what a trial had to stay within"
    if plan.device.total_bytes:
        yield f"device    {format_bytes(plan.device.total_bytes):>12}   in all"
    yield from _tenant_lines(plan.device)


def _tenant_lines(device: DeviceInfo) -> Iterator[str]:
    for tenant in device.tenants:
        name = f" ({tenant.name})" if tenant.name else ""
        yield f"process {tenant.pid}{name} holds {format_bytes(tenant.used_bytes)}"


def _trial_lines(plan: PlanRecord) -> Iterator[str]:
    if not plan.trials:
        return
    columns = f"{'allocated':>12}{'reserved':>12}{'optimizer':>12}{'retries':>9}{'samples/s':>11}"
    yield f"{'size':>7}  {'outcome':<8}{columns}"
    for trial in plan.trials:
        peaks = (trial.peak_allocated, trial.peak_reserved, trial.optimizer_peak)
        shown = "".join(f"{format_bytes(peak):>12}" for peak in peaks)
        speed = f"{trial.samples_per_second:.1f}" if trial.seconds else "-"
        yield f"{trial.micro_batch_size:>7}  {trial.outcome:<8}{shown}{trial.alloc_retries:>9}{speed:>11}"
    yield "Each trial: two micro-batches accumulated with optimizer state resident, then the optimizer's step."


def _breakdown_lines(plan: PlanRecord) -> Iterator[str]:
    """At the chosen size, from its own trial: what stands before the first sample, and what comes on top."""
    chosen = [
        trial for trial in plan.trials if trial.micro_batch_size == plan.micro_batch_size and trial.peak_allocated
    ]
    if not chosen:
        return
    trial = chosen[-1]
    backward = trial.backward_allocated or trial.peak_allocated
    on_top = max(backward - trial.resident_bytes, 0)
    in_step = max(trial.optimizer_peak - trial.resident_bytes, 0)
    yield f"{format_bytes(trial.resident_bytes):>12}   resident: parameters, buffers, optimizer state, maybe the batch"
    yield f"{format_bytes(on_top):>12}   on top in forward and backward: gradients, activations, temporaries"
    yield f"{format_bytes(in_step):>12}   on top in the optimizer's step: gradients, temporaries"


def _curve_lines(plan: PlanRecord) -> Iterator[str]:
    if plan.curve is None:
        return
    share = sum(plan.micro_batch_sizes)
    for size in sorted({1, plan.micro_batch_size, min(2 * plan.micro_batch_size, share), share}):
        mark = "  <- the plan" if size == plan.micro_batch_size else ""
        yield f"{plural(size, 'sample'):>14}   {format_bytes(plan.curve.peak_reserved(size)):>12}{mark}"
    largest = min(plan.curve.largest(plan.limit_bytes), share)
    yield f"The curve puts the largest size within the limit at {largest} of {share}."


def _verdict_lines(plan: PlanRecord) -> Iterator[str]:
    if plan.verdict is not None:
        yield f"{plan.verdict} ({plan.verdict.seconds:.1f} s)"


def _advice_lines(plan: PlanRecord) -> Iterator[str]:
    share = sum(plan.micro_batch_sizes)
    need = plan.curve.peak_reserved(share) if plan.curve is not None else 0
    # Within the limit it was the user's own bound or objective that divided the batch, and memory is not what to save.
    if plan.accumulation_steps > 1 and need > plan.limit_bytes:
        missing = format_bytes(need - plan.limit_bytes)
        yield f"the whole {share} at once would need about {format_bytes(need)}, {missing} more than the limit"
        yield "activation checkpointing or bfloat16 autocast shrink what each sample needs"
    used = max((t.peak_allocated for t in plan.trials if t.micro_batch_size == plan.micro_batch_size), default=0)
    gap = plan.peak_bytes - used
    if plan.device.kind == "cuda" and gap > plan.peak_bytes // 5:
        setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield f"{format_bytes(gap)} are held but not used by tensors: {setting} often gives most of it back"
    for tenant in plan.device.tenants:
        held = format_bytes(tenant.used_bytes)
        yield f"process {tenant.pid} holds {held} of this device; without it the budget would be larger"
