"""Decides when a micro-batch size that failed is tried again.

Covers one failed size: how many clean steps it waits, what is tried first, and how trust is regained. Does not cover
which size a step has when memory is free or short (``pacing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["CLEAN_STEPS", "LONGEST_WAIT", "Setback"]

CLEAN_STEPS = 20
"""Clean steps before one of the sizes below a failed one is tried while it waits, and the first wait after thrash."""

LONGEST_WAIT = 64 * CLEAN_STEPS
"""The most clean steps before a failed size is tried again."""


@dataclass(frozen=True)
class Setback:
    """A size that failed, and when it comes back.

    Attributes:
        size: The size to come back to.
        ran: The largest size that has run instead.
        failed: The smallest size that failed.
        wait: How many clean steps it has to wait each time; halved by each step that goes well at ``size``.
        left: How many of them are still to come; 0: it is tried.
        trial: A size between ``ran`` and ``size`` that is tried first.
    """

    size: int
    ran: int
    failed: int
    wait: int
    left: int
    trial: int | None = None

    @property
    def goal(self) -> int:
        """The size for now."""
        if self.trial is not None:
            return self.trial
        return self.ran if self.left else self.size

    @property
    def is_tried(self) -> bool:
        """Whether the size for now is one that has not yet run since the failure."""
        return self.goal > self.ran

    def count_step(self) -> Setback:
        """A clean step. After a long wait the smallest size that failed is tried first: it is the likelier to run."""
        left = max(self.left - 1, 0)
        is_due = self.left > left == 0 and self.wait >= CLEAN_STEPS and self.failed < self.size
        return replace(self, left=left, trial=self.failed if is_due else self.trial)

    def try_between(self, rungs: Sequence[int]) -> Setback:
        """Try a size halfway between the largest that ran and the smallest that failed, if one is left."""
        between = [rung for rung in rungs if self.ran < rung < self.failed]
        return replace(self, trial=between[len(between) // 2]) if between else self

    def succeed(self) -> Setback | None:
        """The size for now went well; ``None`` once nothing is left to wait for."""
        if self.trial is not None:
            return replace(self, ran=self.trial, failed=self.failed if self.left else self.size, trial=None)
        wait = self.wait // 2
        return replace(self, wait=wait) if wait else None

    def fail(self, ran: int, failed: int, least_wait: int) -> Setback:
        """The size for now failed, and ``ran`` ran instead: twice the wait, unless only a size in between was tried.

        What has run before stays: where that failed too, in the same step, it was no loss that stays.
        """
        ran = max(ran, self.ran)
        known = min((size for size in (failed, self.failed) if size > ran), default=self.size)
        wait = self.wait if self.left else min(max(2 * self.wait, least_wait), LONGEST_WAIT)
        return replace(self, ran=ran, failed=known, trial=None, wait=wait, left=self.left or wait)
