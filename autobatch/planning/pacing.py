"""Decides the micro-batch size of each step from the free memory and from how the last steps went.

A retry costs at most one step, and a size that is too small costs something in every step. So the plan's size comes
back as soon as it may.

1. Before a step. The goal is the plan's size, or a smaller one while the plan's size waits (rules 4 to 6). The step
   takes the goal if the curve says that it fits, and otherwise the largest size that fits with the headroom to spare.
2. Out of memory in a step. The step takes the largest size that fits by the curve. If the curve says that the failed
   size fits, the step takes three quarters of it, and half after the next such failure. Without a curve it takes half.
3. After such a step. The plan's size is back as soon as the reading of free memory allows it. If that reading did not
   foresee the failure, the plan's size is back after one clean step.
4. If the plan's size fails again when it is back, it waits: 1, 2, 4, ... clean steps, up to ``LONGEST_WAIT``. Each
   clean step at the plan's size halves the wait. The step in which it fails takes a size halfway between the largest
   that ran and the smallest that failed.
5. The size that runs during a wait may fail once by chance. If it fails in two steps in a row, the size that ran then
   takes its place, and the waits begin again.
6. If the allocator thrashes in two steps in a row, the next smaller size runs for ``CLEAN_STEPS``; then rule 4 holds.

A step is clean if nothing failed or thrashed and its largest micro-batch was large enough to prove something.

Invariants: a size is one of ``Pace.rungs``. Out of memory makes the size smaller, and a clean step never does. After a
step that ran out of memory, none begins with a smaller size than that step ended with. A wait has at most
``LONGEST_WAIT`` clean steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from autobatch._bounds import Count, Flag, Samples
from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.records import Record

CLEAN_STEPS = 20
LONGEST_WAIT = 64 * CLEAN_STEPS

Reason = Literal["out of memory", "thrash", "less is free", "grown back"]

_Wait = Annotated[Count, Field(le=LONGEST_WAIT)]


class Ceiling(Record):
    """The size that runs since the plan's size failed, and the wait until the plan's size is on trial again."""

    ran: Samples  # the largest size that has run since
    failed: Samples  # the smallest size that failed
    wait: _Wait  # clean steps of each wait
    left: _Wait  # of them still to come; at 0 the plan's size is on trial
    is_doubted: Flag = False  # whether ``ran`` failed in the last step

    @model_validator(mode="after")
    def _check_sizes(self) -> Ceiling:
        if self.ran >= self.failed:
            raise ValueError("ran must be less than failed")
        return self


@dataclass(frozen=True)
class _Shortage:
    """The shortages of the running step."""

    failed: int  # smallest size that failed
    is_foreseen: bool  # whether the curve and the free memory explain each failure


@dataclass(frozen=True)
class Pace:
    """The size of the next step, and what the last steps have shown.

    Every transition returns a new value, so the old one still describes the state before a step that is undone. A step
    is ``before_step``, any number of ``after_shortage``, and ``after_step``.
    """

    ladder: tuple[int, ...]  # sizes to choose from, ascending; the last is the plan's
    size: int  # most samples in a micro-batch now; below the ladder it is halved
    curve: MemoryCurve | None = None
    smallest: int = 1  # samples that the model can run
    patience: int = 0  # clean steps before the size may grow; 0 if a change costs nothing, more for compiled models
    reason: Reason | None = None  # why the size last changed
    ceiling: Ceiling | None = None  # state since the plan's size failed
    clean_steps: int = 0  # at this size
    thrashed_steps: int = 0  # in a row
    shortage: _Shortage | None = None  # of the running step

    @property
    def goal(self) -> int:
        """The size that the last steps allow, whatever is free now."""
        return self.ceiling.ran if self.ceiling and self.ceiling.left else self.ladder[-1]

    @property
    def rungs(self) -> tuple[int, ...]:
        """Every size that can be chosen, ascending: the ladder, and its foot halved down to ``smallest``.

        Twice ``smallest`` less one is among them: any batch can be divided into parts of at most that size.
        """
        foot, top = self.ladder[0], self.ladder[-1]
        halves = {foot >> times for times in range(foot.bit_length())}
        sizes = {*halves, *self.ladder, self.smallest, 2 * self.smallest - 1}
        return tuple(sorted({size for size in sizes if self.smallest <= size <= top} | {top}))

    def before_step(self, most_bytes: int | None, limit_bytes: int | None) -> Pace:
        """Choose the size for a step that begins with so much memory (rule 1).

        A smaller size than the goal stays while it fits, so that it does not follow each change of another process.
        ``most_bytes`` is the most that the step can reach, resident bytes included, and ``limit_bytes`` that less the
        headroom.
        """
        if most_bytes is None and self.ceiling is None and self.size == self.ladder[-1]:
            return self  # most steps
        goal = size = self.goal
        if self.curve is not None and most_bytes is not None and self.curve.peak_reserved(goal) > most_bytes:
            # A smaller size cannot help with what one sample needs, the optimizer's step included.
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
        return self.move(size, "less is free" if size < self.size else "grown back")

    def after_shortage(self, failed: int, limit_bytes: int | None, least: int = 1) -> Pace:
        """Choose the next size of a step after a micro-batch of ``failed`` samples ran out of memory (rules 2 and 4).

        The step may hold ``limit_bytes``, resident ones included, and be divided into ``least`` samples. Raises
        ``InvalidArgument`` if the micro-batch cannot be made smaller.
        """
        rungs, ceiling = self.rungs, self.ceiling
        least = max(least, rungs[0])
        if failed <= least:
            raise InvalidArgument(f"a micro-batch of {failed} cannot be made smaller: at least {least} samples can run")
        fitting = None if self.curve is None or limit_bytes is None else self.curve.largest(limit_bytes)
        is_foreseen = fitting is not None and fitting < failed
        if fitting is not None and is_foreseen:
            wanted = fitting
        elif ceiling and not ceiling.left and ceiling.ran < failed:
            between = [rung for rung in rungs if ceiling.ran < rung < ceiling.failed]
            wanted = between[len(between) // 2] if between and not self.shortage else ceiling.ran
        elif fitting is None or (self.shortage and not self.shortage.is_foreseen):
            wanted = failed // 2
        else:
            wanted = failed * 3 // 4
        size = rungs[max(bisect_right(rungs, min(wanted, failed - 1)) - 1, 0)]
        shortage = _Shortage(rungs[bisect_left(rungs, failed)], is_foreseen)
        if (before := self.shortage) is not None:
            shortage = _Shortage(min(shortage.failed, before.failed), before.is_foreseen and is_foreseen)
        pace = self.move(max(size, least), "out of memory")
        return replace(pace, shortage=shortage, clean_steps=0, thrashed_steps=0)

    def after_step(self, largest: int, *, thrashed: bool) -> Pace:
        """Learn from a finished step, whose largest micro-batch had so many samples (rules 3 to 6).

        The allocator thrashes, that is, gives memory back and asks again, before each shortage too.
        """
        if self.size == self.ladder[-1] and not (thrashed or self.shortage or self.ceiling or self.thrashed_steps):
            return self  # most steps
        if self.shortage is not None:
            return replace(self, shortage=None).after_shortages(self.shortage)
        if thrashed:
            return replace(self, clean_steps=0, thrashed_steps=self.thrashed_steps + 1).after_thrash()
        return replace(self, thrashed_steps=0).after_clean_step(largest)

    def after_shortages(self, shortage: _Shortage) -> Pace:
        """Wait one clean step the first time (rule 3), and longer if the plan's size fails again (rules 4 and 5).

        A compiled model does not wait the first time: that would be one more change of its size. Nor does a step at the
        smallest size, since the next shortage would be its end.
        """
        old = self.ceiling
        if old and old.left and not old.is_doubted:
            pace = replace(self, ceiling=old.model_copy(update={"is_doubted": True}))
        elif old and old.left:  # ``failed`` may have failed by chance too, so all sizes are open again
            pace = self.hold_back(self.size, self.ladder[-1], 1, 1)
        else:
            at_once = shortage.is_foreseen or self.patience or self.size == self.rungs[0]
            pace = self.hold_back(self.size, shortage.failed, 0 if at_once else 1, max(self.patience, 1))
        return pace if shortage.is_foreseen else pace.move(pace.goal, "grown back")

    def after_thrash(self) -> Pace:
        """Leave a size that thrashed in two steps in a row (rule 6)."""
        lower = [rung for rung in self.rungs if rung < self.size]
        if self.thrashed_steps < 2 or not lower:
            return self
        ran = self.ceiling.ran if self.ceiling and not self.ceiling.left else lower[-1]
        ran = min(ran, lower[-1])
        return self.hold_back(ran, self.size, CLEAN_STEPS, CLEAN_STEPS).move(ran, "thrash")

    def after_clean_step(self, largest: int) -> Pace:
        """Count a clean step, which brings the plan's size nearer or proves it (rule 4)."""
        ceiling, goal = self.ceiling, self.goal
        is_on_trial = ceiling is not None and not ceiling.left and self.size == goal
        proven = ceiling.ran if ceiling is not None and is_on_trial else self.size // 2
        if largest <= proven or (ceiling is None and self.size == goal):
            return self
        if ceiling is not None and is_on_trial:
            ceiling = ceiling.model_copy(update={"wait": ceiling.wait // 2}) if ceiling.wait > 1 else None
        elif ceiling is not None:
            ceiling = ceiling.model_copy(update={"left": max(ceiling.left - 1, 0), "is_doubted": False})
        pace = replace(self, ceiling=ceiling, clean_steps=self.clean_steps + 1)
        # If a reading made the size smaller than the goal, the next reading decides.
        return pace.move(pace.goal, "grown back") if self.size == goal else pace

    def hold_back(self, ran: int, failed: int, first: int, least: int) -> Pace:
        """Let ``ran`` run in place of ``failed``: for ``first`` clean steps, or twice as long as the last time."""
        old = self.ceiling
        if old is None or old.left:
            return replace(self, ceiling=Ceiling(ran=ran, failed=failed, wait=first, left=first))
        ran = max(ran, old.ran)
        failed = min((size for size in (failed, old.failed) if size > ran), default=self.ladder[-1])
        wait = min(max(2 * old.wait, least), LONGEST_WAIT)
        return replace(self, ceiling=Ceiling(ran=ran, failed=failed, wait=wait, left=wait))

    def move(self, size: int, reason: Reason) -> Pace:
        if size == self.size:
            return self
        return replace(self, size=size, reason=reason, clean_steps=0, thrashed_steps=0)
