"""Which micro-batch size to go on with, step after step.

Covers the way down (memory ended, the allocator thrashes, less is free than the size needs) and the way back up, one
notch at a time. Does not cover how memory is read, nor what is done about a step that ran out of it (``runner``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.planner import useful_sizes
from autobatch.planning.shrinking import shrink

__all__ = ["CLEAN_STEPS", "COMPILED_SIZES", "LONGEST_WAIT", "Pace", "Reason", "compiled_ladder", "eager_ladder"]

Reason = Literal["out of memory", "thrash", "less is free", "grown back"]

CLEAN_STEPS = 20
"""Steps without trouble before one notch is regained, and how long a regained size is on probation."""

LONGEST_WAIT = 64 * CLEAN_STEPS
"""The most clean steps before a size that has failed on probation is tried once more."""

COMPILED_SIZES = 3
"""Rungs for a compiled step. A batch in balanced parts has at most two sizes, so three rungs are six graphs of the
eight that ``torch._dynamo.config.recompile_limit`` allows: two are left for evaluation or the epoch's short last batch.
"""


def eager_ladder(target: int, size: int) -> tuple[int, ...]:
    """The sizes worth going on with where a new size costs nothing: ``useful_sizes`` up to the plan's, ascending.

    Raises:
        InvalidArgument: ``target`` or ``size`` is less than 1.
    """
    sizes = useful_sizes(target, size)
    return sizes if sizes[-1] == size else (*sizes, size)


def compiled_ladder(size: int) -> tuple[int, ...]:
    """A few sizes where each new one is compiled anew: ``size``, its half and its quarter, ascending.

    One sample is left out: ``torch.compile`` specialises on it even where sizes are dynamic.

    Raises:
        InvalidArgument: ``size`` is less than 1.
    """
    if size < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not {size}")
    halves = (size >> times for times in reversed(range(COMPILED_SIZES)))
    return tuple(half for half in halves if half > 1 or half == size)


@dataclass(frozen=True)
class Pace:
    """The size of the next step and what the last steps have taught.

    Every transition returns a new value, so a step that is undone is forgotten by keeping the old one. A step is
    ``before_step``, any number of ``after_shortage``, ``after_step``.

    Attributes:
        ladder: The sizes to choose from, ascending; the last is the plan's.
        size: The most samples in a micro-batch now. Below the ladder it is halved.
        curve: Peak memory by size, where a plan has one.
        smallest: Only an OOM leads below it: 2 for models with BatchNorm, which may refuse one sample.
        reason: Why the size last changed; ``None`` before the first change.
        grown_from: The size before, where the last change was on the way up.
        steps: Steps finished since the size last changed that say something about it: a batch of smaller micro-batches,
            which would have run before too, does not.
        clean_steps: Those among them since the last one that thrashed.
        thrashed_steps: Steps running that thrashed.
        is_short: Whether memory ended inside the step that is under way.
        refused: The size that failed on probation; ``None`` once it, or a larger one, came through.
        wait: Clean steps before ``refused`` is tried again.
    """

    ladder: tuple[int, ...]
    size: int
    curve: MemoryCurve | None = None
    smallest: int = 1
    reason: Reason | None = None
    grown_from: int | None = None
    steps: int = 0
    clean_steps: int = 0
    thrashed_steps: int = 0
    is_short: bool = False
    refused: int | None = None
    wait: int = CLEAN_STEPS

    def __post_init__(self) -> None:
        """Refuse what is no ladder, or a size above it."""
        if not self.ladder or self.ladder[0] < 1 or any(above <= below for below, above in pairwise(self.ladder)):
            raise InvalidArgument(f"a ladder must go up from at least one sample, not {self.ladder}")
        if not 1 <= self.size <= self.ladder[-1]:
            raise InvalidArgument(f"a size must be from 1 to the plan's {self.ladder[-1]}, not {self.size}")

    @property
    def rungs(self) -> tuple[int, ...]:
        """Every size that can be gone to, ascending from 1: the ladder, its foot halved again and again, ``smallest``.

        Returns:
            At most ``log2`` of the ladder's foot more than the ladder has, and one.
        """
        foot, top = self.ladder[0], self.ladder[-1]
        halves = {foot >> times for times in range(foot.bit_length())}
        return tuple(sorted({*halves, *self.ladder, max(min(self.smallest, top), 1)}))

    @property
    def is_on_probation(self) -> bool:
        """Whether a size that was grown into has not proved itself yet."""
        return self.grown_from is not None and self.steps < CLEAN_STEPS

    def after_shortage(self, failed: int, room_bytes: int | None) -> Pace:
        """Memory ended at a micro-batch: go on with less, as ``shrink`` says, down to the next rung.

        Where a size on probation failed, and the curve does not say why, the one before is good enough: it ran.

        Args:
            failed: Samples in the micro-batch that did not fit, from 2 to ``size``; parts of a batch may be smaller
                than ``size``.
            room_bytes: What the step may hold now, what is resident included; ``None`` where it cannot be told.

        Raises:
            InvalidArgument: ``failed`` is less than 2: one sample cannot be split.
        """
        rungs = self.rungs
        wanted = shrink(failed, self.curve, room_bytes, self.smallest)
        is_foreseen = self.curve is not None and room_bytes is not None and self.curve.largest(room_bytes) < failed
        if self.is_on_probation and failed > (self.grown_from or 0) and not is_foreseen:
            wanted = max(wanted, self.grown_from or 0)
        size = rungs[bisect_right(rungs, wanted) - 1]
        return replace(_move(self, size, "out of memory", failed), is_short=True)

    def before_step(self, there_bytes: int | None, room_bytes: int | None) -> Pace:
        """Less is free than the size needs: shrink before it fails.

        The size is left only where it cannot fit, and then for one that fits with the headroom to spare; between the
        two nothing changes, so that a neighbour who comes and goes a little is not answered each time.

        Args:
            there_bytes: What a step can reach at most, in bytes, what is resident included.
            room_bytes: The same less the headroom; ``None``: no headroom is known.

        Returns:
            This very pace where it can stay, or where the curve or what is there is not known.
        """
        if self.curve is None or there_bytes is None:
            return self
        # What one sample needs is needed at any size, the optimizer's step included: less would not help.
        least = self.curve.peak_reserved(1)
        if self.curve.peak_reserved(self.size) <= max(there_bytes, least):
            return self
        limit = max(there_bytes if room_bytes is None else min(there_bytes, room_bytes), least)
        lower = _lower(self)
        fitting = [rung for rung in lower if self.curve.peak_reserved(rung) <= limit]
        return _move(self, (fitting or lower[:1])[-1], "less is free") if lower else self

    def after_step(self, largest: int, room_bytes: int | None, *, thrashed: bool) -> Pace:
        """A step is done; the size may change for the next one.

        Down a notch where two steps running have thrashed. Up a notch, never above the plan's size, after enough clean
        steps and where the curve says that it fits.

        Args:
            largest: Samples in the step's largest micro-batch.
            room_bytes: As in ``after_shortage``.
            thrashed: Whether the allocator had to give memory back and ask again during the step. Not counted where
                memory also ended in the step, because it does so before each OOM.
        """
        if self.is_short:
            return replace(self, is_short=False)
        pace = _count(self, largest, thrashed=thrashed)
        if pace.thrashed_steps >= 2:
            lower = _lower(pace)
            return _move(pace, lower[-1], "thrash", largest) if lower else pace
        return _grow(pace, room_bytes)


def _count(pace: Pace, largest: int, *, thrashed: bool) -> Pace:
    counted = replace(
        pace,
        steps=pace.steps + (largest > (pace.grown_from or 0)),
        clean_steps=0 if thrashed else pace.clean_steps + 1,
        thrashed_steps=pace.thrashed_steps + 1 if thrashed else 0,
    )
    # Smaller sizes on the way back up say nothing about the one that failed: the wait is for that one.
    came_through = counted.refused is not None and counted.size >= counted.refused and counted.steps >= CLEAN_STEPS
    return replace(counted, refused=None, wait=CLEAN_STEPS) if came_through else counted


def _grow(pace: Pace, room_bytes: int | None) -> Pace:
    if pace.clean_steps < CLEAN_STEPS or pace.size >= pace.ladder[-1]:
        return pace
    rungs = pace.rungs
    higher = rungs[bisect_right(rungs, pace.size)]
    if pace.refused is not None and higher >= pace.refused and pace.clean_steps < pace.wait:
        return pace
    if pace.curve is not None and room_bytes is not None and pace.curve.peak_reserved(higher) > room_bytes:
        return pace
    return _move(pace, higher, "grown back")


def _lower(pace: Pace) -> tuple[int, ...]:
    """The rungs below the size that no OOM is needed for."""
    rungs = pace.rungs
    return rungs[bisect_left(rungs, pace.smallest) : bisect_left(rungs, pace.size)]


def _move(pace: Pace, size: int, reason: Reason, failed: int = 0) -> Pace:
    """``failed``: samples in the micro-batch that showed that there is too little, if one has."""
    has_failed = pace.is_on_probation and failed > (pace.grown_from or 0)
    return replace(
        pace,
        size=size,
        reason=reason,
        grown_from=pace.size if size > pace.size else None,
        steps=0,
        clean_steps=0,
        thrashed_steps=0,
        refused=pace.size if has_failed else pace.refused,
        wait=min(2 * pace.wait, LONGEST_WAIT) if has_failed else pace.wait,
    )
