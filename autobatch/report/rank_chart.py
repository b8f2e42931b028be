"""Draws each rank's memory and time: two bars a rank, the peak within the budget and a step by itself."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch._bounds import SHORTEST
from autobatch._formatting import format_bytes, plural
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.rank_plan import RankPlan, find_slowest
from autobatch.report.ranks import format_seconds
from autobatch.report.sections import ends
from autobatch.report.svg import Frame, Scale, element, label, picture

__all__ = ["rank_chart"]

_ROW = 42
_LEFT, _RIGHT = 66, 330
_MEMORY, _TIME = 12, 9
"""The heights of the two bars."""


def rank_chart(plan: PlanRecord) -> str:
    """A row a rank; empty where there is one rank, or nothing of them was measured."""
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
