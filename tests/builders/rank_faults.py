"""Memory that ends at every operation of a step on each of several ranks, and what must then be true on all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from faults import (
    CASES,
    CHECKPOINTED_CASES,
    OUTCOMES,
    PLACES,
    Case,
    Judge,
    Training,
    _comparable,
    _seed,
    cut_into,
    places_of,
    recompute_blocks,
)
from plans import SMALL, make_rank_plans
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from workloads import make_batch

import autobatch
from autobatch.distributed import shared_step
from autobatch.errors import RankLost
from autobatch.records import IN_EACH, SUMMINGS, Summing
from autobatch.testing import oom_at

needs_sharding = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot clear a pass of fully_shard that broke off"
)

_SHARES, _LARGEST = (8, 5, 7, 6), (4, 3, 4, 2)

RANK_CASES = [case for case in CASES if "sparse" not in case.name and "lazy" not in case.name]

# Scalers are refused; fully_shard takes no module that forward replaces, no reentrant checkpoint, and no regulariser of
# sharded weights in the step.
_UNSHARDED = ("encoder", "teacher", "forward", "reentrant", "several")

SHARDED_CASES = [case for case in RANK_CASES if not case.scaled and not any(word in case.name for word in _UNSHARDED)]

RECOMPUTED_CASES = [case for case in CHECKPOINTED_CASES if not (case.scaled or case.offloaded)]


class RankTraining(Training):
    summing: ClassVar[Summing] = IN_EACH

    def _plan(self) -> autobatch.Plan:
        rank, size = dist.get_rank(), dist.get_world_size()
        weighed = self.case.weigh is not None
        plan = make_rank_plans(_SHARES[:size], _LARGEST[rank], weighed=weighed, summing=self.summing, **SMALL)[rank]
        return recompute_blocks(plan, self.case) if self.case.recomputed else plan

    def _make_runner(self) -> autobatch.Runner:
        shared_step._SHORTEST_WAIT = 0.1  # the judge's own collective comes between a failed update and the next call
        inner = self.model
        self.model = self._wrap(inner)
        try:
            return super()._make_runner()
        finally:
            self.model = inner
            rank = dist.get_rank()
            _seed()
            self.batch = make_batch(_SHARES[rank], self.case.dtype, seed=50 + rank)

    def _wrap(self, model: nn.Module) -> nn.Module:
        # torch cannot broadcast a buffer of which several elements are one.
        overlaps = any(0 in buffer.stride() for buffer in model.buffers())
        return DistributedDataParallel(model, broadcast_buffers=not overlaps, init_sync=not overlaps)


class OverlappingTraining(RankTraining):
    """One whose gradients fill several buckets, which are summed in the last backward pass after three steps."""

    def _make_runner(self) -> autobatch.Runner:
        runner = super()._make_runner()
        ranks: Any = runner._ranks
        ranks.reduction._bucket_bytes = 512
        return runner


class RankJudge(Judge):
    """Compares with the run in which each rank had used its committed micro-batches from the start."""

    _planned: tuple[int, ...] = ()
    _summing = IN_EACH

    def plan(self) -> None:
        """Run the undisturbed step, before an error is owed to the next call."""
        training = self.training(self.case, **self.options)
        self._planned = training.runner.step(training.batch).micro_batch_sizes
        self._note_summing(training)
        self._commit(self._planned)

    def _judge(self, training: Training, before: dict[str, Any], ending: str, result: Any) -> str:
        self._note_summing(training)
        endings = {*_gather(ending)}
        if not {"reported"} <= endings <= {"reported", ""}:
            return super()._judge(training, before, ending, result)
        # One rank failed in the update, which the others have made: all are sent that in their next call.
        verdict = "reported"
        if ending:
            self._commit(self._planned)
        else:
            verdict = self._judge_committed(training, result)
        ending, _ = self._attempt(training, nullcontext())
        if verdict not in OUTCOMES:
            return verdict
        return ending or "the next step was made after an update that one rank lacks"

    def _note_summing(self, training: Training) -> None:
        passes = getattr(training.runner._ranks, "passes", None)
        self._summing = IN_EACH if passes is None else passes.summing

    def _commit(self, sizes: tuple[int, ...]) -> tuple[dict[str, Any], torch.Tensor]:
        key = _gather((sizes, self._summing))
        if key not in self._committed:
            training = self.training(self.case, **self.options)
            cut_into(training.runner, sizes)
            if self._summing == IN_EACH:  # as after a shortage
                memory: Any = training.runner._memory
                memory.summing = memory.summing.after_shortage()
            result = training.runner.step(training.batch)
            assert (result.micro_batch_sizes, result.retries) == (sizes, 0)
            self._committed[key] = _comparable(training.state()), result.loss
        return self._committed[key]


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """``fully_shard`` each module that shares its parameters with no other one, and the whole."""
    owners = Counter(id(parameter) for module in model.children() for parameter in module.parameters())
    for module in model.children():
        own = [owners[id(parameter)] for parameter in module.parameters()]
        if own and max(own) == 1:
            fully_shard(module, **options)
    return fully_shard(model, **options)


@cache
def _mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh once in a process: the threads of each one's groups stay until its end."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class ShardedTraining(RankTraining):
    """This rank's part of a case whose parameters are sharded."""

    shape: ClassVar[tuple[int, ...]] = ()  # of the mesh: (replicas, shards)

    def __init__(self, case: Case, **options: Any) -> None:
        mesh = _mesh_of(self.shape) if self.shape else None
        super().__init__(replace(case, make_model=lambda: shard(case.make_model(), mesh=mesh)), **options)

    def state(self) -> dict[str, Any]:
        """Hooks of fully_shard by name: each model has its own."""
        state = super().state()
        names = {key: [hook.__name__ for hooks in state[key] for hook in hooks] for key in state if "hooks" in key}
        return {**state, **names}

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model


