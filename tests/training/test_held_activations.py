"""Models that hold activations from one step to the next: the plan's size runs, and nothing lives longer for it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch

pytestmark = pytest.mark.usefixtures("quiet_log")

SAMPLES = 2048
MIB = 2**20


@dataclass
class Output:
    hidden: torch.Tensor


class Cache:
    """An object of the user's own, which is not."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


HOLD = {
    "attribute": lambda hidden: hidden,
    "detached": lambda hidden: hidden.detach(),
    "list": lambda hidden: [hidden],
    "dict of tuples": lambda hidden: {"hidden": (hidden,)},
    "dataclass": Output,
    "own class": Cache,
}
BY_HOLDER = pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)


class Holds(nn.Module):
    """Holds its hidden activations for a loss that reads them, as feature distillation and perceptual losses do."""

    def __init__(self, hold: Any) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 512), nn.Linear(512, 4)
        self.hold, self.held = hold, None
        self.references: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        self.held = self.hold(hidden)
        self.references.append(weakref.ref(hidden.untyped_storage()))
        return self.head(F.relu(hidden))


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_batch(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of 32 numbers, four classes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 32, generator=generator), torch.randint(4, (samples,), generator=generator)


def make_runner(model: nn.Module, budget: int, **options: Any) -> tuple[autobatch.Plan, autobatch.Runner]:
    """A plan within the budget, and what runs it."""
    optimizer = torch.optim.AdamW(model.parameters())
    plan = autobatch.fit(
        model, SAMPLES, batch=make_batch(), step=step, optimizer=optimizer, budget=budget, check=None, **options
    )
    return plan, autobatch.Runner(plan, model, step, optimizer)


@BY_HOLDER
def test_the_plans_size_runs_in_every_step(hold):
    """Trials hold what the second step holds: the activations of the step before."""
    plan, runner = make_runner(Holds(hold), 8 * MIB)
    assert 2 < plan.accumulation_steps < 20
    batch = make_batch()
    results = [runner.step(batch) for _ in range(5)]
    assert [result.micro_batch_sizes for result in results] == [plan.micro_batch_sizes] * 5
    assert not any(result.retries for result in results)
    assert runner.micro_batch_size == plan.micro_batch_size
    assert max(result.peak_bytes for result in results) <= plan.peak_bytes


@BY_HOLDER
@pytest.mark.parametrize("update", [True, False], ids=["step", "accumulate"])
def test_an_activation_dies_when_the_model_has_let_go_of_it(hold, update):
    """After a step only the last micro-batch's are alive, and once the attribute is cleared, none: no collection."""
    model = Holds(hold)
    _, runner = make_runner(model, 12 * MIB)
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):  # some are recorded, and some are not
            model.references.clear()
            runner.step(make_batch()) if update else runner.accumulate(make_batch())
            alive = [reference() is not None for reference in model.references]
            assert alive == [False] * (len(alive) - 1) + [True]
        model.held = None
        assert model.references[-1]() is None
    finally:
        gc.enable()


def test_the_optimizers_step_has_none_of_the_step_before_beside_it():
    """Nothing is undone from there on, so what the model held before is not needed any more."""
    model, alive = Holds(HOLD["attribute"]), []
    _, runner = make_runner(model, 12 * MIB)
    runner.step(make_batch())
    optimizer = runner._workload.optimizer
    optimizer.register_step_pre_hook(lambda *_: alive.append([r() is not None for r in model.references]))
    before = len(model.references)
    runner.step(make_batch())
    assert not any(alive[0][:before])
    assert alive[0][-1]
