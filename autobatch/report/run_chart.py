"""Draws the chart of a run: micro-batch size and retries from step to step.

Covers runs of any length: of many ranges of steps at one position, the first, the least, the most and the last are
drawn. Does not cover what happened in words (``tables``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from autobatch._formatting import plural
from autobatch.events.run_history import Run, Setback, StepRange
from autobatch.report.scales import LinearScale, Scale, count_ticks
from autobatch.report.svg import Frame, axes, cross, element, label, picture, polyline, triangle

__all__ = ["run_chart", "thin_out"]

_FRAME = Frame()
_LANE = 30
"""The height of the lane for retries, above the axis of steps."""


def run_chart(run: Run) -> str:
    """Size and retries over the steps of one run; empty where it has no step and no setback."""
    if not run.ranges and not run.setbacks:
        return ""
    sizes = [part.micro_batch_size for part in run.ranges]
    sizes += [size for back in run.setbacks for size in (back.old_size, back.new_size)]
    across = _step_scale(run)
    upward = LinearScale(0, max(*sizes, 2) * 1.15, _FRAME.bottom - _LANE, _FRAME.top)
    ranges = thin_out(run.ranges, across)
    return picture(
        _FRAME,
        f"Micro-batch size over the steps of run {run.id}",
        f"{plural(run.steps, 'step')} with sizes between {min(sizes)} and {max(sizes)}, "
        f"{plural(run.retries, 'retry', 'retries')}.",
        axes(
            _FRAME,
            (across, count_ticks(across), "step"),
            (upward, count_ticks(upward), "samples in a micro-batch"),
        ),
        polyline(_corners(ranges, across, upward), "sizes"),
        *_retry_bars(run, across),
        *_setback_marks(run.setbacks, across, upward),
    )


def thin_out(ranges: Sequence[StepRange], across: Scale) -> list[StepRange]:
    """The ranges that make a difference to the chart, in order: at most four that begin at one position.

    The least and the most size are always among them, so no dip and no peak is lost.
    """
    thinned: list[StepRange] = []
    for _, group in groupby(ranges, lambda part: int(across.position(part.first_step))):
        parts = list(group)
        indices = range(len(parts))
        least = min(indices, key=lambda index: parts[index].micro_batch_size)
        most = max(indices, key=lambda index: parts[index].micro_batch_size)
        thinned += [parts[index] for index in sorted({0, least, most, len(parts) - 1})]
    return thinned


def _step_scale(run: Run) -> Scale:
    steps = [step for part in run.ranges for step in (part.first_step, part.last_step + 1)]
    steps += [back.step for back in run.setbacks]
    first = min(steps)
    return LinearScale(first, max(*steps, first + 3), _FRAME.left, _FRAME.right)


def _corners(ranges: Sequence[StepRange], across: Scale, upward: Scale) -> Iterator[tuple[float, float]]:
    for part in ranges:
        y = upward.position(part.micro_batch_size)
        yield across.position(part.first_step), y
        yield across.position(part.last_step + 1), y


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
    yield label("retries", _FRAME.left - 7, _FRAME.bottom - 3, "soft end")
    for part in most.values():
        left, right = across.position(part.first_step), across.position(part.last_step + 1)
        height = (_LANE - 8) * part.retries / highest
        about = element("title", f"{plural(part.retries, 'retry', 'retries')} from step {part.first_step}")
        top, width = _FRAME.bottom - height, max(right - left, 1.5)
        yield element("rect", about, x=left, y=top, width=width, height=height, class_="retries")


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
            yield cross(x, y, "setback oom", about)
        else:
            yield triangle(x, y, "setback changed", about, height=9 if back.new_size > back.old_size else -9)
