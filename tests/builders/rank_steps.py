"""Steps of a rank of DDP and of FSDP2 for real, and what is predicted of them: nets, training and peaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from builders.plans import make_rank_plans
from nets import GPT, step, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import distributed as ddp

import autobatch
from autobatch.batch.samples import describe
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.timeline import Timeline, align
from autobatch.prediction.tracing.ranks import Parallelism, find_units
from autobatch.prediction.tracing.trace import Circumstances, trace
from autobatch.records import DeviceInfo
from autobatch.step.workload import Workload
from autobatch.undo.gradients import Float32Sums


class Wide(nn.Module):
    """Two layers beside their input, with numbers of rows that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width + 1), nn.Linear(4 * width + 1, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.second(F.relu(self.first(inputs)))


class Stack(nn.Module):
    def __init__(self, width: int = 130, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(33, width), nn.Linear(width, 7)
        self.body = nn.Sequential(*(Wide(width) for _ in range(depth)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of 7 classes."""
        return self.last(self.body(self.first(inputs)))


def vectors(samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """``(numbers [samples, 33], labels [samples])``."""
    return torch.zeros(samples, 33), torch.zeros(samples, dtype=torch.long)


def step_in_bfloat16(model: nn.Module, batch: Any) -> torch.Tensor:
    """The step under autocast, wherever the model is."""
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        return step(model, batch)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    example: Callable[[int], Any]
    step: Callable[..., Any]
    optimizer: Callable[..., Any]


_ADAM, _SGD = partial(torch.optim.AdamW, foreach=True), partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)
_GPT = partial(GPT, layers=3, dropout=0.0)
CASES = {
    "stack, Adam": Case(Stack, vectors, step, _ADAM),
    "stack, SGD": Case(Stack, vectors, step, _SGD),
    "stack in bfloat16, Adam": Case(lambda: Stack().bfloat16(), lambda n=2: _narrow(vectors(n)), step, _ADAM),
    "stack, autocast, SGD": Case(Stack, vectors, step_in_bfloat16, _SGD),
    "blocks alone, SGD": Case(lambda: nn.Sequential(*map(Wide, [33] * 3)), vectors, step, _SGD),
    "transformer, Adam": Case(_GPT, tokens, step, _ADAM),
    "transformer, checkpoints, SGD": Case(partial(_GPT, checkpointed=False), tokens, step, _SGD),
    "transformer, autocast, Adam": Case(_GPT, tokens, step_in_bfloat16, _ADAM),
}


def _narrow(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].bfloat16(), batch[1]


def predict_timeline(case: Case, strategy: str | None, world_size: int) -> Timeline:
    model = case.make()
    workload = Workload(model, case.step, None, case.optimizer(model.parameters()))
    circumstances = Circumstances(parallelism=Parallelism(strategy, world_size) if strategy else None)
    layout = describe(case.example(2))
    first, second = run_apart(lambda: [trace(workload, layout, samples, circumstances) for samples in (2, 3)])
    timeline = align(first, second)
    assert timeline is not None
    return timeline


def train_replicated(case: Case, samples: int, device: str) -> None:
    """Two steps of the Runner on a DistributedDataParallel."""
    model = replicate(case.make().to(device))
    optimizer, ranks = case.optimizer(model.parameters()), dist.get_world_size()
    fields = {"budget_bytes": 2**36, "headroom_bytes": 0, "peak_bytes": 0, "curve": None, "trials": ()}
    info = DeviceInfo(kind=device, name=device, total_bytes=2**36)
    plans = make_rank_plans((2 * samples,) * ranks, size=samples, device=info, **fields)
    runner = autobatch.Runner(plans[dist.get_rank()], model, step=case.step, optimizer=optimizer)
    for _ in range(2):
        runner.step(case.example(2 * samples))


def replicate(model: nn.Module) -> nn.Module:
    """A DistributedDataParallel that is made when gloo's thread has freed what it sent the weights in.

    Without the wait that is before or after the reducer makes its first bucket, both seen in eight runs, and the
    allocator divides its first segment in one way or the other.
    """
    send = ddp._sync_module_states

    def send_and_wait(*arguments: Any, **options: Any) -> None:
        before, end = torch.cuda.memory_allocated(), time.monotonic() + 10
        send(*arguments, **options)
        while torch.cuda.memory_allocated() > before and time.monotonic() < end:
            time.sleep(0.001)

    if next(model.parameters()).device.type == "cpu":
        return ddp.DistributedDataParallel(model)
    with mock.patch.object(ddp, "_sync_module_states", send_and_wait):
        return ddp.DistributedDataParallel(model)


def train_sharded(case: Case, samples: int, device: str, micro_batches: int = 2) -> None:
    """Two steps on a model that was made without memory and sharded by ``fully_shard``, as its documentation does."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = case.make()
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for unit in find_units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.detach().to_local().zero_()
    optimizer, sums, losses = case.optimizer(model.parameters()), Float32Sums(), []
    for _ in range(2):
        now = []
        sums.begin([*model.parameters()])
        for _ in range(micro_batches):
            samples_here = tuple(tensor.to(device) for tensor in case.example(samples))
            loss = case.step(model, samples_here) / micro_batches
            now.append(loss.detach().float())
            loss.backward()
            del loss, samples_here  # a loop holds its batch while the backward pass runs
        sums.write()
        sums.end()
        optimizer.step()
        optimizer.zero_grad()
        losses[:] = now
