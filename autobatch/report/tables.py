"""Says what a plan's report shows, and of its runs: the sections and tables that text and HTML have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise

from autobatch._bounds import SHORTEST
from autobatch._formatting import format_bytes, plural
from autobatch.events.run_history import RankTotal, Run, StepRange
from autobatch.planning.curve import MemoryCurve, ran
from autobatch.planning.division import find_slowest
from autobatch.planning.plan_record import PlanRecord, RankPlan
from autobatch.records import IN_EACH, SUMMINGS, Checkpointing
from autobatch.report.advice import advise, advise_ranks, tenant_lines
from autobatch.report.breakdown import Part, chosen_trial, memory_parts
from autobatch.report.pictures import draw_peaks, draw_run, draw_speeds, part_chart, plan_peaks, rank_chart
from autobatch.report.sections import UNKNOWN, Bytes, Cell, Chart, Section, Table, ends, format_seconds, known

_MOST_RUNS = 4
"""Number of the newest runs that are shown with their steps."""


def plan_sections(plan: PlanRecord) -> Iterator[Section]:
    """Yield the sections about a plan."""
    size = plan.micro_batch_size
    yield Section("The plan", table=_facts_table(plan))
    if plan.lengths:
        yield Section("Samples by length", table=_length_table(plan))
    if plan.ranks:
        yield _rank_section(plan)
    yield Section("Budget", table=_budget_table(plan), lines=list(tenant_lines(plan.device)))
    if plan.curve is not None:
        peaks = Chart(partial(draw_peaks, plan_peaks(plan)))
        yield Section("Memory curve", chart=peaks, table=_curve_table(plan, plan.curve), planned=size)
    if plan.trials:
        is_timed = any(trial.samples_per_second for trial in plan.trials if ran(trial))
        speeds = Chart(partial(draw_speeds, plan)) if is_timed else None
        yield Section("Trials", chart=speeds, table=_trial_table(plan), planned=size)
    yield from _choice_sections(plan)
    if parts := memory_parts(plan):
        yield Section("Where the memory goes", part_chart(parts), _part_table(plan, parts))
    if plan.verdict is not None:
        yield Section("Is splitting exact?", lines=[f"{plan.verdict} ({plan.verdict.seconds:.1f} s)"])
    if advice := list(advise(plan)):
        yield Section("What would help", items=advice)
    if plan.warnings:
        yield Section("Warnings", lines=[f"! {warning}" for warning in plan.warnings], only_text=True)


def _choice_sections(plan: PlanRecord) -> Iterator[Section]:
    if plan.checkpointing is not None:
        yield Section("Blocks in less memory", lines=[*_explain_checkpointing(plan.checkpointing)])
    if plan.chunked_loss is not None:
        yield Section("Loss in chunks", lines=[str(plan.chunked_loss)])
    if plan.summing_trials:
        yield Section("Sums of sharded gradients", lines=[_explain_summing(plan)])


def run_sections(runs: Sequence[Run]) -> Iterator[Section]:
    """Yield a table of all runs, and the newest runs with their steps and setbacks."""
    if runs:
        yield Section("Runs", table=_run_table(runs))
    for number, run in [*enumerate(runs, 1)][-_MOST_RUNS:]:
        name = f"Run {number}, {_format_time(run.started_at)}".removesuffix(", ")
        if run.ranges or run.setbacks:
            yield Section(name, chart=Chart(partial(draw_run, run)), table=_range_table(run))
        if run.ranks:
            yield _run_rank_section(name, run)
        if run.setbacks:
            yield Section(f"{name}: setbacks", table=_setback_table(run))


def _format_time(seconds: float) -> str:
    """Format seconds since 1970, UTC, as ``2026-11-21 19:01``; empty if unknown or out of range."""
    if seconds <= 0:
        return ""
    try:
        return f"{datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=seconds):%Y-%m-%d %H:%M}"
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
        ("made (UTC)", _format_time(plan.made_at)),
        ("predicting took" if plan.predicted else "fit took", f"{plan.seconds:.1f} s"),
        ("autobatch", plan.version),
        ("fingerprint", plan.fingerprint),
    )
    return Table(("", ""), tuple(fact for fact in facts if fact[1] not in ("", 0) and fact != ("ranks", 1)))


def _explain_checkpointing(found: Checkpointing) -> Iterator[str]:
    yield f"{found}; both peaks are of {plural(found.micro_batch_size, 'sample')}, the first one is predicted"
    titles = {"checkpoint": "Recomputed", "selective": "Recomputed selectively", "offload": "Offloaded"}
    for way, title in titles.items():
        if blocks := [block for block, own in found.ways.items() if own == way]:
            yield f"{title}: {', '.join(blocks)}"
    for one in found.left_out:
        yield f"Left out: {one.block}: {one.reason}"


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


def _explain_summing(plan: PlanRecord) -> str:
    """Return one sentence: how often gradients are summed, and why."""
    trials, chosen = plan.summing_trials, plan.summing
    if chosen == IN_EACH:
        rarer = trials.get(SUMMINGS[1])
        why = "sums once a step do not fit" if rarer is None or rarer.outcome != "fits" else "others are no faster"
        return f"Ranks sum them {chosen}: {why}."
    less = 1 - trials[chosen].seconds / trials[IN_EACH].seconds
    more = format_bytes(plan.extra_bytes(chosen))
    return f"Ranks sum them {chosen}: two micro-batches took {less:.0%} less time, and {more} more memory."


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


def _part_table(plan: PlanRecord, parts: Sequence[Part]) -> Table:
    total = sum(part.size_bytes for part in parts)
    rows = ((Bytes(part.size_bytes), f"{part.size_bytes / total:.1%}", part.about) for part in parts)
    note = f"In all {format_bytes(total)}{', the budget' if total == plan.budget_bytes else ''}."
    return Table(("bytes", "share", "part"), tuple(rows), (note,))


def _curve_table(plan: PlanRecord, curve: MemoryCurve) -> Table:
    share = sum(plan.micro_batch_sizes)
    sizes = sorted({1, plan.micro_batch_size, min(2 * plan.micro_batch_size, share), share})
    marks = {plan.micro_batch_size: "<- the plan"}
    rows = tuple((size, Bytes(curve.peak_reserved(size)), marks.get(size, "")) for size in sizes)
    largest = min(curve.largest(plan.limit_bytes), share)
    notes = (f"The curve puts the largest size within the limit at {largest} of {share}.",) if plan.budget_bytes else ()
    return Table(("samples", "peak", ""), rows, notes)


def _run_table(runs: Sequence[Run]) -> Table:
    shown, left_out = ends([*enumerate(runs, 1)], "run")
    ended = (f"Run {number} ended: {run.reason}" for number, run in shown if run.reason)
    silent = (  # a run that was killed could not say so
        f"Run {number} was last written at {_format_time(run.last_seen_at)}; later steps are unknown."
        for number, run in shown
        if run.outcome == "running"
    )
    one_by_one = (f"Steps and setbacks: of the last {_MOST_RUNS} runs only.",) if len(runs) > _MOST_RUNS else ()
    headings = ("run", "began (UTC)", "steps", "retries", "peak", "outcome")
    rows = (
        (number, _format_time(run.started_at) or UNKNOWN, run.steps, run.retries, Bytes(run.peak_bytes), run.outcome)
        for number, run in shown
    )
    return Table(headings, tuple(rows), (*left_out, *ended, *silent, *one_by_one))


def _range_table(run: Run) -> Table:
    shown, left_out = ends(run.ranges, "range of steps", "ranges of steps")
    headings = ("steps", "micro-batch", "retries", "peak", "samples/s")
    note = "On a card these rates are of the time until the work was handed over: a runner waits for nothing."
    return Table(headings, tuple(map(_range_row, shown)), (*left_out, note, *_explain_peaks(run)))


def _explain_peaks(run: Run) -> Iterator[str]:
    """Yield the reason for a peak that is higher than that of larger micro-batches."""
    by_size = sorted(run.ranges, key=lambda part: (part.micro_batch_size, part.peak_bytes))
    for smaller, larger in pairwise(by_size):
        is_smaller = smaller.micro_batch_size < larger.micro_batch_size
        if smaller.retries and is_smaller and smaller.peak_bytes > larger.peak_bytes:
            yield "The peak of a retried step includes its first attempt, which was larger than the micro-batch shown."
            yield "That attempt ran out of memory where others had fitted: another process (a tenant) may hold memory."
            return


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


def _rank_section(plan: PlanRecord) -> Section:
    """Return a row for each rank: sizes, memory and time in the plan."""
    shown, left_out = ends(plan.ranks, "rank")
    headings = ("rank", "samples", "micro-batches", "peak", "budget", "ms/step", "device")
    notes = _name_slowest([one.seconds for one in plan.ranks], "is")
    several_hosts = len({one.host for one in plan.ranks}) > 1
    rows = tuple(_plan_row(one, with_host=several_hosts) for one in shown)
    chart = rank_chart(plan) if any(one.peak_bytes or one.seconds for one in plan.ranks) else None
    return Section("Ranks", chart=chart, table=Table(headings, rows, (*left_out, *notes)), planned=plan.rank)


def _plan_row(one: RankPlan, *, with_host: bool) -> tuple[Cell, ...]:
    device = f"{one.device} on {one.host}" if with_host and one.host else one.device
    sizes = f"{one.accumulation_steps} x {one.micro_batch_size}"
    return (one.rank, one.share, sizes, known(one.peak_bytes), known(one.budget_bytes), _in_ms(one.seconds), device)


def _run_rank_section(name: str, run: Run) -> Section:
    """Return a row for each rank: its totals in a run."""
    shown, left_out = ends([*enumerate(run.ranks)], "rank")
    headings = ("rank", "samples", "micro-batch", "retries", "peak", "ms/step")
    seconds = [_seconds_of_a_step(one) for one in run.ranks]
    advice = (f"{text[0].upper()}{text[1:]}." for text in advise_ranks([*map(_samples_of_a_step, run.ranks)], seconds))
    rows = (
        (rank, one.samples, one.micro_batch_size, one.retries, known(one.peak_bytes), _in_ms(seconds[rank]))
        for rank, one in shown
    )
    notes = (*left_out, *_name_slowest(seconds, "was"), *advice)
    return Section(f"{name}: ranks", table=Table(headings, tuple(rows), notes))


def _seconds_of_a_step(one: RankTotal) -> float:
    return one.seconds / one.steps if one.steps else 0.0


def _samples_of_a_step(one: RankTotal) -> int:
    return round(one.samples / one.steps) if one.steps else 0


def _name_slowest(seconds: Sequence[float], verb: str) -> Iterator[str]:
    slowest = find_slowest(seconds)
    if slowest is not None:
        others = (sum(seconds) - seconds[slowest]) / (len(seconds) - 1)
        who = f"the others {format_seconds(others)} on average"
        if len(seconds) == 2:
            who = f"rank {1 - slowest} {format_seconds(others)}"
        yield f"The slowest {verb} rank {slowest}: {format_seconds(seconds[slowest])} a step by itself, {who}."


def _in_ms(seconds: float) -> Cell:
    return 1000 * seconds if seconds > SHORTEST else UNKNOWN
