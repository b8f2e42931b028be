"""What each rank of ``ranks.py`` runs: exchanges, steps beside DistributedDataParallel's own, steps on unlike devices.

    RANK=... WORLD_SIZE=... python benchmarks/rank_process.py exchanges|steps|shares ...

Covers what is timed; a time is that of the slowest rank. Does not cover how the ranks are started (``child``), nor what
is made of the times (``ranks``), which the first rank prints as JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import permutations
from typing import Any

import child
import torch
import torch.distributed as dist
from models import Batch, classify, make_mlp
from quiet import undisturbed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.distributed.channel import open_channel
from autobatch.distributed.reduction import GradientSlot, Reduction
from autobatch.testing import FakeDevice

__all__ = ["MOST", "SAMPLE_SECONDS", "TARGET"]

_WARM = 20
_MESSAGE = {"place": "step 1234 of Runner 1, open", "weights": {"": 64.0}, "samples": 64, "earlier": ""}
"""As long as those of a step."""

_ORDERS = [*permutations(range(3))]
"""Of three ways in one turn: none always follows the same other."""

TARGET = 96
SAMPLE_SECONDS = (0.001, 0.003)
"""What a sample takes on each of two unlike ranks."""
MOST = (64, 16)
"""The samples that fit each."""


def time_exchanges(times: int) -> dict[str, list[float]]:
    """Seconds of an exchange, and of the sum of 16 numbers by the process group's own collective."""
    channel, numbers = open_channel(None), torch.zeros(16)
    ways = {"exchange": lambda: channel.exchange(_MESSAGE), "all_reduce": lambda: dist.all_reduce(numbers)}
    return {name: _slowest([_seconds_of(way) for _ in range(times + _WARM)][_WARM:]) for name, way in ways.items()}


