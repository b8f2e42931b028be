"""Defines a plan as plain data: what was decided, from which measurements, under which budget."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import FailFast, Field, model_validator

from autobatch._bounds import (
    LISTED,
    MOST_MICRO_BATCHES,
    Bytes,
    Count,
    Flag,
    Moment,
    Samples,
    Seconds,
    Steps,
    Target,
    Text,
)
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.rank_plan import RankPlan
from autobatch.records import DeviceInfo, ModelIdentity, Padding, Record, Saving, SizeAtLength, Trial, Verdict

__all__ = ["PlanRecord"]


class PlanRecord(Record):
    """How one optimizer step's samples are divided on one rank, and the measurements behind that.

    Counts that cannot be, and fields that contradict each other, are refused when it is made or read.

    Attributes:
        target_batch: Samples an optimizer step sees over all ranks.
        world_size: Ranks that share it.
        rank: Which of them this plan is for, counted from 0.
        shares: Samples of an optimizer step on each rank; empty where one rank has all, or where a plan for several
            does not say.
        ranks: What each rank runs, by rank, the same in the plans of all; empty where one rank has all, or where a plan
            for several does not say.
        micro_batch_size: The most samples in one forward and backward.
        micro_batch_sizes: What this rank runs, in order; sums to its share of the target.
        smallest_micro_batch: The fewest samples that the model can run: 2 where one alone raises an error (BatchNorm).
        accumulation_steps: How many micro-batches that is.
        budget_bytes: What the process may hold on the device; 0 where that is not known.
        budget_passed: Whether the user passed that budget; a CPU's is then enforced in every step.
        headroom_bytes: The part of the budget that is left free on purpose.
        peak_bytes: What meets the limit at ``micro_batch_size``: measured, or by the curve if ``predicted``.
        curve: Memory against micro-batch size; ``None`` where the device cannot measure.
        trials: Every attempt, in order.
        device: What it was measured on.
        warnings: What the user should know before trusting the split, a sentence each.
        predicted: Whether the size was never run.
        state_bytes: What the optimizer's state took in the trials.
        trained: Numbers in the parameters that the optimizer moved in the trials; 0 where that is not known.
        weighed: Whether ``fit`` was given ``weigh``; a runner then needs it too.
        accumulate_in_float32: Whether gradients in bfloat16 and float16 are added up in float32, in the trials too.
        verdict: Whether splitting was found to be exact, and the seconds that took; ``None`` where nothing is split, or
            ``check=None``.
        batch_lists: How the lists of the example batch were read, by path: one entry a sample, or fields.
        batch_dims: Number of dimensions of each tensor of the example batch, by path.
        fingerprint: Identifies what was measured: model, step, batch, optimizer, software, device.
        seconds: How long ``fit`` took.
        version: The autobatch that made it.
        id: Names this plan among all that were made; empty where it was given none.
        made_at: Seconds since 1970, UTC; 0 where it was not noted.
        model: The class of the model.
        objective: What ``fit`` was asked for: the fewest steps, or the least memory.
        max_micro_batch: The most samples that a micro-batch may ever have: the user's own bound, or the target;
            ``None`` where that is not known.
        failing_size: The smallest size that did not fit when sizes were searched for; 0 where each one tried did.
        searched_bytes: The limit within which they were searched for; of a confirmed plan that of its own search.
        confirms: The id of the remembered plan that one trial has confirmed; empty where sizes were searched for.
        lengths: Where ``fit`` was given ``lengths``, how many samples of up to each of a few lengths run together, the
            shortest first; then sizes elsewhere (``micro_batch_size``, ``micro_batch_sizes``...) are those of the worst
            step, in which all samples are as long as the longest that was tried. Empty without.
        padding: Where the padding of batches is, by which they are trimmed.
        dataset_samples: Samples in the dataset that ``fit`` was given, or in its loader's; 0 for a batch or a stream.
        savings: What the step does already to save memory, as far as its first run showed.
        identity: What the model and the optimizer are recognised by, so that a runner can warn of others; ``None`` in a
            plan that was written by hand without it.
    """

    target_batch: Target
    world_size: Target
    micro_batch_size: Samples
    micro_batch_sizes: Annotated[tuple[Samples, ...], Field(max_length=MOST_MICRO_BATCHES), FailFast()]
    accumulation_steps: Steps
    budget_bytes: Bytes
    headroom_bytes: Bytes
    peak_bytes: Bytes
    curve: MemoryCurve | None
    trials: Annotated[tuple[Trial, ...], LISTED]
    device: DeviceInfo
    warnings: Annotated[tuple[Text, ...], LISTED] = ()
    predicted: Flag = False
    state_bytes: Bytes = 0
    trained: Count = 0
    budget_passed: Flag = False
    weighed: Flag = False
    accumulate_in_float32: Flag = True
    verdict: Verdict | None = None
    batch_lists: Annotated[dict[Text, Literal["samples", "fields", "unclear"]], Field(max_length=100_000)] = Field(
        default_factory=dict
    )
    batch_dims: Annotated[dict[Text, Count], Field(max_length=100_000)] = Field(default_factory=dict)
    fingerprint: Text = ""
    seconds: Seconds = 0.0
    version: Text
    id: Text = ""
    made_at: Moment = 0.0
    model: Text = ""
    objective: Literal["throughput", "memory"] = "throughput"
    max_micro_batch: Samples | None = None
    failing_size: Count = 0
    searched_bytes: Bytes = 0
    confirms: Text = ""
    smallest_micro_batch: Samples = 1
    identity: ModelIdentity | None = None
    rank: Count = 0
    shares: Annotated[tuple[Samples, ...], LISTED] = ()
    ranks: Annotated[tuple[RankPlan, ...], LISTED] = ()
    lengths: Annotated[tuple[SizeAtLength, ...], LISTED] = ()
    padding: Padding = Field(default_factory=Padding)
    dataset_samples: Count = 0
    savings: Annotated[tuple[Saving, ...], LISTED] = ()

    def __hash__(self) -> int:
        """Of a few fields; ``batch_lists`` is a dict, which has none."""
        return hash((self.id, self.made_at, self.target_batch, self.micro_batch_sizes, self.budget_bytes))

    @property
    def limit_bytes(self) -> int:
        """The budget less the headroom: what a trial had to stay within."""
        return self.budget_bytes - self.headroom_bytes

    @property
    def whole_id(self) -> str:
        """The id of the first rank's plan, under which the runs of all ranks are stored; of one rank its own."""
        return self.ranks[0].plan_id if self.ranks else self.id

    @property
    def longest_trials(self) -> tuple[Trial, ...]:
        """The attempts at ``micro_batch_size`` and its neighbours: where samples have lengths, those of the longest."""
        longest = self.lengths[-1].length if self.lengths else None
        return tuple(trial for trial in self.trials if trial.length in (None, longest))

    @property
    def out_of_memory_trials(self) -> int:
        """How many attempts ended out of memory."""
        return sum(trial.outcome == "oom" for trial in self.trials)

    @model_validator(mode="after")
    def _refuse_wrong_shares(self) -> PlanRecord:
        if self.rank >= self.world_size:
            raise ValueError(f"rank={self.rank}, but world_size={self.world_size}, and ranks are counted from 0")
        if self.shares and len(self.shares) != self.world_size:
            raise ValueError(f"shares are of {len(self.shares)} ranks, but world_size={self.world_size}")
        if self.shares and sum(self.shares) != self.target_batch:
            raise ValueError(f"shares sum to {sum(self.shares)}, but target_batch={self.target_batch}")
        possible = self._possible_shares()
        if sum(self.micro_batch_sizes) not in possible:
            expected, total = " or ".join(map(str, sorted(possible))), sum(self.micro_batch_sizes)
            raise ValueError(f"micro_batch_sizes sum to {total}, but a rank's share of the target is {expected}")
        return self

    def _possible_shares(self) -> set[int]:
        """What this rank's samples may be; where shares are not listed, those of any rank of an even division."""
        if self.shares:
            return {self.shares[self.rank]}
        share = self.target_batch // self.world_size
        return {share, share + (self.target_batch % self.world_size > 0)}  # the first ranks have one more

    @model_validator(mode="after")
    def _refuse_wrong_ranks(self) -> PlanRecord:
        if not self.ranks:
            return self
        if [one.rank for one in self.ranks] != list(range(self.world_size)):
            raise ValueError(f"ranks must be one entry for each of world_size={self.world_size} ranks, from 0 on")
        if tuple(one.share for one in self.ranks) != self.shares:
            raise ValueError("ranks have other shares than shares")
        own = self.ranks[self.rank]
        for name in ("micro_batch_size", "accumulation_steps", "peak_bytes", "budget_bytes"):
            if getattr(own, name) != getattr(self, name):
                raise ValueError(f"ranks has {name}={getattr(own, name)} for rank {self.rank}, not the plan's own")
        return self

    @model_validator(mode="after")
    def _refuse_wrong_lengths(self) -> PlanRecord:
        for shorter, longer in pairwise(self.lengths):
            if shorter.length >= longer.length or shorter.micro_batch_size <= longer.micro_batch_size:
                raise ValueError("lengths must go up, and the samples that run together at each of them down")
        if self.lengths and self.micro_batch_size > self.lengths[-1].micro_batch_size:
            most = self.lengths[-1].micro_batch_size
            raise ValueError(f"micro_batch_size={self.micro_batch_size} is more than the {most} of the longest lengths")
        return self

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> PlanRecord:
        sizes = self.micro_batch_sizes
        if self.micro_batch_size != max(sizes, default=0):
            raise ValueError(f"micro_batch_size={self.micro_batch_size} is not the largest of micro_batch_sizes")
        if self.max_micro_batch is not None and self.max_micro_batch < self.micro_batch_size:
            limit = f"max_micro_batch={self.max_micro_batch}"
            raise ValueError(f"micro_batch_size={self.micro_batch_size} is more than {limit}")
        if len(sizes) > 1 and min(sizes) < self.smallest_micro_batch:
            smallest = self.smallest_micro_batch
            raise ValueError(f"micro_batch_sizes has a {min(sizes)}, less than smallest_micro_batch={smallest}")
        if self.accumulation_steps != len(sizes):
            raise ValueError(f"accumulation_steps={self.accumulation_steps}, but micro_batch_sizes has {len(sizes)}")
        if not self.device.total_bytes and (self.peak_bytes or self.curve):
            raise ValueError("device.total_bytes=0, but memory was measured on it: peak_bytes or curve")
        if self.headroom_bytes > self.budget_bytes:
            raise ValueError(f"headroom_bytes={self.headroom_bytes} is more than budget_bytes={self.budget_bytes}")
        return self
