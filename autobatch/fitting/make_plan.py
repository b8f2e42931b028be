"""Defines the request and the result of a search, and makes the plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autobatch._arguments import check_micro_batches
from autobatch._formatting import format_bytes
from autobatch._version import __version__
from autobatch._wrappers import unwrap_model, warn_of_wrapper
from autobatch.batch.example import count_dataset
from autobatch.batch.lengths import ByLength, SamplesByLength
from autobatch.batch.samples import Layout, dims_of
from autobatch.distributed.division import Division
from autobatch.events import Hook, StageBegan, emit
from autobatch.ledger.ledger import Ledger
from autobatch.memory.device import Device
from autobatch.memory.devices import Allowance
from autobatch.plan import Plan
from autobatch.planning.curve import MemoryCurve, fit_curve
from autobatch.planning.division import balance
from autobatch.planning.plan_record import PlanRecord, RankPlan
from autobatch.planning.reuse import Wanted
from autobatch.planning.summing import choose_summing
from autobatch.records import (
    Checkpointing,
    ChunkedLoss,
    Padding,
    Saving,
    SizeAtLength,
    Strategy,
    Summing,
    Trial,
    Verdict,
    Way,
)
from autobatch.step.model_info import identify_model
from autobatch.step.workload import Workload, warn_of_no_optimizer
from autobatch.undo.training_state import TrainingState

Checked = tuple[Verdict | None, tuple[str, ...]]
"""Verdict on the split, ``None`` if nothing was compared; and warnings."""


@dataclass(frozen=True)
class Request:
    """Request for a search."""

    workload: Workload
    memory: Device  # of the trials
    allowance: Allowance  # budget and headroom there
    state: TrainingState  # before the first trial; each trial returns to it
    division: Division  # of the target among ranks, and their exchange in trials
    wanted: Wanted  # samples of this rank, and the conditions that a remembered plan has to meet
    batch: Any  # argument of the user
    lengths: ByLength | None  # ``None`` if samples do not differ in length
    hooks: tuple[Hook, ...]
    ledger: Ledger  # plans that may be confirmed
    budget_passed: bool
    strategies: tuple[Strategy, ...]  # that may be applied where the smallest micro-batch does not fit

    @property
    def ways(self) -> tuple[Way, ...]:
        """Ways in which blocks may run, among the strategies."""
        return tuple(one for one in self.strategies if one != "chunk_loss")

    @property
    def whose(self) -> dict[str, int]:
        return {"rank": self.division.rank, "world_size": self.division.size}

    def announce(self, stage: str) -> None:
        emit(StageBegan(stage=stage, **self.whose), self.hooks)


@dataclass(frozen=True)
class ExampleBatch:
    """Samples of a search."""

    example: Layout  # as given or found
    compared: Layout  # for the check of exactness: these, and the smallest one of a dataset
    by_length: SamplesByLength | None  # ``None`` if lengths do not differ
    norms: Sequence[str]  # names of BatchNorm layers that the user left in train mode
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """Result of a search. Fields that a plan has too mean the same there."""

    samples: int  # of a step on this rank
    size: int  # most samples in a micro-batch; this size has run
    smallest: int  # fewest samples that the model can run
    sizes: tuple[SizeAtLength, ...]  # with lengths, the number of samples that run together at each length
    trials: tuple[Trial, ...]  # of the longest samples if lengths differ
    shorter_trials: tuple[Trial, ...]
    earlier_trials: tuple[Trial, ...]  # with other blocks recomputed, or another loss
    checkpointing: Checkpointing | None
    recomputable: tuple[str, ...]  # blocks that are known to give the same gradient if they are recomputed
    chunked_loss: ChunkedLoss | None
    confirmed: PlanRecord | None  # earlier plan that one trial has confirmed
    batch: ExampleBatch
    fingerprint: str
    state_bytes: int
    trained: int
    aux_bytes: int  # the most that a step returned beside the loss of a micro-batch
    savings: tuple[Saving, ...]
    summing_trials: dict[Summing, Trial]
    warnings: tuple[str, ...]
    forecast: tuple[tuple[int, int], ...]  # bytes by size that were predicted before the first trial

    @property
    def peak_bytes(self) -> int:
        return max(trial.peak_reserved for trial in self.trials if trial.micro_batch_size == self.size)

    @property
    def rate(self) -> float:
        return max(trial.samples_per_second for trial in self.trials if trial.micro_batch_size == self.size)

    @property
    def curve(self) -> MemoryCurve | None:
        return self.confirmed.curve if self.confirmed else fit_curve(self.trials)

    @property
    def failing_size(self) -> int:
        if self.confirmed:
            return self.confirmed.failing_size
        return min((trial.micro_batch_size for trial in self.trials if trial.outcome != "fits"), default=0)

    def most_at_once(self, limit_bytes: int) -> int:
        """Return the most samples that should fit in one micro-batch by the curve; at least the chosen size."""
        curve = self.curve if limit_bytes else None
        if curve is None:
            return self.size
        failing = self.failing_size or self.samples + 1
        return max(self.size, min(curve.largest(limit_bytes), failing - 1, self.samples))

    def micro_batches(self) -> tuple[int, ...]:
        check_micro_batches(self.samples, self.size)
        if self.sizes:  # of the worst step: only lengths say how many samples run together
            rest = self.samples % self.size
            return (self.size,) * (self.samples // self.size) + ((rest,) if rest else ())
        return balance(self.samples, self.size, min(self.smallest, self.samples))


def make_plan(request: Request, found: Found, checked: Checked, ranks: Sequence[RankPlan], seconds: float) -> Plan:
    workload, wanted, division, sizes = request.workload, request.wanted, request.division, found.micro_batches()
    (verdict, warnings), own = checked, ranks[division.rank]
    return Plan(
        target_batch=division.target,
        world_size=division.size,
        rank=division.rank,
        shares=division.shares,
        ranks=tuple(ranks) if division.size > 1 else (),
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=request.allowance.budget_bytes,
        budget_passed=request.budget_passed,
        headroom_bytes=request.allowance.headroom_bytes,
        peak_bytes=found.peak_bytes,
        curve=found.curve if request.memory.measures else None,
        trials=(*found.earlier_trials, *found.trials, *found.shorter_trials),
        device=request.memory.describe(),
        warnings=(
            *found.warnings,
            *_warn_of_aux(found),
            *warnings,
            *warn_of_no_optimizer(workload),
            *warn_of_wrapper(workload.optimizer),
        ),
        state_bytes=found.state_bytes,
        trained=found.trained,
        weighed=workload.weigh is not None,
        accumulate_in_float32=wanted.accumulate_in_float32,
        verdict=verdict,
        batch_lists=dict(found.batch.example.lists),
        batch_dims=dims_of(found.batch.example),
        fingerprint=found.fingerprint,
        seconds=seconds,
        version=__version__,
        id=own.plan_id,
        made_at=time.time(),
        model=type(unwrap_model(workload.model)).__name__,
        objective=wanted.objective,
        max_micro_batch=wanted.max_micro_batch,
        failing_size=found.failing_size,
        searched_bytes=found.confirmed.searched_bytes if found.confirmed else request.allowance.limit_bytes,
        confirms=found.confirmed.id if found.confirmed else "",
        identity=identify_model(workload.model, workload.optimizer),
        smallest_micro_batch=found.smallest,
        lengths=found.sizes,
        padding=found.batch.by_length.padding if found.batch.by_length else Padding(),
        savings=found.savings,
        checkpointing=found.checkpointing,
        recomputable=found.recomputable,
        chunked_loss=found.chunked_loss,
        summing=choose_summing(found.summing_trials),
        summing_trials=found.summing_trials,
        dataset_samples=count_dataset(request.batch),
    )


def _warn_of_aux(found: Found) -> tuple[str, ...]:
    micro_batches = -(-found.samples // found.size)
    if micro_batches <= 2 or not found.aux_bytes:
        return ()
    held = f"the step returns {format_bytes(found.aux_bytes)} beside each loss, which is held until the step ends"
    return (f"{held}: {micro_batches} x that, of which the trials held two",)
