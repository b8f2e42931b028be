"""Draws the charts of a plan: memory and speed against the micro-batch size, and where the memory goes.

Each is one ``<svg>``, or an empty text where nothing was measured that it could show. Does not cover runs
(``run_chart``) nor colours (``style``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from autobatch._formatting import format_bytes, plural
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import Trial
from autobatch.report.breakdown import held_bytes, memory_parts
from autobatch.report.scales import LinearScale, LogScale, Scale, byte_ticks, choose_scale, count_ticks
from autobatch.report.svg import Frame, axes, band, cross, dot, element, label, picture, polyline, room_for, triangle

__all__ = ["memory_bar", "peak_chart", "speed_chart"]

_N = TypeVar("_N", int, float)

_MARKS: dict[str, Callable[[float, float, str, str], str]] = {"fits": dot, "oom": cross, "thrash": triangle}
_FRAME = Frame()
_BAR = Frame(height=80, left=16, right=404, top=10, bottom=46)
_BEYOND = 1.35
"""How far above budget and trials the chart still goes; a curve to sizes that never fit would press all else flat."""


def peak_chart(plan: PlanRecord) -> str:
    """Peak memory against micro-batch size: trials, curve, budget, headroom and the chosen size."""
    peaks = [held_bytes(trial) for trial in plan.trials]
    if not any((*peaks, plan.peak_bytes)):
        return ""
    across = _size_scale(plan)
    upward = _byte_scale(plan, peaks)
    return picture(
        _FRAME,
        "Peak memory against micro-batch size",
        _describe_peaks(plan),
        *_budget_bands(plan, upward),
        axes(
            _FRAME,
            (across, count_ticks(across), _name("samples in a micro-batch", across)),
            (upward, byte_ticks(upward), _name("peak", upward)),
        ),
        *_curve_lines(plan, across, upward),
        *_trial_marks(plan.trials, across, upward, held_bytes, format_bytes),
        *_chosen_mark(plan, across, upward.position(plan.peak_bytes), format_bytes(plan.peak_bytes)),
    )


def speed_chart(plan: PlanRecord) -> str:
    """Samples per second against micro-batch size."""
    rates = {trial.micro_batch_size: trial.samples_per_second for trial in plan.trials if trial.outcome != "oom"}
    if not any(rates.values()):
        return ""
    across = _size_scale(plan)
    upward = LinearScale(0, max(rates.values()) * 1.15, _FRAME.bottom, _FRAME.top)
    timed = [trial for trial in plan.trials if trial.outcome == "oom" or trial.samples_per_second]
    chosen = rates.get(plan.micro_batch_size, 0.0)
    named = f"{chosen:.1f}/s"
    return picture(
        _FRAME,
        "Samples per second against micro-batch size",
        f"Between {min(filter(None, rates.values())):.1f} and {max(rates.values()):.1f} samples/s. "
        f"At the plan's size of {plan.micro_batch_size}: {named if chosen else 'not measured'}.",
        axes(
            _FRAME,
            (across, count_ticks(across), _name("samples in a micro-batch", across)),
            (upward, count_ticks(upward), "samples/s"),
        ),
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
    scale = LinearScale(0, max(total, 2), _BAR.left, _BAR.right)
    pieces, start = [], 0
    for part in parts:
        left, right = scale.position(start), scale.position(start + part.size_bytes)
        about = element("title", f"{format_bytes(part.size_bytes)} {part.about}")
        pieces.append(
            element("rect", about, x=left, y=_BAR.top, width=right - left, height=36, class_=f"part {part.key}")
        )
        start += part.size_bytes
    ticks = [
        element("path", d=f"M{scale.position(tick.value):.2f} {_BAR.bottom:g} v6", class_="axis")
        + label(tick.label, scale.position(tick.value), _BAR.bottom + 24, "soft middle")
        for tick in room_for(byte_ticks(scale))
    ]
    about = "; ".join(f"{format_bytes(part.size_bytes)} {part.about}" for part in parts)
    return picture(_BAR, "Where the memory goes", f"{about}. In all {format_bytes(total)}.", *pieces, *ticks)


def _rate(trial: Trial) -> float:
    return 0.0 if trial.outcome == "oom" else trial.samples_per_second


def _name(what: str, scale: Scale) -> str:
    return f"{what} (log scale)" if isinstance(scale, LogScale) else what


def _largest_drawn(plan: PlanRecord) -> int:
    """Up to where the curve meets the budget, if that is not far from what was tried."""
    tried = max([plan.micro_batch_size, *(trial.micro_batch_size for trial in plan.trials)])
    if plan.curve is None:
        return tried
    meets = plan.curve.largest(plan.budget_bytes) + 1 if plan.budget_bytes else tried * 2
    return max(tried, min(sum(plan.micro_batch_sizes), meets, tried * 3 // 2))


def _size_scale(plan: PlanRecord) -> Scale:
    sizes = (plan.micro_batch_size, *(trial.micro_batch_size for trial in plan.trials), _largest_drawn(plan))
    return choose_scale(sizes, _FRAME.left, _FRAME.right, margin=1.06)


def _byte_scale(plan: PlanRecord, peaks: list[int]) -> Scale:
    shown = [*peaks, plan.peak_bytes, plan.budget_bytes]
    if plan.curve is not None:
        shown.append(min(plan.curve.peak_reserved(_largest_drawn(plan)), int(max(shown) * _BEYOND)))
    return choose_scale(shown, _FRAME.bottom, _FRAME.top)


def _budget_bands(plan: PlanRecord, upward: Scale) -> Iterator[str]:
    if not plan.budget_bytes:
        return
    budget, limit = upward.position(plan.budget_bytes), upward.position(plan.limit_bytes)
    yield band(_FRAME.left, _FRAME.top, _FRAME.right, budget, "beyond")
    yield band(_FRAME.left, budget, _FRAME.right, limit, "headroom")
    yield polyline([(_FRAME.left, budget), (_FRAME.right, budget)], "budget")
    yield label(f"budget {format_bytes(plan.budget_bytes)}", _FRAME.left + 6, budget - 5, "over")
    if plan.headroom_bytes:
        yield polyline([(_FRAME.left, limit), (_FRAME.right, limit)], "limit")
        yield label(f"limit {format_bytes(plan.limit_bytes)}", _FRAME.left + 6, limit + 18, "over")


def _curve_lines(plan: PlanRecord, across: Scale, upward: Scale) -> Iterator[str]:
    """Whole up to the largest size that ran, dashed beyond: there it is a prediction."""
    if plan.curve is None:
        return
    curve, last = plan.curve, _largest_drawn(plan)
    ran = max((trial.micro_batch_size for trial in plan.trials if trial.outcome != "oom"), default=0)
    even = {max(round(across.value(_FRAME.left + 3 * step)), 1) for step in range(117)}
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
    yield polyline([(x, min(y + 8, _FRAME.bottom)), (x, _FRAME.bottom)], "chosen down")
    yield dot(x, y, "chosen", f"the plan: {text}", radius=8)
    yield label(text, _FRAME.right, 18, "strong end plan")


def _describe_peaks(plan: PlanRecord) -> str:
    budget = f" of a budget of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    verb = "is predicted to need" if plan.predicted else "needs"
    return (
        f"{plural(plan.micro_batch_size, 'sample')}, the plan's size, {verb} {format_bytes(plan.peak_bytes)}{budget}; "
        f"{plural(len(plan.trials), 'trial')}, {plan.out_of_memory_trials} out of memory."
    )
