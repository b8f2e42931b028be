"""Remembers a size that failed, and decides when it is tried again.

Covers one such size and how long it waits. Does not cover which of several decides (``pacing``), nor the size that runs
meanwhile (``retry_size``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["CLEAN_STEPS", "LONGEST_WAIT", "Setback"]

CLEAN_STEPS = 20  # before a size below a failed one is tried while that waits; and the first wait after thrash
LONGEST_WAIT = 64 * CLEAN_STEPS  # before a failed size is tried again


@dataclass(frozen=True)
class Setback:
    """A size that failed, and when it comes back."""

    size: int  # to come back to
    ran: int  # the largest size that has run instead
    failed: int  # the smallest size that failed
    wait: int  # how many clean steps it has to wait each time; halved by each step that goes well at `size`
    left: int  # how many of them are still to come; 0: it is tried
    trial: int | None = None  # a size between `ran` and `size` that is tried first

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

        ``ran`` never falls: a smaller size that failed too, in the same step, was no lasting loss.
        """
        ran = max(ran, self.ran)
        known = min((size for size in (failed, self.failed) if size > ran), default=self.size)
        wait = self.wait if self.left else min(max(2 * self.wait, least_wait), LONGEST_WAIT)
        return replace(self, ran=ran, failed=known, trial=None, wait=wait, left=self.left or wait)
