"""Says what a plan's report shows, and of its runs: the sections and tables that text and HTML have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone

from autobatch._bounds import SHORTEST
from autobatch._formatting import format_bytes
from autobatch.events.run_history import Run, StepRange
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.advice import advise, tenant_lines
from autobatch.report.breakdown import chosen_trial, draw_bar, memory_parts
from autobatch.report.ranks import rank_section, run_rank_section
from autobatch.report.sections import UNKNOWN, Bytes, Cell, Section, Table, ends, known

_MOST_RUNS = 4
"""Number of the newest runs that are shown with their steps."""


def plan_sections(plan: PlanRecord) -> Iterator[Section]:
    """Yield the sections about a plan."""
    size = plan.micro_batch_size
    yield Section("The plan", table=_facts_table(plan))
    if plan.lengths:
        yield Section("Samples by length", table=_length_table(plan))
    if plan.ranks:
        yield rank_section(plan)
    yield Section("Budget", table=_budget_table(plan), lines=list(tenant_lines(plan.device)))
    if plan.trials:
        yield Section("Trials", table=_trial_table(plan), planned=size)
    if parts := memory_parts(plan):
        yield Section("Where the memory goes", draw_bar(parts), breakdown_table(plan), only_text=True)
    if plan.curve is not None:
        yield Section("Memory curve", table=_curve_table(plan, plan.curve), planned=size)
    if plan.verdict is not None:
        line = f"{plan.verdict} ({plan.verdict.seconds:.1f} s)"
        yield Section("Is splitting exact?", lines=[line], only_text=True)
    if advice := list(advise(plan)):
        yield Section("What would help", items=advice)
    if plan.warnings:
        yield Section("Warnings", lines=[f"! {warning}" for warning in plan.warnings], only_text=True)


def run_sections(runs: Sequence[Run]) -> Iterator[Section]:
    """Yield a table of all runs, and the newest runs with their steps and setbacks."""
    if runs:
        yield Section("Runs", table=_run_table(runs))
    for run in newest(runs):
        if run.ranks:
            yield run_rank_section(run)
        if run.ranges:
            yield Section(f"Run {run.id}: steps", table=_range_table(run))
        if run.setbacks:
            yield Section(f"Run {run.id}: setbacks", table=_setback_table(run))


def newest(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs that are shown one by one."""
    return runs[-_MOST_RUNS:]


def _format_time(seconds: float) -> str:
    """Format seconds since 1970 as ``2026-11-21 19:01 UTC``; empty if unknown or out of range."""
    if seconds <= 0:
        return ""
    try:
        return f"{datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=seconds):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError):  # a damaged or foreign record must still be shown
        return ""


def _facts_table(plan: PlanRecord) -> Table:
    sizes = ", ".join(f"{count} x {size}" for size, count in Counter(plan.micro_batch_sizes).items())
    facts: tuple[tuple[str, Cell], ...] = (
        ("target batch", plan.target_batch),
        ("ranks", plan.world_size),
        ("micro-batch size", plan.micro_batch_size),
        ("micro-batches", sizes),
        ("predicted peak" if plan.predicted else "peak", Bytes(plan.peak_bytes)),
        ("optimizer state", Bytes(plan.state_bytes)),
        ("device", plan.device.name),
        ("model", plan.model),
        ("plan", plan.id),
        ("confirms", plan.confirms),
        ("made", _format_time(plan.made_at)),
        ("predicting took" if plan.predicted else "fit took", f"{plan.seconds:.1f} s"),
        ("autobatch", plan.version),
        ("fingerprint", plan.fingerprint),
    )
    return Table(("", ""), tuple(fact for fact in facts if fact[1] not in ("", 0) and fact != ("ranks", 1)))


def _budget_table(plan: PlanRecord) -> Table:
    if not plan.budget_bytes:
        return Table((), (), (f"{plan.device.name} does not report its memory; sizes were found by running out of it",))
    who = "the prediction stays" if plan.predicted else "a trial had to stay"
    rows: list[tuple[Cell, ...]] = [
        ("budget", Bytes(plan.budget_bytes), f"what this process may hold on {plan.device.name}"),
        ("headroom", Bytes(plan.headroom_bytes), "left free on purpose"),
        ("limit", Bytes(plan.limit_bytes), f"what {who} within"),
    ]
    if plan.device.total_bytes:
        rows.append(("device", Bytes(plan.device.total_bytes), "in all"))
    return Table(("", "bytes", "what it is"), tuple(rows))


def _length_table(plan: PlanRecord) -> Table:
    rows = tuple((size.length, size.micro_batch_size, known(size.peak_bytes)) for size in plan.lengths)
    sides = {"right": "after", "left": "before"}
    trimmed = f"Padding comes {sides[plan.padding.side]} a sample's own values, and is trimmed."
    worst = "All other sizes of this plan are of the worst step: all samples as long as the longest."
    return Table(("up to", "together", "peak"), rows, (trimmed, worst) if plan.padding.dims else (worst,))


