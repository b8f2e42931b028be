"""Defines a rank's report at the end of a step, and finds the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch._bounds import Bytes, Count, Seconds
from autobatch.records import Record


class RankStep(Record):
    """One rank's part of a committed step.

    Attributes:
        rank: Number of the rank, from 0.
        samples: Number of samples that it ran; may be 0.
        micro_batch_size: Most samples in a micro-batch.
        retries: Number of times that it ran out of memory.
        peak_bytes: Most bytes in tensors at once, as in ``StepResult``.
        seconds: Time from the common start until its own gradient was ready, without waiting for other ranks. On CUDA
            this is the last step that the device had finished by then; 0 before the first.
    """

    rank: Count
    samples: Count
    micro_batch_size: Count
    retries: Count
    peak_bytes: Bytes
    seconds: Seconds


def find_slowest_step(ranks: Sequence[RankStep]) -> RankStep | None:
    """Return the rank that the others waited for; ``None`` with one rank."""
    return max(ranks, key=lambda one: one.seconds, default=None)
