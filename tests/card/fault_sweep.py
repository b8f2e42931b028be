"""Lets memory end at each place of a training step where torch's own allocator, or a launch, can meet the end of it."""

from __future__ import annotations

import dataclasses
import gc
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import faults
import stand_in
import torch
from torch import nn
from torch.nn import functional as F
from workloads import mean_step

from autobatch.memory.cuda import CudaDevice
from autobatch.plan import Plan
from autobatch.records import DeviceInfo

CARD = torch.device("cuda", 0)
MOST_SECONDS = 60
"""For one step; it takes under a second."""


class WideMLP(nn.Module):
    """Tensors of 1 to 13 MiB, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 700), nn.GELU(), nn.Dropout(0.2), nn.Linear(700, 700), nn.GELU())
        self.head = nn.Linear(700, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs.unsqueeze(1).expand(-1, 1200, -1)).mean(1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.second, self.head = nn.Conv2d(24, 24, 3, padding=1), nn.Linear(24, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = inputs.view(-1, 1, 2, 3).repeat(1, 1, 56, 40)
        return self.head(F.relu(self.second(F.relu(self.norm(self.first(images))))).mean((2, 3)))


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 256, 4, 1024, dropout=0.2, batch_first=True)
        self.embed, self.layers, self.head = nn.Linear(6, 256), nn.Sequential(layer(), layer()), nn.Linear(256, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(inputs.unsqueeze(1).repeat(1, 300, 1))).mean(1))


def autocast_step(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return mean_step(model, batch)


SMALL = {
    "batch norm": faults.Case("convolution + BatchNorm, SGD", faults.Convolution, faults.sgd),
    "dropout": faults.Case(
        "transformer + dropout, weighed by tokens, AdamW foreach",
        faults.Transformer,
        faults.adamw_foreach,
        faults.token_step,
        faults.count_tokens,
    ),
    "scaler": faults.Case(
        "mixed precision + GradScaler, SGD", faults.Everything, faults.sgd, autocast_step, scaled=True, scheduled=True
    ),
}
LARGE = {
    "large dropout": faults.Case("wide MLP + dropout, AdamW foreach", WideMLP, faults.adamw_foreach),
    "large batch norm": faults.Case("images + BatchNorm, SGD", Images, faults.sgd),
    "large attention": faults.Case("texts + dropout, AdamW fused", Texts, faults.adamw_fused),
}
"""A step of these takes several segments."""


class OnCard(faults.Training):
    """A training of ``faults``, on the card."""

    def __init__(self, case: faults.Case, **options: Any) -> None:
        make = case.make_model
        super().__init__(dataclasses.replace(case, make_model=lambda: make().to(CARD)), **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "the card's generator": torch.cuda.get_rng_state()}

    def _make_runner(self) -> Any:
        self.device = CudaDevice(CARD)
        if self.scaler is not None:
            self.scaler = faults.Scaler("cuda", init_scale=1024.0, growth_interval=1)
            self.scaler.begin = self._begin_update
        return super()._make_runner()

    def _plan(self) -> Plan:
        total = torch.cuda.get_device_properties(CARD).total_memory
        sizes = (faults.LARGEST,) * (faults.SAMPLES // faults.LARGEST)
        return Plan(
            target_batch=faults.SAMPLES,
            world_size=1,
            micro_batch_size=faults.LARGEST,
            micro_batch_sizes=sizes,
            accumulation_steps=len(sizes),
            budget_bytes=total,
            headroom_bytes=0,
            peak_bytes=0,
            curve=None,
            trials=(),
            device=DeviceInfo(kind="cuda", name="card", total_bytes=total),
            version="0",
            weighed=self.case.weigh is not None,
        )


class Hung(BaseException):
    """A step took too long."""


def hang(*_: Any) -> None:
    raise Hung


FAULTS: dict[str, tuple[Callable[[int], Any], Callable[[], int]]] = {
    "refused once": (stand_in.memory_fails, stand_in.memory_calls),
    "refused": (partial(stand_in.memory_fails, count=3), stand_in.memory_calls),
    "launch": (stand_in.launch_fails, stand_in.launch_calls),
}
"""What fails at the n-th time, and how often there was one. The allocator asks three times before it gives up."""


@contextmanager
def fault(kind: str, position: int) -> Iterator[None]:
    """Fail at this position of a step that begins without cached blocks: it has the most allocations."""
    torch.cuda.empty_cache()
    with FAULTS[kind][0](position):
        yield


def judge_position(judge: faults.Judge, kind: str, position: int) -> str:
    """What came of one fault; "hung" where the step does not end."""
    signal.alarm(MOST_SECONDS)
    try:
        return judge.outcome(fault(kind, position))
    except Hung:
        return "hung"
    finally:
        signal.alarm(0)


def sweep(kind: str, case: faults.Case, earlier_steps: int) -> tuple[Counter[str], list[str]]:
    """Try each position of a step; returns the outcomes, and those that are wrong."""
    judge = faults.Judge(case, OnCard, earlier_steps=earlier_steps)
    undisturbed = OnCard(case, earlier_steps=earlier_steps)
    with fault(kind, 0):
        undisturbed.runner.step(undisturbed.batch)
        positions = FAULTS[kind][1]()
    outcomes, wrong = Counter[str](), []
    for position in range(1, positions + 1):
        outcome = judge_position(judge, kind, position)
        outcomes[outcome] += 1
        if outcome not in faults.OUTCOMES:
            wrong.append(f"{case.name}, step {earlier_steps + 1}, position {position}: {outcome[:300]}")
    return outcomes, wrong


def sweep_case(kind: str, name: str, steps: list[int]) -> dict[str, Any]:
    """Sweep these steps of one case, 0 the first: the outcomes, and what is wrong of the first few."""
    signal.signal(signal.SIGALRM, hang)
    gc.collect()
    gc.freeze()  # each error is followed by a collection
    outcomes, wrong = Counter[str](), []
    for earlier_steps in steps:
        found = sweep(kind, {**SMALL, **LARGE}[name], earlier_steps)
        outcomes += found[0]
        wrong += found[1]
    return {"outcomes": outcomes, "wrong": wrong[:5]}
