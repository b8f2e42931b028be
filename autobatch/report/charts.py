"""Draws the charts of a plan and of its runs.

Of a plan: memory and speed against the micro-batch size, and where the memory goes. Of a run: micro-batch size and
retries from step to step. Each is one ``<svg>``, or an empty text where nothing was measured that it could show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from autobatch._formatting import format_bytes, plural
from autobatch.events.run_history import Run, Setback, StepRange
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import Trial
from autobatch.report import svg
from autobatch.report.breakdown import held_bytes, memory_parts
from autobatch.report.svg import FRAME, Frame, Scale, choose_scale, element, label, picture, polyline

_N = TypeVar("_N", int, float)

_MARKS: dict[str, Callable[[float, float, str, str], str]] = {"fits": svg.dot, "oom": svg.cross, "thrash": svg.triangle}
_BAR = Frame(height=80, left=16, right=404, top=10, bottom=46)
_BEYOND = 1.35
"""How far above budget and trials the chart still goes; a curve to sizes that never fit would press all else flat."""

_LANE = 30
"""The height of the lane for retries, above the axis of steps."""


def peak_chart(plan: PlanRecord) -> str:
    """Peak memory against micro-batch size: trials, curve, budget, headroom and the chosen size."""
    peaks = [held_bytes(trial) for trial in plan.longest_trials]
    if not any((*peaks, plan.peak_bytes)):
        return ""
    across = _size_scale(plan)
    shown = [*peaks, plan.peak_bytes, plan.budget_bytes]
    if plan.curve is not None:
        shown.append(min(plan.curve.peak_reserved(_largest_drawn(plan)), int(max(shown) * _BEYOND)))
    upward = choose_scale(shown, FRAME.bottom, FRAME.top)
    budget = f" of a budget of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    return picture(
        FRAME,
        "Peak memory against micro-batch size",
        f"{plural(plan.micro_batch_size, 'sample')}, the plan's size, "
        f"{'is predicted to need' if plan.predicted else 'needs'} {format_bytes(plan.peak_bytes)}{budget}; "
        f"{plural(len(plan.trials), 'trial')}, {plan.out_of_memory_trials} out of memory.",
        *_budget_bands(plan, upward),
        svg.axes(across, "samples in a micro-batch", upward, "peak", in_bytes=True),
        *_curve_lines(plan, across, upward),
        *_trial_marks(plan.longest_trials, across, upward, held_bytes, format_bytes),
        *_chosen_mark(plan, across, upward.position(plan.peak_bytes), format_bytes(plan.peak_bytes)),
    )


def speed_chart(plan: PlanRecord) -> str:
    """Samples per second against micro-batch size."""
    rates = {trial.micro_batch_size: _rate(trial) for trial in plan.longest_trials if trial.outcome != "oom"}
    if not any(rates.values()):
        return ""
    across = _size_scale(plan)
    upward = Scale(0, max(rates.values()) * 1.15, FRAME.bottom, FRAME.top)
    timed = [trial for trial in plan.longest_trials if trial.outcome == "oom" or trial.samples_per_second]
    chosen = rates.get(plan.micro_batch_size, 0.0)
    named = f"{chosen:.1f}/s"
    return picture(
        FRAME,
        "Samples per second against micro-batch size",
        f"Between {min(filter(None, rates.values())):.1f} and {max(rates.values()):.1f} samples/s. "
        f"At the plan's size of {plan.micro_batch_size}: {named if chosen else 'not measured'}.",
        svg.axes(across, "samples in a micro-batch", upward, "samples/s"),
        *_trial_marks(timed, across, upward, _rate, "{:.1f} samples/s".format),
        *(_chosen_mark(plan, across, upward.position(chosen), named) if chosen else ()),
    )


def memory_bar(plan: PlanRecord) -> str:
    """The parts of the budget, as one bar from left to right."""
    parts = memory_parts(plan)
    total = sum(part.size_bytes for part in parts)
    if not total:
        return ""
    # At least 2 bytes, so that three ticks fit.
    scale = Scale(0, max(total, 2), _BAR.left, _BAR.right)
    drawn, start = [], 0
    for part in parts:
        left, right = scale.position(start), scale.position(start + part.size_bytes)
        about, kind = f"{format_bytes(part.size_bytes)} {part.about}", f"part {part.key}"
        drawn.append(element("rect", about=about, x=left, y=_BAR.top, width=right - left, height=36, class_=kind))
        start += part.size_bytes
    for value, text in svg.thin_ticks(svg.byte_ticks(scale)):
        x = scale.position(value)
        drawn.append(element("path", d=f"M{x:.2f} {_BAR.bottom:g} v6", class_="axis"))
        drawn.append(label(text, x, _BAR.bottom + 24, "soft middle"))
    about = "; ".join(f"{format_bytes(part.size_bytes)} {part.about}" for part in parts)
    return picture(_BAR, "Where the memory goes", f"{about}. In all {format_bytes(total)}.", *drawn)


def _rate(trial: Trial) -> float:
    return 0.0 if trial.outcome == "oom" else trial.samples_per_second


def _largest_drawn(plan: PlanRecord) -> int:
    """Up to where the curve meets the budget, if that is not far from what was tried."""
    tried = max([plan.micro_batch_size, *(trial.micro_batch_size for trial in plan.longest_trials)])
    if plan.curve is None:
        return tried
    meets = plan.curve.largest(plan.budget_bytes) + 1 if plan.budget_bytes else tried * 2
    return max(tried, min(sum(plan.micro_batch_sizes), meets, tried * 3 // 2))


def _size_scale(plan: PlanRecord) -> Scale:
    sizes = (plan.micro_batch_size, *(trial.micro_batch_size for trial in plan.longest_trials), _largest_drawn(plan))
    return choose_scale(sizes, FRAME.left, FRAME.right, margin=1.06)


def _budget_bands(plan: PlanRecord, upward: Scale) -> Iterator[str]:
    if not plan.budget_bytes:
        return
    budget, limit = upward.position(plan.budget_bytes), upward.position(plan.limit_bytes)
    yield svg.band(FRAME.left, FRAME.top, FRAME.right, budget, "beyond")
    yield svg.band(FRAME.left, budget, FRAME.right, limit, "headroom")
    yield polyline([(FRAME.left, budget), (FRAME.right, budget)], "budget")
    yield label(f"budget {format_bytes(plan.budget_bytes)}", FRAME.left + 6, budget - 5, "over")
    if plan.headroom_bytes:
        yield polyline([(FRAME.left, limit), (FRAME.right, limit)], "limit")
        yield label(f"limit {format_bytes(plan.limit_bytes)}", FRAME.left + 6, limit + 18, "over")


def _curve_lines(plan: PlanRecord, across: Scale, upward: Scale) -> Iterator[str]:
    """Whole up to the largest size that ran, dashed beyond: there it is a prediction."""
    if plan.curve is None:
        return
    curve, last = plan.curve, _largest_drawn(plan)
    ran = max((trial.micro_batch_size for trial in plan.longest_trials if trial.outcome != "oom"), default=0)
    even = {max(round(across.value(FRAME.left + 3 * step)), 1) for step in range(117)}
    knots = {size for size, _ in curve.reserved if size >= 1}
    sizes = sorted(size for size in {*even, *knots, ran, last} - {0} if size <= last)
    points = [(size, max(curve.peak_reserved(size), 0)) for size in sizes]
    drawn = [(size, across.position(size), upward.position(peak)) for size, peak in points if peak <= upward.high]
    yield polyline(((x, y) for size, x, y in drawn if size <= ran), "curve")
    yield polyline(((x, y) for size, x, y in drawn if size >= ran), "curve expected")


def _trial_marks(
    trials: Iterable[Trial], across: Scale, upward: Scale, measure: Callable[[Trial], _N], write: Callable[[_N], str]
) -> Iterator[str]:
    for trial in trials:
        value = measure(trial)
        about = f"{plural(trial.micro_batch_size, 'sample')}: {trial.outcome}, {write(value)}"
        x, y = across.position(trial.micro_batch_size), upward.position(value)
        yield _MARKS[trial.outcome](x, y, f"trial {trial.outcome}", about)


def _chosen_mark(plan: PlanRecord, across: Scale, y: float, measured: str) -> Iterator[str]:
    """A ring, a line down to its size, and the label above the plot, where nothing else is drawn."""
    x = across.position(plan.micro_batch_size)
    text = f"{plural(plan.micro_batch_size, 'sample')}: {measured}"
    yield polyline([(x, min(y + 8, FRAME.bottom)), (x, FRAME.bottom)], "chosen down")
    yield svg.dot(x, y, "chosen", f"the plan: {text}", radius=8)
    yield label(text, FRAME.right, 18, "strong end plan")


def run_chart(run: Run) -> str:
    """Size and retries over the steps of one run; empty where it has no step and no setback."""
    if not run.ranges and not run.setbacks:
        return ""
    sizes = [part.micro_batch_size for part in run.ranges]
    sizes += [size for back in run.setbacks for size in (back.old_size, back.new_size)]
    steps = [step for part in run.ranges for step in (part.first_step, part.last_step + 1)]
    steps += [back.step for back in run.setbacks]
    across = Scale(min(steps), max(*steps, min(steps) + 3), FRAME.left, FRAME.right)
    upward = Scale(0, max(*sizes, 2) * 1.15, FRAME.bottom - _LANE, FRAME.top)
    corners = (
        (across.position(step), upward.position(part.micro_batch_size))
        for part in thin_out(run.ranges, across)
        for step in (part.first_step, part.last_step + 1)
    )
    return picture(
        FRAME,
        f"Micro-batch size over the steps of run {run.id}",
        f"{plural(run.steps, 'step')} with sizes between {min(sizes)} and {max(sizes)}, "
        f"{plural(run.retries, 'retry', 'retries')}.",
        svg.axes(across, "step", upward, "samples in a micro-batch"),
        polyline(corners, "sizes"),
        *_retry_bars(run, across),
        *_setback_marks(run.setbacks, across, upward),
    )


def thin_out(ranges: Sequence[StepRange], across: Scale) -> list[StepRange]:
    """The ranges that make a difference to the chart, in order: at most four that begin at one position.

    The first, the least, the most and the last are among them, so no dip and no peak is lost.
    """
    thinned: list[StepRange] = []
    for _, group in groupby(ranges, lambda part: int(across.position(part.first_step))):
        parts = list(group)
        by_size = sorted(range(len(parts)), key=lambda index: parts[index].micro_batch_size)
        thinned += [parts[index] for index in sorted({0, by_size[0], by_size[-1], len(parts) - 1})]
    return thinned


def _retry_bars(run: Run, across: Scale) -> Iterator[str]:
    """One bar at each position, as high as the most retries of a range of steps that begins there."""
    most: dict[float, StepRange] = {}
    for part in run.ranges:
        x = round(across.position(part.first_step), 0)
        if part.retries > (most[x].retries if x in most else 0):
            most[x] = part
    if not most:
        return
    highest = max(part.retries for part in most.values())
    yield label("retries", FRAME.left - 7, FRAME.bottom - 3, "soft end")
    for part in most.values():
        left, right = across.position(part.first_step), across.position(part.last_step + 1)
        height = (_LANE - 8) * part.retries / highest
        about = f"{plural(part.retries, 'retry', 'retries')} from step {part.first_step}"
        top, width = FRAME.bottom - height, max(right - left, 1.5)
        yield element("rect", about=about, x=left, y=top, width=width, height=height, class_="retries")


def _setback_marks(setbacks: Sequence[Setback], across: Scale, upward: Scale) -> Iterator[str]:
    """A cross where a step was undone, a triangle where the size changed between two steps.

    Of those of one kind that would lie on each other only the first is drawn; the table counts them all.
    """
    seen = set()
    for back in setbacks:
        size = back.old_size if back.kind == "retry" else back.new_size
        x, y = across.position(back.step), upward.position(size)
        if (mark := (round(x / 8), round(y), back.kind)) in seen:
            continue
        seen.add(mark)
        about = f"step {back.step}: {back.old_size} to {back.new_size} samples"
        if back.kind == "retry":
            yield svg.cross(x, y, "setback oom", about)
        else:
            yield svg.triangle(x, y, "setback changed", about, height=9 if back.new_size > back.old_size else -9)
