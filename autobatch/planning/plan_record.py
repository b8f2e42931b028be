"""Defines a plan as plain data: the decision, its measurements, its budget, and the part of each rank."""

from __future__ import annotations

from collections.abc import Iterator
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
from autobatch.records import (
    IN_EACH,
    Checkpointing,
    ChunkedLoss,
    DeviceInfo,
    ModelIdentity,
    Padding,
    Record,
    Saving,
    SizeAtLength,
    Summing,
    Trial,
    Verdict,
    refuse_nested,
)


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


class PlanRecord(Record):
    """How one optimizer step's samples are divided on one rank, and the measurements behind that.

    Contradictory fields raise an error when a plan is made or read.

    Attributes:
        target_batch: Samples of an optimizer step over all ranks.
        world_size: Number of ranks.
        rank: Rank of this plan, from 0.
        shares: Samples of an optimizer step on each rank; empty with one rank, or if unknown.
        ranks: Records of all ranks, the same in the plan of each; empty with one rank, or if unknown.
        micro_batch_size: Most samples in one forward and backward.
        micro_batch_sizes: Micro-batches of this rank, in order; they sum to its share of the target.
        smallest_micro_batch: Fewest samples that the model can run: 2 if one alone raises an error (BatchNorm).
        accumulation_steps: Number of micro-batches.
        budget_bytes: Bytes that the process may hold on the device; 0 if unknown.
        budget_passed: Whether the user passed that budget. A CPU's is then enforced in every step.
        headroom_bytes: Part of the budget that is left free on purpose.
        peak_bytes: Peak at ``micro_batch_size``, to compare with the limit: measured, or by the curve if ``predicted``.
        curve: Memory against micro-batch size; ``None`` if the device cannot measure.
        trials: Every attempt, in order.
        device: Device of the trials.
        warnings: Warnings about the split, a sentence each.
        predicted: Whether the size was never run.
        state_bytes: Bytes of the optimizer's state in the trials.
        trained: Numbers in the parameters that the optimizer moved in the trials; 0 if unknown.
        weighed: Whether ``fit`` had ``weigh``. A runner then needs it too.
        accumulate_in_float32: Whether gradients in bfloat16 and float16 are added up in float32, in the trials too.
        verdict: Whether splitting is exact; ``None`` if nothing is split, or ``check=None``.
        batch_lists: How the lists of the example batch were read, by path: one entry a sample, or fields.
        batch_dims: Number of dimensions of each tensor of the example batch, by path.
        fingerprint: Identity of the measurements: model, step, batch, optimizer, software, device.
        seconds: Duration of ``fit``.
        version: Version of autobatch that made it.
        id: Name of this plan, or empty.
        made_at: Seconds since 1970, UTC; 0 if unknown.
        model: Class of the model.
        objective: Objective of ``fit``: the fewest steps, or the least memory.
        max_micro_batch: Most samples that a micro-batch may ever have; ``None`` if unknown.
        failing_size: Smallest size that did not fit in the search; 0 if all tried sizes did.
        searched_bytes: Limit of the search. A confirmed plan keeps the one of its own search.
        confirms: Id of the remembered plan that one trial has confirmed; empty after a search.
        lengths: Numbers of samples that run together up to each of a few lengths, the shortest first, with
            ``by_length``. Sizes elsewhere are then those of the worst step, with the longest samples only.
        padding: Padding of batches, by which they are trimmed.
        dataset_samples: Samples in the dataset of ``fit``, or in its loader's; 0 for a batch or a stream.
        summing: How often gradients of sharded parameters are summed over the ranks.
        summing_trials: Trials at ``micro_batch_size`` that this was chosen by.
        savings: Ways in which the step saves memory already, as far as its first run showed.
        checkpointing: Blocks that are recomputed in the backward pass, so that a micro-batch fits or a step is faster;
            ``None`` without.
        recomputable: Blocks that a Runner may recompute whole where one sample does not fit any more, with the same
            gradient; empty without ``"checkpoint"`` in ``strategies=``.
        chunked_loss: Loss that is computed in chunks of its classes, so that a micro-batch fits; ``None`` without.
        identity: Traits of the model and the optimizer, so that a runner can warn of others; ``None`` if unknown.
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
    summing: Summing = IN_EACH
    summing_trials: dict[Summing, Trial] = Field(default_factory=dict)
    checkpointing: Checkpointing | None = None
    recomputable: Annotated[tuple[Text, ...], LISTED] = ()
    chunked_loss: ChunkedLoss | None = None

    def __hash__(self) -> int:
        """Hash a few fields; ``batch_lists`` is a dict, which has no hash."""
        return hash((self.id, self.made_at, self.target_batch, self.micro_batch_sizes, self.budget_bytes))

    @property
    def limit_bytes(self) -> int:
        """The budget less the headroom: the limit of a trial."""
        return self.budget_bytes - self.headroom_bytes

    def extra_bytes(self, summing: Summing) -> int:
        """Return the bytes that a step takes beside what it takes if gradients are summed in each micro-batch."""
        trials = self.summing_trials
        if summing not in trials or IN_EACH not in trials:
            return 0
        return max(trials[summing].peak_reserved - trials[IN_EACH].peak_reserved, 0)

    @property
    def whole_id(self) -> str:
        """Id of the first rank's plan, under which the runs of all ranks are stored."""
        return self.ranks[0].plan_id if self.ranks else self.id

    @property
    def longest_trials(self) -> tuple[Trial, ...]:
        """The attempts at ``micro_batch_size`` and its neighbours; with lengths, those of the longest samples.

        Attempts in which other blocks ran in other ways, or with another loss, are left out.
        """
        longest = self.lengths[-1].length if self.lengths else None
        found, is_chunked = self.checkpointing, self.chunked_loss is not None
        counts = (len(found.blocks), len(found.selective), len(found.offloaded)) if found else (0, 0, 0)
        return tuple(
            trial
            for trial in self.trials
            if trial.length in (None, longest)
            and (trial.checkpointed, trial.selective, trial.offloaded) == counts
            and trial.chunked == is_chunked
        )

    @property
    def out_of_memory_trials(self) -> int:
        """Number of attempts that ran out of memory."""
        return sum(trial.outcome == "oom" for trial in self.trials)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> PlanRecord:
        chosen = () if self.checkpointing is None else self.checkpointing.blocks
        refuse_nested([*self.recomputable, *(block for block in chosen if block not in self.recomputable)])
        for message in (*self._check_shares(), *self._check_ranks(), *self._check_sizes()):
            raise ValueError(message)
        return self

    def _check_sizes(self) -> Iterator[str]:
        sizes, size, smallest = self.micro_batch_sizes, self.micro_batch_size, self.smallest_micro_batch
        if size != max(sizes, default=0):
            yield f"micro_batch_size={size} is not the largest of micro_batch_sizes"
        if self.max_micro_batch is not None and self.max_micro_batch < size:
            yield f"micro_batch_size={size} is more than max_micro_batch={self.max_micro_batch}"
        if len(sizes) > 1 and min(sizes) < smallest:
            yield f"micro_batch_sizes has a {min(sizes)}, less than smallest_micro_batch={smallest}"
        if self.accumulation_steps != len(sizes):
            yield f"accumulation_steps={self.accumulation_steps}, but micro_batch_sizes has {len(sizes)}"
        if not self.device.total_bytes and (self.peak_bytes or self.curve):
            yield "device.total_bytes=0, but memory was measured on it: peak_bytes or curve"
        if self.headroom_bytes > self.budget_bytes:
            yield f"headroom_bytes={self.headroom_bytes} is more than budget_bytes={self.budget_bytes}"
        for shorter, longer in pairwise(self.lengths):
            if shorter.length >= longer.length or shorter.micro_batch_size <= longer.micro_batch_size:
                yield "lengths must go up, and the samples that run together at each of them down"
        if self.lengths and size > (most := self.lengths[-1].micro_batch_size):
            yield f"micro_batch_size={size} is more than the {most} of the longest lengths"

    def _check_shares(self) -> Iterator[str]:
        target, ranks, shares = self.target_batch, self.world_size, self.shares
        if self.rank >= ranks:
            yield f"rank={self.rank}, but world_size={ranks}, and ranks are counted from 0"
        if shares and len(shares) != ranks:
            yield f"shares are of {len(shares)} ranks, but world_size={ranks}"
        if shares and sum(shares) != target:
            yield f"shares sum to {sum(shares)}, but target_batch={target}"
        # Without shares, those of any rank of an even division: the first ranks have one more.
        possible = {*shares[self.rank : self.rank + 1]} or {target // ranks, -(-target // ranks)}
        if sum(self.micro_batch_sizes) not in possible:
            expected, total = " or ".join(map(str, sorted(possible))), sum(self.micro_batch_sizes)
            yield f"micro_batch_sizes sum to {total}, but a rank's share of the target is {expected}"

    def _check_ranks(self) -> Iterator[str]:
        if self.ranks and [one.rank for one in self.ranks] != list(range(self.world_size)):
            yield f"ranks must be one entry for each of world_size={self.world_size} ranks, from 0 on"
        elif self.ranks and tuple(one.share for one in self.ranks) != self.shares:
            yield "ranks have other shares than shares"
        for own in self.ranks[self.rank : self.rank + 1]:
            for name in ("micro_batch_size", "accumulation_steps", "peak_bytes", "budget_bytes"):
                if getattr(own, name) != getattr(self, name):
                    yield f"ranks has {name}={getattr(own, name)} for rank {self.rank}, not the plan's own"
