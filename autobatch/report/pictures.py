"""Draws a plan with matplotlib: its memory curve with trials and limit, and where the memory goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobatch._formatting import format_bytes, plural
from autobatch.errors import InvalidArgument
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.breakdown import held_bytes, memory_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = {"fits": ("o", "#0969da"), "thrash": ("^", "#9a6700"), "oom": ("x", "#cf222e")}
_PARTS = {"resident": "#0969da", "peak": "#0969da", "passes": "#8250df", "update": "#d4720b"}
_PARTS |= {"unused": "#8c959f", "free": "#eaeef2", "headroom": "#fff1c2"}


def draw_plan(plan: PlanRecord, kind: str, ax: Axes | None) -> Axes:
    if kind not in ("peak", "memory"):
        raise InvalidArgument(f"plot({kind!r}): pass 'peak' or 'memory'")
    if ax is None:
        try:
            from matplotlib import pyplot as plt  # noqa: PLC0415 - an extra, and slow to import
        except ImportError:
            raise InvalidArgument("plot() needs matplotlib: pip install 'torch-autobatch[plot]'") from None
        ax = plt.subplots(figsize=(6.4, 4 if kind == "peak" else 2.6), layout="constrained")[1]
    (_draw_peaks if kind == "peak" else _draw_parts)(plan, ax)
    return ax


def _draw_peaks(plan: PlanRecord, ax: Axes) -> None:
    tried = max([plan.micro_batch_size, *(trial.micro_batch_size for trial in plan.longest_trials)])
    top = 1.2 * max([plan.budget_bytes, plan.peak_bytes, 1, *map(held_bytes, plan.longest_trials)])
    if plan.budget_bytes:
        ax.axhspan(plan.limit_bytes, plan.budget_bytes, color="#fff1c2", linewidth=0)
        ax.axhspan(plan.budget_bytes, top, color="#ffebe9", linewidth=0)
        ax.axhline(plan.budget_bytes, color="#cf222e", label=f"budget {format_bytes(plan.budget_bytes)}")
    if plan.headroom_bytes:
        label = f"limit {format_bytes(plan.limit_bytes)}"
        ax.axhline(plan.limit_bytes, color="#9a6700", linestyle="--", label=label)
    if plan.curve is not None:
        ran = max((one.micro_batch_size for one in plan.longest_trials if one.outcome != "oom"), default=0)
        largest = min(sum(plan.micro_batch_sizes), tried * 3 // 2)
        sizes = sorted({max(1, largest * step // 100) for step in range(101)} | {ran or 1})
        for style, part in (("-", [n for n in sizes if n <= ran]), (":", [n for n in sizes if n >= ran])):
            label = "curve" if style == "-" else "_curve where nothing ran"
            ax.plot(part, [plan.curve.peak_reserved(n) for n in part], style, color="#0969da", label=label)
    for outcome, (marker, color) in _MARKS.items():
        trials = [trial for trial in plan.longest_trials if trial.outcome == outcome]
        if trials:
            held = [held_bytes(trial) for trial in trials]
            ax.scatter([t.micro_batch_size for t in trials], held, marker=marker, color=color, zorder=3, label=outcome)
    if plan.peak_bytes:
        label = f"the plan: {plural(plan.micro_batch_size, 'sample')}, {format_bytes(plan.peak_bytes)}"
        ax.plot(
            [plan.micro_batch_size],
            [plan.peak_bytes],
            "o",
            label=label,
            markersize=13,
            fillstyle="none",
            color="#1a7f37",
            markeredgewidth=2,
        )
    ax.set(xlim=(0, None), ylim=(0, top), xlabel="samples in a micro-batch", ylabel="peak memory")
    ax.set_yticks(*_byte_ticks(top))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", fontsize="small")


def _draw_parts(plan: PlanRecord, ax: Axes) -> None:
    left = 0
    for part in memory_parts(plan):
        label = f"{format_bytes(part.size_bytes)} {part.about}"
        ax.barh([0], [part.size_bytes], left=left, color=_PARTS[part.key], edgecolor="#57606a", label=label)
        left += part.size_bytes
    ax.set(xlim=(0, max(left, 1)), yticks=[], title=f"Where the memory goes at {plan.micro_batch_size} samples")
    ax.set_xticks(*_byte_ticks(left))
    if left:
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.25), fontsize="small", frameon=False)


def _byte_ticks(most: float) -> tuple[list[float], list[str]]:
    """Return at most six round numbers of bytes up to ``most``, and their names."""
    step = next(
        factor * 1024.0**power
        for power in range(8)
        for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500)
        if factor * 1024.0**power * 6 > most
    )
    values = [step * index for index in range(int(most / step) + 1)]
    return values, [format_bytes(round(value)) for value in values]
