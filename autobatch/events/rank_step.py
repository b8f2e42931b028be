"""Defines what every rank reports at the end of a step, and names the slowest."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch._bounds import Bytes, Count, Seconds
from autobatch.records import Record

__all__ = ["RankStep", "find_slowest_step"]


class RankStep(Record):
    """One rank's part of a committed step.

    Attributes:
        rank: Counted from 0, as ``plan.rank``.
        samples: That it ran; may be 0.
        micro_batch_size: The most of them in a micro-batch.
        retries: How often memory ended there.
        peak_bytes: Most bytes in tensors at once there, as in ``StepResult``.
        seconds: From where all ranks began together until its own gradient was there: it waits for nobody in it. On
            CUDA, where the host is ahead, of the last step that the device had finished by then; 0 before the first.
    """

    rank: Count
    samples: Count
    micro_batch_size: Count
    retries: Count
    peak_bytes: Bytes
    seconds: Seconds


def find_slowest_step(ranks: Sequence[RankStep]) -> RankStep | None:
    """The rank for which the others waited; ``None`` where there is one rank."""
    return max(ranks, key=lambda one: one.seconds, default=None)
