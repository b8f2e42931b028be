"""Draws plans, runs and predictions on Axes of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autobatch._arguments import is_instance_with
from autobatch._bounds import SHORTEST
from autobatch._formatting import format_bytes, plural, show_value
from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.planning.curve import MemoryCurve, ran
from autobatch.planning.division import find_slowest
from autobatch.planning.plan_record import PlanRecord, RankPlan
from autobatch.records import Trial
from autobatch.report.breakdown import Part, held_bytes
from autobatch.report.sections import Chart, ends, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = {
    "page": ("#ffffff", "#0d1117"),
    "text": ("#24292f", "#e6edf3"),
    "soft": ("#57606a", "#9198a1"),
    "axis": ("#8c959f", "#6e7681"),
    "rule": ("#d0d7de", "#30363d"),
    "grid": ("#eaeef2", "#21262d"),
    "blue": ("#0969da", "#58a6ff"),
    "red": ("#cf222e", "#ff7b72"),
    "amber": ("#9a6700", "#d29922"),
    "violet": ("#8250df", "#bc8cff"),
    "green": ("#1a7f37", "#3fb950"),
    "orange": ("#d4720b", "#e0823d"),
    "teal": ("#1b9e9e", "#39c5cf"),
    "pink": ("#d6559e", "#f778ba"),
    "brown": ("#6e4b26", "#a57a4c"),
    "lime": ("#8fbf26", "#b5dc4e"),
    "sky": ("#7cb9f5", "#a8d1ff"),
    "beyond": ("#ffebe9", "#3d1a1d"),
    "headroom": ("#fff1c2", "#5c4a0e"),
    "note": ("#fff8c5", "#2e2508"),
}
"""Each color on a light and on a dark page. matplotlib draws with the light ones; a page has them as CSS variables."""

COLORS = {name: light for name, (light, _) in PALETTE.items()}
_PARTS = {"resident": "blue", "peak": "blue", "passes": "violet", "update": "orange", "unused": "axis", "free": "grid"}
_MARKS = {
    "fits": ("o", "blue", "fits"),
    "thrash": ("^", "amber", "fits, but slowly"),
    "oom": ("x", "red", "out of memory"),
}

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
WIDTH = 400.0
_FAR_APART = 200
"""Ratio of values from which the smaller ones of a linear axis lie within a line's width of each other."""
_BEYOND = 1.35
"""The curve is drawn up to so many times the budget: a size that never fits would press everything else flat."""
TOOLTIP = "title: "
"""Beginning of an artist's gid that becomes its tooltip."""


class Peaks(NamedTuple):
    """Numbers of a chart of peaks; ``size`` and ``peak_bytes`` get a ring, which means ``name``.

    ``points`` are sizes with predicted bytes, which are drawn in place of the curve. ``whole`` names ``budget_bytes``.
    """

    curve: MemoryCurve | None
    trials: Sequence[Trial]
    budget_bytes: int
    limit_bytes: int
    size: int
    peak_bytes: int
    share: int
    name: str = "the plan"
    points: Sequence[tuple[int, int]] = ()
    whole: str = "budget"


def plot(charts: Mapping[str, Chart], kind: str, ax: Axes | None) -> Axes:
    """Draw the chart of this kind on the given Axes, or on those of a new figure."""
    if not isinstance(kind, str) or kind not in charts:
        raise InvalidArgument(f"plot({show_value(kind)}): pass 'peak' or 'memory', and Axes as ax=")
    chart = charts[kind]
    if ax is None:
        try:
            from matplotlib import pyplot as plt  # noqa: PLC0415 - an extra, and slow to import
        except ImportError:
            raise InvalidArgument("plot() needs matplotlib: pip install 'torch-autobatch[plot]'") from None
        ax = plt.subplots(figsize=(6.4, 6.4 * chart.height / WIDTH), layout="constrained")[1]
    elif not is_instance_with(ax, "barh", "axhspan"):
        raise InvalidArgument(f"plot(ax={show_value(ax)}): pass Axes of matplotlib, or leave ax= out")
    elif (figure := ax.figure.figure).get_layout_engine() is None:
        figure.set_layout_engine("constrained")  # the legend is below the Axes, and would be cut off
    chart.draw(ax)
    return ax


def plan_peaks(plan: PlanRecord) -> Peaks:
    """Return the numbers of a plan's chart of peaks."""
    size, share = plan.micro_batch_size, sum(plan.micro_batch_sizes)
    trials = plan.longest_trials
    return Peaks(plan.curve, trials, plan.budget_bytes, plan.limit_bytes, size, plan.peak_bytes, share)