def time_steps(width: int, depth: int, milliseconds: float, micro_batches: int, times: int) -> dict[str, Any]:
    """Seconds of one step in three ways, in turn, and the number of parameters.

    *ddp* is DistributedDataParallel by hand, which sums while its last backward pass runs, *after* the same with
    autobatch's sum after that pass, and *runner* the Runner. Each trains a copy of one model.
    """
    torch.manual_seed(0)
    model = make_mlp(width, depth)
    batch = _make_batch(model, width, milliseconds, micro_batches)
    steps = [make(copy.deepcopy(model), batch, micro_batches) for make in (_write_ddp, _write_sum_after, _write_runner)]
    seconds: list[list[float]] = [[], [], []]
    with undisturbed():
        for turn in range(times + _WARM // 4):
            for which in _ORDERS[turn % len(_ORDERS)]:
                dist.barrier()
                seconds[which].append(_seconds_of(steps[which]))
    ddp, after, runner = (_slowest(one[_WARM // 4 :]) for one in seconds)
    return {"ddp": ddp, "after": after, "runner": runner, "parameters": sum(p.numel() for p in model.parameters())}


def time_shares(share: str, times: int) -> dict[str, Any]:
    """How a target is divided between two unlike ranks, and the seconds of a step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.randn(TARGET, 4), torch.randint(10, (TARGET,))

    def step(module: nn.Module, batch: Batch) -> torch.Tensor:
        time.sleep(len(batch[0]) * SAMPLE_SECONDS[rank])
        return classify(module, batch)

    device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=100 + 10 * MOST[rank])
    options = {"step": step, "optimizer": optimizer, "device": device}
    with undisturbed():
        plan = autobatch.fit(model, TARGET, batch=whole, headroom=0, check=None, share=share, **options)
        runner, start = autobatch.Runner(plan, model, **options), sum(plan.shares[:rank])
        own = tuple(part[start : start + plan.shares[rank]] for part in whole)
        runner.step(own)
        seconds = []
        for _ in range(times):
            dist.barrier()
            seconds.append(_seconds_of(lambda: runner.step(own)))
    return {"shares": plan.shares, "sizes": _gather(plan.micro_batch_sizes), "seconds": _slowest(seconds)}


def _write_ddp(model: nn.Module, batch: Batch, micro_batches: int) -> Callable[[], None]:
    """As its documentation shows it: no_sync() but for the last micro-batch."""
    parallel, parts = DistributedDataParallel(model), _split(batch, micro_batches)
    optimizer = _make_optimizer(model)

    def step() -> None:
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == micro_batches else parallel.no_sync():
                (classify(parallel, part) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _write_sum_after(model: nn.Module, batch: Batch, micro_batches: int) -> Callable[[], None]:
    """The same, but nothing is summed before the last backward pass has ended."""
    parallel, parts = DistributedDataParallel(model), _split(batch, micro_batches)
    parameters, optimizer = [*model.parameters()], _make_optimizer(model)
    reduction = Reduction(None, open_channel(None))
    reduction.reserve(parameters)

    def step() -> None:
        for part in parts:
            with parallel.no_sync():
                (classify(parallel, part) / micro_batches).backward()
        reduction.sum([GradientSlot(parameter, {}) for parameter in parameters], 1 / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _write_runner(model: nn.Module, batch: Batch, micro_batches: int) -> Callable[[], None]:
    """With a plan of so many micro-batches."""
    parallel, optimizer = DistributedDataParallel(model), _make_optimizer(model)
    samples = len(batch[1])
    plan = autobatch.fit(
        parallel,
        samples * dist.get_world_size(),
        batch=batch,
        step=classify,
        optimizer=optimizer,
        max_micro_batch=-(-samples // micro_batches),
        check=None,
        progress=False,
    )
    runner = autobatch.Runner(plan, parallel, step=classify, optimizer=optimizer)

    def step() -> None:
        result = runner.step(batch)
        if result.retries or len(result.micro_batch_sizes) != micro_batches:
            raise RuntimeError(f"the runner did other work than the loop: {result.micro_batch_sizes}")

    return step


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # A rate that leaves the weights be: what is timed must not drift towards tiny numbers, which are slow.
    return torch.optim.AdamW(model.parameters(), lr=1e-7)


def _make_batch(model: nn.Module, width: int, milliseconds: float, micro_batches: int) -> Batch:
    """As many samples as make DistributedDataParallel's step as long as is asked for, the same number on each rank."""
    samples = 16 * micro_batches
    for _ in range(4):
        batch = torch.randn(samples, width), torch.randint(10, (samples,))
        step = _write_ddp(copy.deepcopy(model), batch, micro_batches)
        step()  # in the first step the optimizer makes its state, and after it DDP its buckets
        found = 1000 * min(_slowest([_seconds_of(step) for _ in range(6)]))
        if 1 <= found / milliseconds < 1.3:
            break
        grown = samples * 1.05 * milliseconds / found
        samples = micro_batches * max(1, min(4096, math.ceil(grown / micro_batches)))
    return batch


def _split(batch: Batch, micro_batches: int) -> list[Batch]:
    return [*zip(*(part.chunk(micro_batches) for part in batch), strict=True)]


def _seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Of all ranks, time by time."""
    return [max(together) for together in zip(*_gather([*seconds]), strict=True)]


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main() -> None:
    """Joins the other ranks, measures, and prints what was found on the first."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = arguments.add_subparsers(dest="kind", required=True)
    kinds.add_parser("exchanges").add_argument("times", type=int)
    steps = kinds.add_parser("steps")
    for name, kind in (("width", int), ("depth", int), ("milliseconds", float), ("micro_batches", int), ("times", int)):
        steps.add_argument(name, type=kind)
    shares = kinds.add_parser("shares")
    shares.add_argument("share")
    shares.add_argument("times", type=int)
    asked = vars(arguments.parse_args())
    measure = {"exchanges": time_exchanges, "steps": time_steps, "shares": time_shares}[asked.pop("kind")]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = measure(**asked)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    child.end()


if __name__ == "__main__":
    main()