class HoldingTraining(ShardedTraining):
    """One whose gradients are summed once a step, and whose parameters stay gathered until then."""

    summing = SUMMINGS[-1]


class HybridTraining(HoldingTraining):
    """One whose shards are replicated, on four ranks."""

    shape = (2, 2)


KINDS = {
    "hybrid, summed once": HybridTraining,
    "whole": RankTraining,
    "summed in the last pass": OverlappingTraining,
    "sharded": ShardedTraining,
    "sharded, summed once": HoldingTraining,
}


def prove_on_ranks(
    name: str, stride: int = 0, *, count: int = 1, every: int = 1, kind: str = "whole", earlier_steps: int = 0
) -> tuple[Counter[str], list[str]]:
    """The outcomes of an error out of memory at operations on each rank, and the wrong ones.

    A position at which a rank did not answer within the group's timeout counts as hung, and is the last of its case.
    """
    cases = (*CASES, *CHECKPOINTED_CASES)
    case = next(case for case in cases if case.name == name)
    training, options = KINDS[kind], {"earlier_steps": earlier_steps}
    judge, tally, wrong = RankJudge(case, training, **options), Counter[str](), list[str]()
    judge.plan()
    for failing, places in enumerate(_gather(places_of(case, training, **options))):
        turn = cases.index(case) + failing + earlier_steps
        chosen = range(1, len(places) + 1, stride) if stride else choose_positions(places, count, every, turn)
        for position in chosen:
            outcome = judge.outcome(oom_at(position) if dist.get_rank() == failing else nullcontext())
            outcomes = _gather(outcome)
            has_hung = any(one.startswith(RankLost.__name__) for one in outcomes)
            tally[outcomes[failing] if _agree(outcomes) else "hung" if has_hung else "wrong"] += 1
            if not _agree(outcomes):
                wrong.append(f"operation {position} of rank {failing}: {outcomes}")
            if has_hung:
                return tally, wrong
    return tally, wrong


def choose_positions(places: Sequence[str], count: int, every: int = 1, turn: int = 0) -> list[int]:
    """Operations, counted from 1, that are spread evenly over each place, or over some of the places by turns."""
    chosen: set[int] = set()
    for index, place in enumerate(name for name in PLACES if name in places):
        found = [position for position, name in enumerate(places, 1) if name == place]
        if (index + turn) % every == 0:
            chosen.update(found[(2 * part + 1) * len(found) // (2 * count)] for part in range(count))
    return sorted(chosen)


def describe(tally: Counter[str]) -> str:
    """One line, in the words of the proof on one process."""
    outcomes = ", ".join(f"{tally[name]} {name}" for name in (*OUTCOMES, "hung", "wrong"))
    return f"{sum(tally.values())} positions -> {outcomes}"


def _agree(outcomes: tuple[str, ...]) -> bool:
    """Whether all ranks committed, or all undid, or all were warned that parameters may differ."""
    if not set(outcomes) <= set(OUTCOMES):
        return False
    kinds = {
        "committed" if one in ("committed", "restarted") else "reported" if one == "reported" else "undone"
        for one in outcomes
    }
    return len(kinds) == 1


def _gather(value: Any) -> tuple[Any, ...]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return tuple(everyone)
