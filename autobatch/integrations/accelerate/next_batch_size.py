"""Chooses the next batch size to call a function with: fewer calls than ``fit`` has trials, and more careful ones.

Covers the policy alone; it rests on that of ``planning.next_trial``. A call may take a minute before its first step, so
the largest size is not looked for to the sample. There is no prediction, so a jump rests on what surely fits: on a line
from what is resident at any size. It is not sure on a line through three sizes that hides little, nor where a size is
doubled since a call holds much that is not known to be resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autobatch.planning.evidence import Evidence, Question, draw_line
from autobatch.planning.next_trial import next_size
from autobatch.records import Trial

__all__ = ["next_batch_size"]

_NEAR = 10  # as accelerate's own goes down by a tenth
_HIDDEN = 4  # times as steep as what was measured; a jump that is long goes half of the way
_STRAIGHT = 1.1  # times the rise before; where gradients were the peak and activations become it, it is more


def next_batch_size(question: Question, trials: Sequence[Trial]) -> int | None:
    """The next size; ``None`` where all that may still fit are at most a tenth larger than one that does."""
    seen = Evidence(question, trials)
    lowest, size = seen.lowest, next_size(question, trials)
    if size is None or lowest not in seen.peaks:
        return size
    largest = seen.open[-1]
    if len(seen.peaks) > 1:  # memory grows convexly: beyond two sizes it takes no less than their line says
        largest = min(largest, draw_line(seen.peaks, trials).reach(question.limit_bytes))
    if largest <= lowest + lowest // _NEAR:
        return None
    if size > lowest and not _is_straight(seen):
        # On a line from what is resident at any size, which is steeper than memory is; but no slower than by doubling.
        largest = min(largest, max(seen.safe_reach(lowest, seen.peaks[lowest]), 2 * lowest))
    return min(size, largest)


def _is_straight(seen: Evidence) -> bool:
    """Whether the last three sizes lie on a line that leads further: what is not yet the peak cannot be much steeper.

    What other parts of a step hold is hidden below a peak that hardly grows, as that of gradients. It is no less than
    what is resident at any size, and at the largest size no more than the peak: so it is at most as steep as a line
    between the two.
    """
    points = sorted(seen.peaks.items())[-3:]
    rises = [(peak - before) / (size - smaller) for (smaller, before), (size, peak) in pairwise(points)]
    largest, peak = points[-1]
    steepest = (peak - min(trial.resident_bytes for trial in seen.measured)) / largest
    return len(rises) == 2 and rises[1] <= _STRAIGHT * rises[0] and steepest <= _HIDDEN * rises[1]
