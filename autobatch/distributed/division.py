"""Divides the target batch and shared memory among the ranks that fit a plan together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autobatch.distributed.data_parallel import refuse_sharded_optimizer
from autobatch.distributed.ranks import Ranks, describe_parameters, refuse_differences
from autobatch.distributed.shared_trials import SharedTrials
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.planning.plan_record import RankPlan
from autobatch.planning.shares import Share, share_target
from autobatch.step.model_info import name_optimizer
from autobatch.step.workload import Workload

__all__ = ["Division"]


class Division:
    """How the samples of a target batch are divided; one rank has all.

    Attributes:
        target: Samples of an optimizer step over all ranks.
        rank: This one.
        size: How many there are.
        is_known: Whether the shares are known before the search; with ``share="speed"`` they follow from it.
        samples: What this rank searches a size for; from ``divide`` on, its share. Where parameters are sharded, all
            ranks search one for the largest share.
        shares: Each rank's, once they are known; empty for one rank.
        trials: What the ranks share in the search.
    """

    def __init__(self, ranks: Ranks | None, target: int, share: Share) -> None:
        """Find this rank's share, or with ``share="speed"`` the most that it could be.

        Raises:
            InvalidArgument: ``share`` does not divide this target among these ranks.
        """
        is_sharded = SharedTrials(ranks).are_shared
        if is_sharded and isinstance(share, str) and share == "speed":
            raise InvalidArgument(
                "share='speed' is for DistributedDataParallel: with sharded parameters ranks wait for each other in "
                "each micro-batch; pass share='equal', or a number of samples for each rank"
            )
        self._ranks, self._share, self.target = ranks, share, target
        self.trials = SharedTrials(ranks)
        self.rank, self.size = (ranks.rank, ranks.size) if ranks else (0, 1)
        self._tenants = 1
        even = share_target(target, share, [1.0] * self.size)
        self.is_known = not ranks or not isinstance(share, str) or share == "equal"
        self.samples = even[self.rank] if self.is_known else target - self.size + 1
        if is_sharded:
            self.samples = max(even)
        self.shares = even if self.is_known and ranks else ()

    def describe(
        self, workload: Workload, device: Any, *, objective: str, float32: bool, cut: str
    ) -> list[dict[str, Any]]:
        """What this rank sends to the others before the search; nothing where there is one rank."""
        if self._ranks is None:
            return []
        refuse_sharded_optimizer(workload.optimizer)
        same = {
            "target_batch=": self.target,
            "share=": self._share if isinstance(self._share, str) else [*map(int, self._share)],
            "objective=": objective,
            "accumulate_in_float32=": float32,
            "weigh=": "None" if workload.weigh is None else "given",
            "cut=": cut,
            "optimizer=": name_optimizer(workload.optimizer) or "None",
            "the model": describe_parameters(workload.model, workload.parameters()),
        }
        return [{"same": same, "memory": _name_memory(workload, device)}]

    def hear(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Read what each rank has sent, by rank.

        Raises:
            InvalidArgument: They were not called alike.
        """
        if self._ranks is None:
            return
        refuse_differences([one["same"] for one in said], self._ranks)
        self._tenants = sum(one["memory"] == said[self.rank]["memory"] for one in said)

    def reserve(self, workload: Workload) -> list[torch.Tensor]:
        """The buckets in which gradients are summed: they lie beside each step of training, so beside each trial."""
        if self._ranks is None or self.trials.are_shared:
            return []
        return self._ranks.reduction.reserve([p for p in workload.parameters() if p.requires_grad])

    def budget(self, memory: Device, budget: Any | None) -> Any | None:
        """The user's own; else, where ranks share one memory, this rank's part of it."""
        if budget is not None or self._tenants == 1:
            return budget
        own = memory.usage().allocated
        free = max(0, memory.available_bytes() - own)
        return own + free // self._tenants or None

    def divide(self, said: Sequence[Mapping[str, Any]]) -> int:
        """Divide the target by what each rank has found; returns this one's samples.

        Raises:
            InvalidArgument: It cannot be divided by speed, as no trial was timed.
        """
        if self._ranks is not None:
            self.shares = share_target(self.target, self._share, [one["rate"] for one in said])
            self.samples = self.shares[self.rank]
        return self.samples

    def describe_plan(self, plan_id: str, device: str, sizes: Sequence[int], rate: float, **found: int) -> RankPlan:
        """What this rank sends to the others when it knows what it will run.

        Args:
            plan_id: Of this rank's plan.
            device: Its name.
            sizes: Of the micro-batches.
            rate: Samples a second in the trials; 0 where none was timed.
            **found: ``peak_bytes`` and ``budget_bytes``.
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

    def read_plans(self, said: Sequence[Mapping[str, Any]]) -> list[RankPlan]:
        """What each rank has sent, by rank."""
        return [RankPlan(**one) for one in said]


def _name_memory(workload: Workload, device: Any) -> str:
    """Which memory this is: ranks that name the same one share it."""
    if isinstance(device, Device):
        return f"substitute of process {os.getpid()}"
    home = next((parameter.device for parameter in workload.parameters()), torch.device("cpu"))
    if home.type != "cuda":
        return f"{socket.gethostname()} {home.type}"
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(home).uuid}"
