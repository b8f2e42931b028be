"""Defines what a plan says of each rank, and what follows from all of them: the slowest, and what another share gives.

Covers plain data and arithmetic. Does not cover how ranks exchange it (``distributed.division``), nor how it is shown
(``report``).
"""

from __future__ import annotations

from collections.abc import Sequence

from autobatch._bounds import SHORTEST, Bytes, Count, Samples, Seconds, Steps, Text
from autobatch.planning.shares import share_target
from autobatch.records import Record

__all__ = ["RankPlan", "find_slowest", "seconds_by_speed"]


class RankPlan(Record):
    """One rank's part of a plan.

    Attributes:
        rank: Counted from 0, as ``plan.rank``.
        plan_id: The id of this rank's own plan, which has its trials and its curve.
        host: The computer's name.
        device: What a person calls the device: ``"NVIDIA L4"``.
        share: Samples of an optimizer step on this rank.
        micro_batch_size: The most samples in one forward and backward there.
        accumulation_steps: How many micro-batches that is.
        peak_bytes: What meets the limit at that size; 0 where the device cannot measure.
        budget_bytes: What the process may hold; 0 where that is not known.
        seconds: Of a step of this rank by itself, as its trials were timed: it waits for nobody, and the optimizer
            steps after every second micro-batch. 0 where no trial was timed.
    """

    rank: Count
    plan_id: Text = ""
    host: Text = ""
    device: Text
    share: Samples
    micro_batch_size: Samples
    accumulation_steps: Steps
    peak_bytes: Bytes = 0
    budget_bytes: Bytes = 0
    seconds: Seconds = 0.0


def find_slowest(seconds: Sequence[float]) -> int | None:
    """Which rank takes longest, by the seconds of each; ``None`` where some were not timed or all take the same."""
    if not seconds or min(seconds) <= SHORTEST or max(seconds) == min(seconds):
        return None
    return max(range(len(seconds)), key=seconds.__getitem__)


def seconds_by_speed(samples: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of the slowest rank, were the samples divided by the ranks' speed; 0 where not all have one.

    Args:
        samples: Of each rank, in a step.
        seconds: That each rank takes for them.
    """
    if not samples or min(samples) < 1 or min(seconds) <= SHORTEST:
        return 0.0
    rates = [count / taken for count, taken in zip(samples, seconds, strict=True)]
    shares = share_target(sum(samples), "speed", rates)
    return max(share / rate for share, rate in zip(shares, rates, strict=True))