def _trial_table(plan: PlanRecord) -> Table:
    headings: tuple[str, ...] = ("size", "outcome", "allocated", "reserved", "optimizer", "retries", "samples/s")
    if plan.lengths:
        headings = (*headings, "length")
    note = "Each trial: two micro-batches accumulated with optimizer state resident, then the optimizer's step."
    epoch = _describe_epoch(plan)
    ended = ("Where memory ended (oom), peaks are what was reached before.",) if plan.out_of_memory_trials else ()
    rows = (
        (
            trial.micro_batch_size,
            trial.outcome,
            *map(known, (trial.peak_allocated, trial.peak_reserved, trial.optimizer_peak)),
            trial.alloc_retries,
            trial.samples_per_second or UNKNOWN,
            *([trial.length or UNKNOWN] if plan.lengths else []),
        )
        for trial in plan.trials
    )
    return Table(headings, tuple(rows), (note, *epoch, *ended))


def _describe_epoch(plan: PlanRecord) -> tuple[str, ...]:
    """Return the time for all samples of the dataset at the measured rate, if both are known."""
    trial = chosen_trial(plan)
    rate = trial.samples_per_second if trial else 0.0
    if not plan.dataset_samples or not rate:
        return ()
    own = plan.dataset_samples * sum(plan.micro_batch_sizes) / plan.target_batch
    return (f"An epoch of {plan.dataset_samples} samples takes about {_spell_time(own / rate)} at this size.",)


def _spell_time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.1):.1f} s"


def breakdown_table(plan: PlanRecord) -> Table:
    """Return the parts of the budget, each with its symbol in a bar of text."""
    parts = memory_parts(plan)
    total = sum(part.size_bytes for part in parts)
    rows = ((part.symbol, Bytes(part.size_bytes), f"{part.size_bytes / total:.1%}", part.about) for part in parts)
    note = f"In all {format_bytes(total)}{', the budget' if total == plan.budget_bytes else ''}."
    return Table(("", "bytes", "share", "part"), tuple(rows), (note,))


def _curve_table(plan: PlanRecord, curve: MemoryCurve) -> Table:
    share = sum(plan.micro_batch_sizes)
    sizes = sorted({1, plan.micro_batch_size, min(2 * plan.micro_batch_size, share), share})
    marks = {plan.micro_batch_size: "<- the plan"}
    rows = tuple((size, Bytes(curve.peak_reserved(size)), marks.get(size, "")) for size in sizes)
    largest = min(curve.largest(plan.limit_bytes), share)
    notes = (f"The curve puts the largest size within the limit at {largest} of {share}.",) if plan.budget_bytes else ()
    return Table(("samples", "peak", ""), rows, notes)


def _run_table(runs: Sequence[Run]) -> Table:
    shown, left_out = ends(runs, "run")
    ended = (f"Run {run.id} ended: {run.reason}" for run in shown if run.reason)
    silent = (  # a run that was killed could not say so
        f"Run {run.id} was last written at {_format_time(run.last_seen_at)}; later steps are unknown."
        for run in shown
        if run.outcome == "running"
    )
    one_by_one = (f"Steps and setbacks: of the last {_MOST_RUNS} runs only.",) if len(runs) > _MOST_RUNS else ()
    headings = ("run", "began", "steps", "retries", "peak", "outcome")
    began = (_format_time(run.started_at).removesuffix(" UTC") or UNKNOWN for run in shown)
    rows = (
        (run.id, start, run.steps, run.retries, Bytes(run.peak_bytes), run.outcome)
        for run, start in zip(shown, began, strict=True)
    )
    return Table(headings, tuple(rows), (*left_out, *ended, *silent, *one_by_one))


def _range_table(run: Run) -> Table:
    shown, left_out = ends(run.ranges, "range of steps", "ranges of steps")
    headings = ("steps", "micro-batch", "retries", "peak", "samples/s")
    note = "On a card these rates are of the time until the work was handed over: a runner waits for nothing."
    return Table(headings, tuple(map(_range_row, shown)), (*left_out, note))


def _range_row(part: StepRange) -> tuple[Cell, ...]:
    steps = f"{part.first_step}-{part.last_step}" if part.last_step > part.first_step else str(part.first_step)
    speed = part.samples / part.seconds if part.seconds > SHORTEST else UNKNOWN
    return (steps, part.micro_batch_size, part.retries, Bytes(part.peak_bytes), speed)


def _setback_table(run: Run) -> Table:
    shown, left_out = ends(run.setbacks, "setback")
    headings = ("step", "kind", "from", "to", "held", "reason")
    rows = (
        (back.step, back.kind, back.old_size, back.new_size, known(back.used_bytes), back.reason or UNKNOWN)
        for back in shown
    )
    return Table(headings, tuple(rows), left_out)
