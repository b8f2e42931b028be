"""Defines a plan's record of each rank, and finds the slowest rank and the time with other shares."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch._bounds import SHORTEST, Bytes, Count, Samples, Seconds, Steps, Text
from autobatch.planning.shares import share_target
from autobatch.records import Record


class RankPlan(Record):
    """One rank's part of a plan.

    Attributes:
        rank: Number of the rank, from 0.
        plan_id: Id of this rank's own plan, which has its trials and its curve.
        host: Name of the computer.
        device: Name of the device: ``"NVIDIA L4"``.
        share: Samples of an optimizer step on this rank.
        micro_batch_size: Most samples in one forward and backward there.
        accumulation_steps: Number of micro-batches.
        peak_bytes: Peak at that size, to compare with the limit; 0 if the device cannot measure.
        budget_bytes: Bytes that the process may hold; 0 if unknown.
        seconds: Time of a step of this rank alone, from its trials, whose optimizer steps after every second
            micro-batch. 0 if no trial was timed.
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
    """Return the rank that takes longest; ``None`` if some were not timed or all take the same."""
    if not seconds or min(seconds) <= SHORTEST or max(seconds) == min(seconds):
        return None
    return max(range(len(seconds)), key=seconds.__getitem__)


def seconds_by_speed(samples: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of the slowest rank if samples were divided by speed; 0 if a speed is unknown.

    Args:
        samples: Samples of each rank in a step.
        seconds: Time of each rank for them.
    """
    if not samples or min(samples) < 1 or min(seconds) <= SHORTEST:
        return 0.0
    rates = [count / taken for count, taken in zip(samples, seconds, strict=True)]
    shares = share_target(sum(samples), "speed", rates)
    return max(share / rate for share, rate in zip(shares, rates, strict=True))
