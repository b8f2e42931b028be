"""A prediction's own test: the size that it is about, traced.

Covers which size that is, and how often the answer may move. Does not cover the trace (``tracing.check``). Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autobatch.errors import CannotPredict
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.timeline import Timeline

__all__ = ["Proof", "prove"]

_ROUNDS = 3
"""A step that is no line is mostly judged anew once: with a trace at the first answer, the second is near to it."""
_FEWEST = 2
_OF_ONE = "one sample is another program than several, which skips some copies, so it is never traced"


@dataclass(frozen=True)
class Proof:
    """An estimate, and whether it holds where it counts.

    Attributes:
        estimate: With what the traces have shown.
        proven_at: The size that it was asked about and traced at; 0 where it was not traced there.
        doubt: Why not; empty where it was.
    """

    estimate: Estimate
    proven_at: int = 0
    doubt: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence where it was not traced at the size that it is about."""
        told = f"the step was not traced at the size that is told, which follows from other sizes: {self.doubt}"
        return (told,) if self.doubt else ()


def prove(
    estimate: Estimate,
    traced: tuple[int, ...],
    judge: Callable[[Estimate], int],
    check: Callable[[Timeline, int], Timeline | None],
) -> Proof:
    """Trace the size that the estimate leads to; where it says another thing, judge again with that trace.

    Args:
        estimate: Of one step.
        traced: Sizes that its timeline is known to hold at, if it is not interpolated.
        judge: The size that it leads to.
        check: ``None`` where the timeline holds at this size, else one with a trace of it.
    """
    for _ in range(_ROUNDS):
        size, timeline = judge(estimate), estimate.timeline
        if size in _known(timeline, traced):
            return Proof(estimate, size)
        if size < _FEWEST:
            return Proof(estimate, doubt=_OF_ONE)
        try:
            changed = check(timeline, size)
        except CannotPredict as error:
            return Proof(estimate, doubt=str(error))
        if changed is None:
            return Proof(estimate, size)
        estimate = estimate.changed(timeline=changed)
    size = judge(estimate)
    if size in _known(estimate.timeline, traced):
        return Proof(estimate, size)
    return Proof(estimate, doubt=f"after {_ROUNDS} more traces the answer had moved once more")


def _known(timeline: Timeline, traced: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(step.samples for step in timeline.traced) if timeline.interpolated else traced
