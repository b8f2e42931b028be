"""Decides the micro-batch size of each step from free memory and from how earlier steps went.

Does not cover how memory is read, nor how a step is retried (``training``).

The policy follows from costs. A retry costs one piece, at most one step; a size that is too small costs something in
every step. So the plan's size is back as soon as the reading of free memory allows it, and after an OOM that the
reading does not explain, one clean step later. Only a size that fails again as soon as it is back waits longer: 1, 2,
4, ... clean steps, up to ``LONGEST_WAIT``; each step that goes well halves the wait.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.retry_size import choose_retry_size
from autobatch.planning.setback import CLEAN_STEPS, Setback

__all__ = ["Pace", "Reason"]

Reason = Literal["out of memory", "thrash", "less is free", "grown back"]


@dataclass(frozen=True)
class _Failure:
    """What went wrong in the step that is under way."""

    goal: int  # the size that was wanted when the step began
    failed: int  # the smallest size at which a micro-batch failed
    is_explained: bool  # whether each OOM was explained by the curve and by what was free then


@dataclass(frozen=True)
class Pace:
    """The size of the next step and what the last steps have shown.

    Every transition returns a new value: the old one still describes the state before a step that is undone. A step
    is ``before_step``, any number of ``after_shortage``, ``after_step``.
    """

    ladder: tuple[int, ...]  # the sizes to choose from, ascending; the last is the plan's
    size: int  # the most samples in a micro-batch now; below the ladder it is halved
    curve: MemoryCurve | None = None
    smallest: int = 1  # the fewest samples that the model can run
    patience: int = 0  # clean steps before the size may grow: 0 where a change costs nothing, more for compiled models
    reason: Reason | None = None  # why the size last changed
    setbacks: tuple[Setback, ...] = ()  # the largest first; the last decides the size for now
    clean_steps: int = 0  # at this size, of batches that a larger size would have changed
    thrashed_steps: int = 0  # in a row, up to now
    failure: _Failure | None = None  # in the step that is under way
    goal: int = field(init=False)  # the size that the last steps allow, whatever is free now; each step asks

    def __post_init__(self) -> None:
        """Check the ladder and the size; find the goal."""
        if not self.ladder or self.ladder[0] < 1 or any(above <= below for below, above in pairwise(self.ladder)):
            raise InvalidArgument(f"a ladder must go up from at least one sample, not {self.ladder}")
        if not 1 <= self.size <= self.ladder[-1]:
            raise InvalidArgument(f"a size must be from 1 to the plan's {self.ladder[-1]}, not {self.size}")
        object.__setattr__(self, "goal", self.setbacks[-1].goal if self.setbacks else self.ladder[-1])

    @property
    def rungs(self) -> tuple[int, ...]:
        """Every size that can be chosen, ascending: the ladder and its foot halved again and again, from ``smallest``.

        Twice ``smallest`` less one is one of them: the fewest samples into which any batch can be divided.
        """
        foot, top = self.ladder[0], self.ladder[-1]
        halves = {foot >> times for times in range(foot.bit_length())}
        sizes = {*halves, *self.ladder, self.smallest, 2 * self.smallest - 1}
        return tuple(sorted({size for size in sizes if self.smallest <= size <= top} | {top}))

    def before_step(self, most_bytes: int | None, limit_bytes: int | None) -> Pace:
        """The size for a step that begins with so much memory; this very pace where the size stays.

        The goal where it can fit, else the largest size that fits with the headroom to spare. Of sizes below the goal
        one that can fit stays, so that the size does not follow each small change of what another process holds.

        ``most_bytes`` is what a step can reach at most, with what is resident; ``limit_bytes`` is without the headroom.
        """
        goal = size = self.goal
        if self.curve is not None and most_bytes is not None and self.curve.peak_reserved(goal) > most_bytes:
            # What one sample needs is needed at any size, the optimizer's step included: less would not help.
            peak, floor = self.curve.peak_reserved, self.curve.peak_reserved(1)
            most = max(most_bytes, floor)
            limit = most if limit_bytes is None else max(min(most_bytes, limit_bytes), floor)
            lower = [rung for rung in self.rungs if rung < goal] if peak(goal) > most else []
            if lower:
                size = max((rung for rung in lower if peak(rung) <= limit), default=lower[0])
                if size < self.size < goal and peak(self.size) <= most:
                    size = self.size
        if size > self.size and self.clean_steps < self.patience:
            return self
        return _move(self, size, "less is free" if size < self.size else "grown back")

    def after_shortage(self, failed: int, limit_bytes: int | None, least: int = 1) -> Pace:
        """Memory ended at a micro-batch: go on with less.

        Where a size failed that was only being tried, and the curve does not say why, what ran before is good enough.
        Else as ``retry_size`` chooses; at the second OOM of a step that it cannot explain the curve is not asked again.

        ``failed`` are the samples in the micro-batch that did not fit, and ``least`` the fewest into which the rest of
        the step can be divided; ``InvalidArgument`` where it cannot be made smaller.
        """
        rungs = self.rungs
        least = max(least, rungs[0])
        if failed <= least:
            raise InvalidArgument(f"a micro-batch of {failed} cannot be made smaller: at least {least} samples can run")
        explains = self.curve is not None and limit_bytes is not None and self.curve.largest(limit_bytes) < failed
        is_blind = self.failure is not None and not (self.failure.is_explained or explains)
        last = self.setbacks[-1] if self.setbacks else None
        proven = last.ran if last and last.is_tried and last.ran < failed and not explains else None
        size = max(choose_retry_size(failed, rungs, None if is_blind else self.curve, limit_bytes, proven), least)
        began = self.failure or _Failure(self.goal, self.size, is_explained=True)
        failed = min(rungs[bisect_left(rungs, failed)], began.failed)
        failure = _Failure(began.goal, failed, began.is_explained and explains)
        return replace(_move(self, size, "out of memory"), failure=failure, clean_steps=0, thrashed_steps=0)

    def after_step(self, largest: int, *, thrashed: bool) -> Pace:
        """A step whose largest micro-batch had so many samples is done; the next steps may have another size.

        ``thrashed`` says whether the allocator had to give memory back and ask again. Not counted where memory also
        ended in the step, because it does so before each OOM.
        """
        if self.size == self.ladder[-1] and not (thrashed or self.failure or self.setbacks or self.thrashed_steps):
            return self  # most steps
        if self.failure is not None:
            return _set_back_by_shortage(replace(self, failure=None), self.failure)
        if not thrashed:
            return _count(self, largest)
        pace = replace(self, clean_steps=0, thrashed_steps=self.thrashed_steps + 1)
        lower = [rung for rung in pace.rungs if rung < pace.size]
        if pace.thrashed_steps < 2 or not lower:
            return pace
        failure = _Failure(pace.goal, pace.size, is_explained=False)
        ran = self.setbacks[-1].ran if self.setbacks and self.setbacks[-1].is_tried else lower[-1]
        return _set_back(_move(pace, min(ran, lower[-1]), "thrash"), failure, CLEAN_STEPS, CLEAN_STEPS)


def _set_back_by_shortage(pace: Pace, failure: _Failure) -> Pace:
    """After a size that fails for the first time one clean step is waited, after one that fails again more.

    Tried again at once are: where the reading explained the OOM, what the next reading allows; a size that ran while a
    larger one waits; a compiled model's, whose next size would be one change more; and any size above the smallest, at
    which the next OOM ends the step in ``DoesNotFit`` whatever its cause.
    """
    at_once = failure.is_explained or pace.setbacks or pace.patience or pace.size == pace.rungs[0]
    pace = _set_back(pace, failure, 0 if at_once else 1, 1 if len(pace.setbacks) > 1 else max(pace.patience, 1))
    return pace if failure.is_explained else _move(pace, pace.goal, "grown back")


def _set_back(pace: Pace, failure: _Failure, first_wait: int, least_wait: int) -> Pace:
    """Remember what failed in a step that went on with ``pace.size``; ``least_wait`` is for one that fails again."""
    if pace.setbacks and pace.setbacks[-1].is_tried:
        setback = pace.setbacks[-1].fail(pace.size, failure.failed, least_wait)
        return replace(pace, setbacks=(*pace.setbacks[:-1], setback))
    setback = Setback(failure.goal, pace.size, failure.failed, first_wait, first_wait)
    return replace(pace, setbacks=(*pace.setbacks, setback))


def _count(pace: Pace, largest: int) -> Pace:
    """A clean step: it brings sizes that wait nearer, and proves one that is tried."""
    if pace.thrashed_steps:
        pace = replace(pace, thrashed_steps=0)
    if not pace.setbacks:
        # Nothing to come back to.
        if pace.size == pace.ladder[-1] or largest <= pace.size // 2:
            return pace
        return replace(pace, clean_steps=pace.clean_steps + 1)
    last = pace.setbacks[-1]
    is_tried = last.is_tried and pace.size == last.goal
    if largest <= (last.ran if is_tried else pace.size // 2):
        return pace
    pace = replace(pace, clean_steps=pace.clean_steps + 1)
    setbacks = [setback.count_step() for setback in pace.setbacks]
    if is_tried:
        setbacks[-1:] = [proven] if (proven := setbacks[-1].succeed()) else []
    elif last.left and pace.size == last.ran and pace.clean_steps % CLEAN_STEPS == 0:
        setbacks[-1] = setbacks[-1].try_between(pace.rungs)
    pace = replace(pace, setbacks=_merge(setbacks))
    # Where a reading made the size smaller than that, the next reading decides.
    return _move(pace, pace.goal, "grown back") if pace.size == last.goal else pace


def _merge(setbacks: list[Setback]) -> tuple[Setback, ...]:
    """Neighbours that have both waited long enough come back as one, also where a smaller size still waits."""
    merged: list[Setback] = []
    for inner in setbacks:
        if merged and not merged[-1].left and not inner.left:
            outer = merged[-1]
            merged[-1] = replace(outer, ran=inner.ran, failed=inner.failed, wait=max(outer.wait, inner.wait))
        else:
            merged.append(inner)
    return tuple(merged)


def _move(pace: Pace, size: int, reason: Reason) -> Pace:
    return pace if size == pace.size else replace(pace, size=size, reason=reason, clean_steps=0, thrashed_steps=0)