def draw_peaks(peaks: Peaks, ax: Axes) -> None:
    """Draw peak memory against micro-batch size: trials, curve, budget, limit and the plan's size."""
    largest = _largest_drawn(peaks)
    held = [*map(held_bytes, peaks.trials), peaks.peak_bytes, peaks.budget_bytes]
    if peaks.curve is not None:
        held.append(min(peaks.curve.peak_reserved(largest), int(max(*held, 1) * _BEYOND)))
        held.append(peaks.curve.peak_reserved(1))
    held += [peak for size, peak in peaks.points if size <= largest]
    _set_sizes(ax, [peaks.size, largest, *(trial.micro_batch_size for trial in peaks.trials)])
    _set_scale(ax, "y", held, margin=1.12)
    _label_bytes(ax, "y")
    bottom, top = ax.get_ylim()
    if peaks.budget_bytes:
        ax.axhspan(peaks.limit_bytes, peaks.budget_bytes, color=COLORS["headroom"], linewidth=0)
        ax.axhspan(peaks.budget_bytes, top, color=COLORS["beyond"], linewidth=0)
        _draw_border(ax, peaks.whole, peaks.budget_bytes, "red", is_above=True)
    if peaks.limit_bytes < peaks.budget_bytes:
        _draw_border(ax, "limit", peaks.limit_bytes, "amber", is_above=False)
    if drawn := [point for point in peaks.points if point[0] <= largest]:
        ax.plot(*zip(*drawn, strict=True), ".:", color=COLORS["blue"], label="predicted")
    elif peaks.curve is not None:
        _draw_curve(ax, peaks.curve, peaks, largest, top)
    _draw_marks(ax, peaks.trials, held_bytes, format_bytes)
    if peaks.peak_bytes:
        ax.vlines(peaks.size, bottom, peaks.peak_bytes, COLORS["green"], ":", linewidth=1.25)
        _draw_ring(ax, peaks.size, peaks.peak_bytes, format_bytes(peaks.peak_bytes), peaks.name)
    ax.set(ylabel="peak memory")
    _draw_legend(ax)


