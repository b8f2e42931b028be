"""Steps on a CPU that run inside the budget, and steps that take more than others of their size."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.testing import FakeDevice

SAMPLES, SIZE, WIDTH = 512, 128, 32


class Net(nn.Module):
    """A model that can be made to take more, without a larger batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH))
        self.double()
        self.extra = 0

    def forward(self, inputs):
        hidden = self.body(inputs)
        return hidden + 0 * hidden.repeat(1, self.extra).sum() if self.extra else hidden


def step(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def make_batch(samples=SAMPLES, seed=0):
    """Inputs and targets in float64."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))


@dataclass
class Run:
    """A runner whose budget was passed, or was not; ``counted`` are the steps that ran inside it, by number."""

    passes_budget: bool = True
    optimizer: object = torch.optim.Adam
    counted: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.model_optimizer = self.optimizer(self.model.parameters(), lr=1e-3)
        self.plan = self.fit(None)
        if self.passes_budget:
            self.plan = self.fit(2 * self.plan.peak_bytes)
        self.runner = self.bind()

    def bind(self):
        return autobatch.Runner(self.plan, self.model, step, self.model_optimizer, hooks=[self.events.append])

    def fit(self, budget):
        return autobatch.fit(
            self.model,
            SAMPLES,
            batch=make_batch(),
            step=step,
            optimizer=self.model_optimizer,
            max_micro_batch=SIZE,
            budget=budget,
            check=None,
        )

    def run(self, batch=None, call="step"):
        """One step, which is noted if it is counted."""
        number = self.runner.steps
        with noting_limits() as entered:
            result = getattr(self.runner, call)(make_batch() if batch is None else batch)
        self.counted += [number] * bool(entered)
        return result

    def take(self, share):
        """From now on a full micro-batch takes this share of a passed budget more."""
        self.model.extra = round(share * 2 * self.plan.peak_bytes / SIZE / WIDTH / 8)


@contextmanager
def noting_limits():
    entered, limit = [], CpuDevice.limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "limit", lambda device, budget: entered.append(budget) or limit(device, budget))
        yield entered


@pytest.mark.parametrize("call", ["step", "accumulate"])
@pytest.mark.parametrize(("passes_budget", "counted"), [(True, [0, 1, 2, 3, 4]), (False, [0, 1])])
def test_a_passed_budget_is_enforced_in_every_step(passes_budget, counted, call):
    """A default one in the first two: in the first the optimizer makes its state, in the second it has it."""
    run = Run(passes_budget=passes_budget)
    for _ in range(5):
        run.run(call=call)
    assert run.counted == counted
    assert run.plan.budget_passed is passes_budget


def test_a_default_budget_is_enforced_in_the_first_two_steps_after_a_state_was_loaded():
    """The new process has other things in its memory."""
    run = Run(passes_budget=False)
    for _ in range(3):
        run.run()
    state = run.runner.state_dict()
    run.runner = run.bind()
    run.runner.load_state_dict(state)
    for _ in range(3):
        run.run()
    assert run.counted == [0, 1, 3, 4]


def test_the_peak_is_each_steps_own():
    """Also where one has taken more before."""
    run = Run()
    run.run()
    run.take(0.3)
    grown = run.run()
    run.model.extra = 0
    assert run.run().peak_bytes < grown.peak_bytes


@pytest.mark.parametrize("budget", [None, 900])
def test_where_the_limit_costs_nothing_each_step_has_it(budget):
    """A device that enforces by itself, as CUDA's allocator does, is asked to in every step."""
    device = FakeDevice(lambda samples: 100 + samples, 1000)
    model = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def loss_of(model, batch):
        return model(batch[0]).square().mean()

    plan = autobatch.fit(model, SAMPLES, batch=make_batch(), step=loss_of, device=device, budget=budget, headroom=0)
    runner, entered, limit = autobatch.Runner(plan, model, loss_of, None, device=device), [], device.limit
    device.limit = lambda budget: entered.append(budget) or limit(budget)
    for _ in range(5):
        runner.accumulate(make_batch())
    assert len(entered) == 5


def test_data_dependent_growth_is_met_in_its_own_step(caplog):
    """The budget is never passed: the step is retried with less, and the log says so."""
    run = Run()
    for _ in range(3):
        run.run()
    run.take(1.2)
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        result = run.run()
    assert result.retries > 0
    assert result.peak_bytes <= run.plan.budget_bytes
    assert f"step 3 ran out of memory at {SIZE} samples" in caplog.text


def test_uncounted_steps_run_compiled():
    """Under the count torch runs a compiled model as it was written."""
    calls = []

    def note(module, example):
        return lambda *arguments: calls.append(len(calls)) or module(*arguments)

    run = Run(passes_budget=False)
    run.model.body = torch.compile(run.model.body, backend=note)
    run.runner = run.bind()
    for _ in range(3):
        run.run()
        assert bool(calls) is (run.runner.steps - 1 not in run.counted)
    assert len(calls) == SAMPLES // SIZE
