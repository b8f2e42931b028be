"""Shows what each of several ranks runs and did, names the slowest, and says when another share would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autobatch._bounds import SHORTEST
from autobatch._formatting import format_bytes, plural
from autobatch.events.run_history import RankTotal, Run
from autobatch.planning.plan_record import PlanRecord, RankPlan
from autobatch.planning.shares import find_slowest, seconds_by_speed
from autobatch.report.sections import UNKNOWN, Cell, Section, Table, ends, known
from autobatch.report.svg import Frame, Scale, element, label, picture

_WORTH_IT = 1.25
"""How many times as long the slowest must take as all would with shares by speed, before these are advised.

Two equal ranks on two cores with much else to do came to 1.00 to 1.18 over 50 steps, in six runs; by single trials, of
which a plan knows no more, to 1.10 in the median of 25 plans and above this in eight.
"""


def rank_section(plan: PlanRecord) -> Section:
    """Return a row for each rank: sizes, memory and time in the plan."""
    shown, left_out = ends(plan.ranks, "rank")
    headings = ("rank", "samples", "micro-batches", "peak", "budget", "ms/step", "device")
    notes = _name_slowest([one.seconds for one in plan.ranks], "is")
    several_hosts = len({one.host for one in plan.ranks}) > 1
    rows = tuple(_plan_row(one, with_host=several_hosts) for one in shown)
    return Section("Ranks", table=Table(headings, rows, (*left_out, *notes)), planned=plan.rank)


def _plan_row(one: RankPlan, *, with_host: bool) -> tuple[Cell, ...]:
    device = f"{one.device} on {one.host}" if with_host and one.host else one.device
    sizes = f"{one.accumulation_steps} x {one.micro_batch_size}"
    return (one.rank, one.share, sizes, known(one.peak_bytes), known(one.budget_bytes), _in_ms(one.seconds), device)


def run_rank_section(run: Run) -> Section:
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
    return Section(f"Run {run.id}: ranks", table=Table(headings, tuple(rows), notes))


def _seconds_of_a_step(one: RankTotal) -> float:
    return one.seconds / one.steps if one.steps else 0.0


def _samples_of_a_step(one: RankTotal) -> int:
    return round(one.samples / one.steps) if one.steps else 0


def advise_ranks(samples: Sequence[int], seconds: Sequence[float]) -> Iterator[str]:
    """Advise shares by speed, if they would save more than two measurements of equal devices differ."""
    together = seconds_by_speed(samples, seconds)
    if together > SHORTEST and max(seconds) > _WORTH_IT * together:
        now, then = format_seconds(max(seconds)), format_seconds(together)
        yield (
            f"all ranks wait for the slowest: fit(..., share='speed') divides the target so that each would end after "
            f"about {then} instead of {now}"
        )


def _name_slowest(seconds: Sequence[float], verb: str) -> Iterator[str]:
    slowest = find_slowest(seconds)
    if slowest is not None:
        others = (sum(seconds) - seconds[slowest]) / (len(seconds) - 1)
        who = f"the others {format_seconds(others)} on average"
        if len(seconds) == 2:
            who = f"rank {1 - slowest} {format_seconds(others)}"
        yield f"The slowest {verb} rank {slowest}: {format_seconds(seconds[slowest])} a step by itself, {who}."


def format_seconds(seconds: float) -> str:
    """Format with three digits: ``0.04123`` -> ``"41.2 ms"``, from a second on ``"1.20 s"``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def _in_ms(seconds: float) -> Cell:
    return 1000 * seconds if seconds > SHORTEST else UNKNOWN


_ROW = 42
_LEFT, _RIGHT = 66, 330
_MEMORY, _TIME = 12, 9
"""Heights of the two bars."""


def rank_chart(plan: PlanRecord) -> str:
    """Draw a row for each rank; empty with one rank, or without measurements."""
    if not any(one.peak_bytes or one.seconds for one in plan.ranks):
        return ""
    shown, left_out = ends(plan.ranks, "rank")
    memory = Scale(0, max(*(max(one.peak_bytes, one.budget_bytes) for one in plan.ranks), 1), _LEFT, _RIGHT)
    time = Scale(0, max(*(one.seconds for one in plan.ranks), SHORTEST), _LEFT, _RIGHT)
    slowest = find_slowest([one.seconds for one in plan.ranks])
    drawn = [
        part
        for row, one in enumerate(shown)
        for part in _row(one, 6 + row * _ROW, memory, time, is_slowest=one.rank == slowest)
    ]
    about = "; ".join((*map(_describe, shown), *left_out))
    return picture(Frame(height=6 + len(shown) * _ROW), "Memory and time of each rank", f"{about}.", *drawn)


def _row(one: RankPlan, top: float, memory: Scale, time: Scale, *, is_slowest: bool) -> Iterator[str]:
    about = _describe(one)
    yield label(f"rank {one.rank}", _LEFT - 8, top + 16, "soft end")
    if one.peak_bytes:
        yield _bar(memory.position(one.budget_bytes), top, "part free", about)
        yield _bar(memory.position(one.peak_bytes), top, "part peak", about)
        yield label(format_bytes(one.peak_bytes), _RIGHT + 8, top + 11, "soft")
    if one.seconds > SHORTEST:
        kind = "part seconds slowest" if is_slowest else "part seconds"
        yield _bar(time.position(one.seconds), top + _MEMORY + 2, kind, about)
        yield label(format_seconds(one.seconds), _RIGHT + 8, top + _MEMORY + 16, "strong" if is_slowest else "soft")


def _bar(right: float, top: float, kind: str, about: str) -> str:
    height = _TIME if "seconds" in kind else _MEMORY
    return element("rect", about=about, x=_LEFT, y=top, width=right - _LEFT, height=height, class_=kind)


def _describe(one: RankPlan) -> str:
    budget = f" of {format_bytes(one.budget_bytes)}" if one.budget_bytes else ""
    peak = f", peak {format_bytes(one.peak_bytes)}{budget}" if one.peak_bytes else ""
    seconds = f", {format_seconds(one.seconds)} a step by itself" if one.seconds > SHORTEST else ""
    return f"rank {one.rank}: {plural(one.share, 'sample')}{peak}{seconds}"
