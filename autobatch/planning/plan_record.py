"""A plan as plain data.

Covers what was decided, from which measurements, under which budget. Does not cover what a user does with it (``plan``)
nor how it is shown (``report``).
"""

from __future__ import annotations

from autobatch.planning.curve import MemoryCurve
from autobatch.records import DeviceInfo, Record, Trial

__all__ = ["PlanRecord"]


class PlanRecord(Record):
    """How one optimizer step's samples are divided on one rank, and the measurements behind that.

    Attributes:
        target_batch: Samples an optimizer step sees over all ranks.
        world_size: Ranks that share it.
        micro_batch_size: The most samples in one forward and backward.
        micro_batch_sizes: What this rank runs, in order; sums to its share of the target.
        accumulation_steps: How many micro-batches that is.
        budget_bytes: What the process may hold on the device; 0 where the device cannot tell.
        headroom_bytes: The part of the budget that is left free on purpose.
        peak_bytes: What meets the limit at ``micro_batch_size``: measured, or the curve's word if ``predicted``.
        curve: Memory against micro-batch size; ``None`` where the device cannot measure.
        trials: Every attempt, in order.
        device: What it was measured on.
        warnings: What the user should know before trusting the split, a sentence each.
        predicted: Whether the size was never run.
        fingerprint: Identifies what was measured: model, step, batch, optimizer, software, device.
        seconds: How long ``fit`` took.
        version: The autobatch that made it.
    """

    target_batch: int
    world_size: int
    micro_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    accumulation_steps: int
    budget_bytes: int
    headroom_bytes: int
    peak_bytes: int
    curve: MemoryCurve | None
    trials: tuple[Trial, ...]
    device: DeviceInfo
    warnings: tuple[str, ...] = ()
    predicted: bool = False
    fingerprint: str = ""
    seconds: float = 0.0
    version: str

    @property
    def limit_bytes(self) -> int:
        """The budget less the headroom: what a trial had to stay within."""
        return self.budget_bytes - self.headroom_bytes

    @property
    def out_of_memory_trials(self) -> int:
        """How many attempts ended out of memory."""
        return sum(trial.outcome == "oom" for trial in self.trials)
