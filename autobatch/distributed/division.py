"""Divides the target batch and shared memory among the ranks that call ``fit`` together, and shares their trials."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autobatch.distributed.data_parallel import refuse_sharded_optimizer
from autobatch.distributed.ranks import Ranks, all_or_none, describe_parameters, refuse_differences
from autobatch.distributed.reduction import make_loss
from autobatch.distributed.sharded import ShardedRanks
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.planning.division import Share, share_target
from autobatch.planning.plan_record import RankPlan
from autobatch.records import IN_EACH, SUMMINGS, Summing, Trial
from autobatch.step.model_info import name_optimizer
from autobatch.step.whole_batch import refuse_sharded
from autobatch.step.workload import Workload

_LARGEST = (
    *("peak_allocated", "peak_reserved", "optimizer_peak", "alloc_retries", "seconds", "backward_allocated"),
    *("backward_reserved", "resident_bytes", "held_bytes"),
)
_OUTCOMES = ("fits", "thrash", "oom")  # from the best to the worst


class SharedTrials:
    """Trials that all ranks run together, with one outcome, if parameters are sharded; else each rank runs its own."""

    def __init__(self, ranks: Ranks | None) -> None:
        """``None``: this process trains alone."""
        self._ranks, self.are_shared = ranks, isinstance(ranks, ShardedRanks)

    def block(self) -> AbstractContextManager[None]:
        """Block of a trial with passes; it raises DoesNotFit if another rank runs out of memory."""
        return self._ranks.passes.block("trial") if isinstance(self._ranks, ShardedRanks) else nullcontext()

    def summings(self) -> Sequence[Summing]:
        """Return how rarely gradients may be summed, and less; nothing to choose unless parameters are sharded."""
        most = self._ranks.passes.most if isinstance(self._ranks, ShardedRanks) else IN_EACH
        return SUMMINGS[: SUMMINGS.index(most) + 1]

    def expect(self, micro_batches: int, summing: Summing) -> None:
        """Expect so many micro-batches in the block, in which gradients are summed so often."""
        if isinstance(self._ranks, ShardedRanks):
            self._ranks.passes.expect(micro_batches, summing)

    def begin_micro_batch(self) -> None:
        """Begin one of them."""
        if isinstance(self._ranks, ShardedRanks):
            self._ranks.passes.begin_micro_batch()

    def exchange(self, point: str, value: Any) -> list[Any]:
        """Return what each rank gives at a point in the block: a value that JSON can hold."""
        return self._ranks.passes.exchange(point, value) if isinstance(self._ranks, ShardedRanks) else [value]

    def together(self) -> AbstractContextManager[object]:
        """Block of several trials, which raises an error on every rank if one raises one outside the trials."""
        return all_or_none(self._ranks if self.are_shared else None, "fit(), trials")

    def agree(self, trial: Trial) -> Trial:
        """Return the trial as the worst rank has measured it."""
        trials = [Trial.model_validate(fields) for fields in self._gather(trial.model_dump())]
        worst = max(trials, key=lambda trial: _OUTCOMES.index(trial.outcome))
        return worst.model_copy(update={name: max(getattr(trial, name) or 0 for trial in trials) for name in _LARGEST})

    def smallest(self, limit_bytes: int) -> int:
        """Return the smallest limit of all ranks; 0 means no limit."""
        return min((limit for limit in self._gather(limit_bytes) if limit), default=0)

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - as the builtin
        """Return whether the flag is true on any rank."""
        return any(self._gather(flag))

    def _gather(self, value: Any) -> list[Any]:
        with all_or_none(self._ranks if self.are_shared else None, "fit(), a trial") as gathered:
            gathered.append(value)
        return gathered


class Division:
    """Division of a target batch among the ranks; one rank has all of it.

    Attributes:
        is_known: Whether the shares are known before the search; ``share="speed"`` needs its rates.
        samples: Samples for which this rank searches a size; from ``divide`` on, its share. With sharded parameters
            all ranks search for the largest share.
        shares: Samples of each rank, once they are known; empty for one rank.
    """

    def __init__(self, ranks: Ranks | None, target: int, share: Share) -> None:
        """Find this rank's share; with ``share="speed"``, the most that it could be."""
        self.trials = SharedTrials(ranks)
        if self.trials.are_shared and isinstance(share, str) and share == "speed":
            raise InvalidArgument(
                "share='speed' needs DistributedDataParallel: with sharded parameters ranks wait for each other in "
                "each micro-batch; pass share='equal', or a number of samples for each rank"
            )
        self._ranks, self._share, self.target = ranks, share, target
        self.rank, self.size = (ranks.rank, ranks.size) if ranks else (0, 1)
        self._tenants = 1
        even = share_target(target, share, [1.0] * self.size)
        self.is_known = not ranks or not isinstance(share, str) or share == "equal"
        self.samples = even[self.rank] if self.is_known else target - self.size + 1
        if self.trials.are_shared:
            self.samples = max(even)
        self.shares = even if self.is_known and ranks else ()

    def describe(self, workload: Workload, device: Any, **arguments: Any) -> list[dict[str, Any]]:
        """Return what this rank sends to the others before the search, arguments of ``fit`` too; nothing for one."""
        if self._ranks is None:
            return []
        refuse_sharded_optimizer(workload.optimizer)
        if self.trials.are_shared:
            refuse_sharded(workload.step)
        same = {
            "target_batch=": self.target,
            "share=": self._share if isinstance(self._share, str) else [*map(int, self._share)],
            **{f"{name}=": value for name, value in arguments.items()},
            "weigh=": "None" if workload.weigh is None else "given",
            "optimizer=": name_optimizer(workload.optimizer) or "None",
            "the model": describe_parameters(workload.model, workload.parameters()),
        }
        return [{"same": same, "memory": _name_memory(workload, device)}]

    def compare(self, gathered: Sequence[Mapping[str, Any]]) -> None:
        """Compare the arguments of all ranks, and count those that share this rank's memory."""
        if self._ranks is not None:
            refuse_differences([sent["same"] for sent in gathered], self._ranks)
            self._tenants = sum(sent["memory"] == gathered[self.rank]["memory"] for sent in gathered)

    def reserve(self, workload: Workload) -> list[torch.Tensor]:
        """Allocate the buckets in which gradients are summed, so that trials run beside them as training does."""
        if self._ranks is None or self.trials.are_shared:
            return []
        parameters = workload.parameters()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return self._ranks.reduction.reserve([*trained, make_loss(parameters)])

    def budget(self, memory: Device, budget: Any | None) -> Any | None:
        """Return the user's budget, or this rank's part of a memory that several ranks share."""
        if budget is not None or self._tenants == 1:
            return budget
        used = memory.usage().allocated
        free = max(0, memory.available_bytes() - used)
        return used + free // self._tenants or None

    def divide(self, gathered: Sequence[Mapping[str, Any]]) -> int:
        """Divide the target by the rates of all ranks; return this rank's samples."""
        if self._ranks is not None:
            self.shares = share_target(self.target, self._share, [sent["rate"] for sent in gathered])
            self.samples = self.shares[self.rank]
        return self.samples

    def describe_plan(self, plan_id: str, device: str, sizes: Sequence[int], rate: float, **found: int) -> RankPlan:
        """Return what this rank sends to the others about its plan.

        ``rate`` is 0 if no trial was timed; ``found`` has ``peak_bytes`` and ``budget_bytes``.
        """
        return RankPlan(
            rank=self.rank,
            plan_id=plan_id,
            host=socket.gethostname(),
            device=device,
            share=self.samples,
            micro_batch_size=max(sizes),
            accumulation_steps=len(sizes),
            seconds=self.samples / rate if rate else 0.0,
            **found,
        )


def _name_memory(workload: Workload, device: Any) -> str:
    """Name the memory of this rank; ranks with the same name share it."""
    if isinstance(device, Device):
        return f"substitute of process {os.getpid()}"
    home = next((parameter.device for parameter in workload.parameters()), torch.device("cpu"))
    if home.type != "cuda":
        return f"{socket.gethostname()} {home.type}"
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(home).uuid}"
