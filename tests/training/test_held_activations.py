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
from autobatch.testing import oom_at

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


def test_activations_that_a_hook_collects_count_as_well():
    """They are in a dict outside the model; fit leaves it as it is, with those of the last trial in it."""
    model, collected = Holds(lambda _: None), {}
    model.body.register_forward_hook(lambda _module, _inputs, output: collected.update(hidden=output))
    plan, runner = make_runner(model, 12 * MIB)
    assert 1 < plan.accumulation_steps < 20
    results = [runner.step(make_batch()) for _ in range(5)]
    assert [result.micro_batch_sizes for result in results] == [plan.micro_batch_sizes] * 5
    assert max(result.peak_bytes for result in results) <= plan.peak_bytes + 1024  # the sum of the losses


class Wide(nn.Module):
    """Much to update and little to hold: the optimizer's step is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.held = nn.Linear(32, 512), nn.Linear(512, 4), None
        self.table = nn.Parameter(torch.zeros(4, 200_000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.held = self.body(inputs)
        return self.head(F.relu(self.held)) + self.table.sum(1)


def test_the_update_has_as_much_as_in_the_trials():
    """Where the optimizer's step is the peak, what the model holds of two steps is not counted against it."""
    model = Wide()
    plan, _ = make_runner(model, 2**30, max_micro_batch=64)
    assert plan.peak_bytes == max(trial.optimizer_peak for trial in plan.trials)
    held = 64 * 512 * 4
    plan, runner = make_runner(model, plan.peak_bytes + held // 2, max_micro_batch=64, headroom=0)
    assert plan.micro_batch_size == 64
    assert [runner.step(make_batch()).micro_batch_sizes for _ in range(3)] == [plan.micro_batch_sizes] * 3


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


def test_an_activation_of_the_step_before_is_put_back():
    """Where the step cannot be done, the model holds what it held; and after a retry the last micro-batch's."""
    model = Holds(HOLD["attribute"])
    _, runner = make_runner(model, 12 * MIB)
    runner.step(make_batch())
    held, value = model.held, model.held.detach().clone()

    def fail(model, batch):
        step(model, batch)
        raise ValueError("planned")

    runner._workload.__dict__["step"] = fail
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch())
    assert model.held is held
    assert torch.equal(model.held, value)
    runner._workload.__dict__["step"] = step
    batch = make_batch()
    with oom_at(20):
        result = runner.step(batch)
    assert result.retries == 1
    assert len(model.held) == result.micro_batch_sizes[-1]