def _largest_drawn(peaks: Peaks) -> int:
    """Return the size where the curve meets the budget; at most half more than the largest trial."""
    near = [size for size, peak in peaks.points if peak <= peaks.budget_bytes * _BEYOND]
    tried = max([peaks.size, 1, *near, *(trial.micro_batch_size for trial in peaks.trials)])
    if peaks.curve is None:
        return tried
    meets = peaks.curve.largest(peaks.budget_bytes) + 1 if peaks.budget_bytes else tried * 2
    return max(tried, min(peaks.share, meets, max(tried * 3 // 2, 2)))


def _draw_border(ax: Axes, name: str, size_bytes: int, color: str, *, is_above: bool) -> None:
    ax.axhline(size_bytes, color=COLORS[color], linestyle="-" if is_above else "--", linewidth=1.5)
    text, where = f"{name} {format_bytes(size_bytes)}", (0.015, size_bytes)
    offset, va = ((0, 2), "bottom") if is_above else ((0, -3), "top")
    place: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "va": va}
    ax.annotate(text, where, offset, color=COLORS[color], **place)


def _draw_curve(ax: Axes, curve: MemoryCurve, peaks: Peaks, largest: int, top: float) -> None:
    """Draw a whole line up to the largest size that ran, and a dotted one beyond."""
    last = max((trial.micro_batch_size for trial in peaks.trials if ran(trial)), default=0)
    knots = {size for size, _ in curve.reserved}
    sizes = {last, largest, *knots, *(largest * part // 100 for part in range(101))}
    sizes |= {round(largest ** (part / 50)) for part in range(51)}  # for a logarithmic axis
    points = [(size, max(curve.peak_reserved(size), 1)) for size in sorted(sizes) if 1 <= size <= largest]
    drawn = [(size, peak) for size, peak in points if peak <= top]
    for style, label, part in (
        ("-", "curve", [point for point in drawn if point[0] <= last]),
        (":", "curve, not tried", [point for point in drawn if point[0] >= last]),
    ):
        if len(part) > 1:
            ax.plot(*zip(*part, strict=True), style, color=COLORS["blue"], linewidth=2, label=label)


def draw_speeds(plan: PlanRecord, ax: Axes) -> None:
    """Draw samples per second against micro-batch size."""
    timed = [trial for trial in plan.longest_trials if not ran(trial) or trial.samples_per_second]
    rates = {trial.micro_batch_size: _rate(trial) for trial in timed}
    _set_sizes(ax, [_largest_drawn(plan_peaks(plan)), *rates])
    ax.set(ylabel="samples/s", ylim=(0, 1.15 * max([*rates.values(), 1e-9])))
    _draw_marks(ax, timed, _rate, "{:.1f} samples/s".format)
    if chosen := rates.get(plan.micro_batch_size):
        _draw_ring(ax, plan.micro_batch_size, chosen, f"{chosen:.1f}/s")
    _draw_legend(ax)


def _rate(trial: Trial) -> float:
    return trial.samples_per_second if ran(trial) else 0.0


def _draw_marks(
    ax: Axes, trials: Sequence[Trial], measure: Callable[[Trial], Any], write: Callable[[Any], str]
) -> None:
    named = set()
    for trial in trials:
        marker, color, label = _MARKS[trial.outcome]
        value, size = measure(trial), trial.micro_batch_size
        about = f"{plural(size, 'sample')}: {trial.outcome}, {write(value)}"
        place = (size, max(value, ax.get_ylim()[0]))
        _draw_mark(ax, place, marker, color, about=about, label="_" if label in named else label)
        named.add(label)


def _draw_mark(ax: Axes, place: tuple[float, float], marker: str, color: str, *, about: str, label: str) -> None:
    gid, shade = f"{TOOLTIP}{about}", COLORS[color]
    ax.plot(
        *([value] for value in place),
        marker,
        color=shade,
        gid=gid,
        label=label,
        zorder=3,
        markersize=7,
        markeredgewidth=2,
    )


def _draw_ring(ax: Axes, size: int, value: float, measured: str, name: str = "the plan") -> None:
    """Draw a ring around the plan's size, and write the numbers above the plot, where nothing else is drawn."""
    text, color = f"{plural(size, 'sample')}: {measured}", COLORS["green" if name == "the plan" else "red"]
    options: dict[str, Any] = {"color": color, "zorder": 4, "gid": f"{TOOLTIP}{name}: {text}", "label": name}
    ax.plot([size], [value], "o", clip_on=False, fillstyle="none", markersize=14, markeredgewidth=2.5, **options)
    ax.set_title(text, loc="right", color=color, fontsize="medium", fontweight="bold")


def part_chart(parts: Sequence[Part]) -> Chart:
    return Chart(partial(draw_parts, parts), 96 + 20 * len(parts))


def draw_parts(parts: Sequence[Part], ax: Axes) -> None:
    """Draw the parts of the budget, as one bar from left to right."""
    left = 0
    for part in parts:
        about = f"{format_bytes(part.size_bytes)} {part.about}"
        color = COLORS[_PARTS.get(part.key, part.key)]
        [bar] = ax.barh([0], [part.size_bytes], left=left, color=color, edgecolor=COLORS["axis"], linewidth=0.5)
        bar.set(gid=f"{TOOLTIP}{about}", label=about.partition(":")[0], clip_on=False)  # its edge is half outside
        left += part.size_bytes
    ax.set(xlim=(0, max(left, 1)), yticks=[])
    ax.spines[["left", "top", "right"]].set_visible(False)
    _label_bytes(ax, "x")
    _draw_legend(ax, columns=1)


def rank_chart(plan: PlanRecord) -> Chart:
    shown, _ = ends(plan.ranks, "rank")
    return Chart(partial(_draw_ranks, plan, shown), 70 + 40 * len(shown))


def _draw_ranks(plan: PlanRecord, shown: Sequence[RankPlan], ax: Axes) -> None:
    """Draw two bars for each rank, its peak within its budget and its time, as shares of the longest."""
    most_bytes = max(1, *(max(one.peak_bytes, one.budget_bytes) for one in plan.ranks))
    most_seconds = max(SHORTEST, *(one.seconds for one in plan.ranks))
    slowest = find_slowest([one.seconds for one in plan.ranks])

    def draw(y: float, share: float, color: str, about: str, text: str = "") -> None:
        ax.barh([y], [share], 0.32, color=COLORS[color], gid=f"{TOOLTIP}{about}")
        ax.text(1.02, y, text, va="center", color=COLORS["soft"])

    for row, one in enumerate(shown):
        about = _describe_rank(one)
        if one.peak_bytes:
            draw(row - 0.18, one.budget_bytes / most_bytes, "grid", about, format_bytes(one.peak_bytes))
            draw(row - 0.18, one.peak_bytes / most_bytes, "blue", about)
        if one.seconds > SHORTEST:
            color = "orange" if one.rank == slowest else "violet"
            draw(row + 0.18, one.seconds / most_seconds, color, about, format_seconds(one.seconds))
    ax.set(xlim=(0, 1.3), ylim=(len(shown) - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(len(shown)), [f"rank {one.rank}" for one in shown])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    for color, label in (("blue", "peak"), ("grid", "budget"), ("violet", "step alone"), ("orange", "the slowest")):
        ax.bar([0], [0], color=COLORS[color], label=label)
    _draw_legend(ax)


def _describe_rank(one: RankPlan) -> str:
    budget = f" of {format_bytes(one.budget_bytes)}" if one.budget_bytes else ""
    peak = f", peak {format_bytes(one.peak_bytes)}{budget}" if one.peak_bytes else ""
    seconds = f", {format_seconds(one.seconds)} a step by itself" if one.seconds > SHORTEST else ""
    return f"rank {one.rank}: {plural(one.share, 'sample')}{peak}{seconds}"


def draw_run(run: Run, ax: Axes) -> None:
    """Draw micro-batch size and retries over the steps of a run."""
    corners = [(step, part.micro_batch_size) for part in run.ranges for step in (part.first_step, part.last_step + 1)]
    changes = [(back.step, size) for back in run.setbacks for size in (back.old_size, back.new_size)]
    steps, sizes = zip(*(corners + changes), strict=True)
    first, last = min(steps), max(*steps, min(steps) + 3)
    ax.plot(*zip(*corners or [(first, sizes[0])], strict=True), color=COLORS["blue"], linewidth=2)
    seen: set[object] = set()
    for back in run.setbacks:
        is_retry, is_larger = back.kind == "retry", back.new_size > back.old_size
        size = back.old_size if is_retry else back.new_size
        place = (back.step * 60 // (last - first), size, is_retry)
        if place in seen:  # it would lie on another one; the table counts them all
            continue
        seen.add(place)
        marker, color = ("x", "red") if is_retry else ("^" if is_larger else "v", "amber")
        label = "a step that was undone" if is_retry else "a larger size" if is_larger else "a smaller size"
        about = f"step {back.step}: {back.old_size} to {back.new_size} samples"
        _draw_mark(ax, (back.step, size), marker, color, about=about, label="_" if label in seen else label)
        seen.add(label)
    _style(ax)
    ax.set(xlabel="step", ylabel="samples in a micro-batch", xlim=(first, last), ylim=(0, 1.15 * max(*sizes, 2)))
    ax.locator_params(integer=True, nbins=6)
    _draw_legend(ax)


def _set_sizes(ax: Axes, sizes: Sequence[int]) -> None:
    _style(ax)
    _set_scale(ax, "x", sizes, margin=1.06)
    ax.set(xlabel="samples in a micro-batch")
    ax.xaxis.set_major_formatter("{x:g}")


def _style(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", linewidth=0.75, color=COLORS["axis"], alpha=0.3)
    ax.set_axisbelow(True)
    ax.tick_params(axis="y", length=0)


def _set_scale(ax: Axes, axis: Literal["x", "y"], values: Sequence[float], margin: float) -> None:
    """Choose limits within which all positive values are distinct: logarithmic if they are far apart, else from 0."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high < _FAR_APART * low:
        ax.set(**{f"{axis}lim": (0, max(high * margin, 3))})
        ax.locator_params(axis=axis, integer=True, nbins=6)
        return
    ratio = high / low
    limits = low / ratio ** ((margin - 1) / 2), high * ratio ** (margin - 1)
    ax.set(**{f"{axis}scale": "log", f"{axis}lim": limits})
    ax.minorticks_off()


def _label_bytes(ax: Axes, axis: str) -> None:
    """Put at most six round numbers of bytes at an axis; on a linear one all have one unit."""
    low, high = getattr(ax, f"get_{axis}lim")()
    if getattr(ax, f"get_{axis}scale")() == "log":
        powers = [2**power for power in range(64) if low <= 2**power <= high]
        values = powers[:: -(-len(powers) // 6)]
        labels = [format_bytes(value).replace(".0 ", " ") for value in values]
    else:
        unit = int(math.log2(high)) // 10  # that of the highest value, as in the labels of lines
        factors = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
        step = next(factor for factor in factors if factor * 1024**unit * 6 > high)
        values = [step * 1024**unit * index for index in range(int(high / 1024**unit / step) + 1)]
        labels = [f"{value / 1024**unit:g} {_UNITS[unit]}" for value in values]
    ax.set(**{f"{axis}ticks": values, f"{axis}ticklabels": labels})


def _draw_legend(ax: Axes, columns: int = 2) -> None:
    """Draw the legend below the axes and their labels, where no data is."""
    if ax.get_legend_handles_labels()[0]:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "frameon": False}
        below = 4 if ax.get_xlabel() else 2.2  # in letters
        ax.legend(ncols=columns, fontsize=11, borderaxespad=below, columnspacing=1.2, handlelength=1.6, **place)
