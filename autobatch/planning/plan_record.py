"""A plan as plain data.

Covers what was decided, from which measurements, under which budget. Does not cover what a user does with it (``plan``)
nor how it is shown (``report``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from autobatch.planning.curve import MemoryCurve
from autobatch.records import DeviceInfo, Record, Trial, Verdict

__all__ = ["PlanRecord"]


class PlanRecord(Record):
    """How one optimizer step's samples are divided on one rank, and the measurements behind that.

    Counts that cannot be, and fields that contradict each other, are refused when it is made or read.

    Attributes:
        target_batch: Samples an optimizer step sees over all ranks.
        world_size: Ranks that share it.
        micro_batch_size: The most samples in one forward and backward.
        micro_batch_sizes: What this rank runs, in order; sums to its share of the target.
        smallest_micro_batch: The fewest samples that the model can run: 2 where ``fit`` found that one sample raises an
            error, as BatchNorm does in train mode with one value per channel. A retry has no smaller piece either.
        accumulation_steps: How many micro-batches that is.
        budget_bytes: What the process may hold on the device; 0 where the device cannot tell.
        headroom_bytes: The part of the budget that is left free on purpose.
        peak_bytes: What meets the limit at ``micro_batch_size``: measured, or the curve's word if ``predicted``.
        curve: Memory against micro-batch size; ``None`` where the device cannot measure.
        trials: Every attempt, in order.
        device: What it was measured on.
        warnings: What the user should know before trusting the split, a sentence each.
        predicted: Whether the size was never run.
        state_bytes: What the optimizer's state took in the trials.
        weighed: Whether ``fit`` was given ``weigh``; a runner then needs it too.
        accumulate_in_float32: Whether gradients in bfloat16 and float16 are added up in float32 where there are several
            micro-batches; the trials did so too.
        verdict: Whether splitting was found to be exact, and the seconds that took; ``None`` where nothing is split, or
            ``check=None``.
        batch_lists: How the lists of the example batch were read, by path: one entry a sample, or fields.
        fingerprint: Identifies what was measured: model, step, batch, optimizer, software, device.
        seconds: How long ``fit`` took.
        version: The autobatch that made it.
        id: Names this plan among all that were made; empty where nobody gave it one.
        made_at: Seconds since 1970, UTC; 0 where it was not noted.
        model: The class of the model.
        objective: What ``fit`` was asked for: the fewest steps, or the least memory.
        max_micro_batch: The most samples that a trial might have: the user's own bound, or the target; 0 where that
            is not known.
        failing_size: The smallest size that did not fit when sizes were searched for; 0 where each one tried did.
        searched_bytes: The limit within which they were searched for; that of a remembered plan's search, where one
            trial has confirmed it.
        confirms: The id of the remembered plan that one trial has confirmed; empty where sizes were searched for.
    """

    target_batch: PositiveInt
    world_size: PositiveInt
    micro_batch_size: PositiveInt
    micro_batch_sizes: tuple[PositiveInt, ...]
    accumulation_steps: PositiveInt
    budget_bytes: NonNegativeInt
    headroom_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    curve: MemoryCurve | None
    trials: tuple[Trial, ...]
    device: DeviceInfo
    warnings: tuple[str, ...] = ()
    predicted: bool = False
    state_bytes: int = 0
    weighed: bool = False
    accumulate_in_float32: bool = True
    verdict: Verdict | None = None
    batch_lists: dict[str, Literal["samples", "fields", "unclear"]] = Field(default_factory=dict)
    fingerprint: str = ""
    seconds: float = 0.0
    version: str
    id: str = ""
    made_at: float = 0.0
    model: str = ""
    objective: Literal["throughput", "memory"] = "throughput"
    max_micro_batch: NonNegativeInt = 0
    failing_size: NonNegativeInt = 0
    searched_bytes: NonNegativeInt = 0
    confirms: str = ""
    smallest_micro_batch: PositiveInt = 1

    @property
    def limit_bytes(self) -> int:
        """The budget less the headroom: what a trial had to stay within."""
        return self.budget_bytes - self.headroom_bytes

    @property
    def out_of_memory_trials(self) -> int:
        """How many attempts ended out of memory."""
        return sum(trial.outcome == "oom" for trial in self.trials)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> PlanRecord:
        sizes = self.micro_batch_sizes
        share = self.target_batch // self.world_size
        shares = {share, share + (self.target_batch % self.world_size > 0)}  # any rank's: the first ones have one more
        if sum(sizes) not in shares:
            expected = " or ".join(map(str, sorted(shares)))
            raise ValueError(f"micro_batch_sizes sum to {sum(sizes)}, but a rank's share of the target is {expected}")
        if self.micro_batch_size != max(sizes, default=0):
            raise ValueError(f"micro_batch_size={self.micro_batch_size} is not the largest of micro_batch_sizes")
        if len(sizes) > 1 and min(sizes) < self.smallest_micro_batch:
            smallest = self.smallest_micro_batch
            raise ValueError(f"micro_batch_sizes has a {min(sizes)}, less than smallest_micro_batch={smallest}")
        if self.accumulation_steps != len(sizes):
            raise ValueError(f"accumulation_steps={self.accumulation_steps}, but micro_batch_sizes has {len(sizes)}")
        if self.headroom_bytes > self.budget_bytes:
            raise ValueError(f"headroom_bytes={self.headroom_bytes} is more than budget_bytes={self.budget_bytes}")
        return self
