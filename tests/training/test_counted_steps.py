"""Near a CPU's budget: which steps are counted, and what happens where one takes more than others of its size."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.batches import Samples
from autobatch.events import Retried
from autobatch.memory.cpu import CpuDevice
from autobatch.planning.counted_growth import COUNT_EVERY
from autobatch.testing import FakeDevice, oom_at, tenant

SAMPLES, SIZE, WIDTH = 512, 128, 32
LEARNT = 6
"""Steps after which those like them run uncounted: the first makes the optimizer's state, and four have to agree."""


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
    """A mean loss."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def make_batch(samples=SAMPLES, seed=0):
    """Inputs and targets in float64."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))


@dataclass
class Run:
    """A runner near its budget; ``counted`` are the steps that were counted, by number."""

    near: bool = True
    options: dict = field(default_factory=dict)
    step: object = step
    optimizer: object = torch.optim.Adam
    counted: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.model_optimizer = self.optimizer(self.model.parameters(), lr=1e-3)
        plan = self.fit(None)
        self.plan = self.fit(2 * plan.peak_bytes if self.near else 2**36)
        hooks = [self.events.append]
        self.runner = autobatch.Runner(
            self.plan, self.model, self.step, self.model_optimizer, hooks=hooks, **self.options
        )

    def fit(self, budget):
        """In four micro-batches."""
        return autobatch.fit(
            self.model,
            SAMPLES,
            batch=make_batch(),
            step=self.step,
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
        """From now on a full micro-batch takes this share of a near budget more."""
        self.model.extra = round(share * 2 * self.plan.peak_bytes / SIZE / WIDTH / 8)

    def learn(self, **options):
        """Steps after which such steps run uncounted."""
        for _ in range(LEARNT):
            self.run(**options)
        self.counted.clear()
        self.run(**options)
        assert not self.counted


@contextmanager
def noting_limits():
    """The budgets that are entered."""
    entered, limit = [], CpuDevice.limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "limit", lambda device, budget: entered.append(budget) or limit(device, budget))
        yield entered


def test_steps_like_counted_ones_run_uncounted():
    """Near the budget the first ones are counted until they agree, then one in so many; the loss is the same."""
    run, steps = Run(), 3 * COUNT_EVERY
    for _ in range(steps):
        run.run()
    assert run.counted[:5] == [0, 1, 2, 3, 4]
    assert run.counted[5:] == [*range(4 + COUNT_EVERY, steps, COUNT_EVERY)]


@pytest.mark.parametrize("near", [True, False])
def test_always_counts_each_step(near):
    """Near the budget and far from it; the peak is then each step's own."""
    run = Run(near=near, options={"enforce": "always"})
    for _ in range(LEARNT):
        run.run()
    run.take(0.3)
    grown = run.run()
    assert run.counted == [*range(LEARNT + 1)]
    run.model.extra = 0
    assert run.run().peak_bytes < grown.peak_bytes


def test_where_the_limit_costs_nothing_each_step_has_it():
    """A device that enforces by itself, as CUDA's allocator does, is asked to in every step."""
    device = FakeDevice(lambda samples: 100 + samples, 1000)
    model = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def loss_of(model, batch):
        return model(batch[0]).square().mean()

    plan = autobatch.fit(model, SAMPLES, batch=make_batch(), step=loss_of, device=device, headroom=0)
    runner, entered, limit = autobatch.Runner(plan, model, loss_of, None, device=device), [], device.limit
    device.limit = lambda budget: entered.append(budget) or limit(budget)
    for _ in range(2 * LEARNT):
        runner.accumulate(make_batch())
    assert len(entered) == 2 * LEARNT


def unfreeze(run):
    """Train a layer that was frozen while others were counted."""
    run.model.body[0].requires_grad_(requires_grad=False)
    run.learn()
    run.model.body[0].requires_grad_(requires_grad=True)


OTHER_STEPS = {
    "more samples in a micro-batch": lambda run: (run.learn(batch=make_batch(4)), run.run(make_batch(5))),
    "more micro-batches": lambda run: (run.learn(batch=make_batch(SIZE)), run.run(make_batch(SIZE + 1))),
    "without update": lambda run: (run.learn(), run.run(call="accumulate")),
    "with gradients from before": lambda run: (run.learn(), step(run.model, make_batch()).backward(), run.run()),
    "another mode": lambda run: (run.model.eval(), run.learn(), run.model.train(), run.run()),
    "more parameters trained": lambda run: (unfreeze(run), run.run()),
    "several batches": lambda run: (run.learn(), run.run([make_batch(), make_batch()], "step_over")),
    "another dtype": lambda run: (
        run.learn(batch=tuple(part.float() for part in make_batch())),
        run.run(make_batch()),
    ),
}


@pytest.mark.parametrize("case", OTHER_STEPS)
def test_a_step_that_may_take_more_is_counted(case):
    """Whatever is known to take memory is part of what makes steps alike."""
    cast = "dtype" in case
    run = Run(step=(lambda m, b: step(m, tuple(part.double() for part in b))) if cast else step)
    OTHER_STEPS[case](run)
    assert run.counted == [run.runner.steps - 1]


ALIKE = {
    "step": {},
    "fewer samples": {"batch": make_batch(SIZE + 7)},
    "accumulate": {"call": "accumulate"},
    "step_over": {"call": "step_over", "batch": [make_batch(), make_batch(SIZE)]},
    "a dict": {"batch": dict(zip("xy", make_batch(), strict=True))},
}


@pytest.mark.parametrize("case", ALIKE)
def test_every_call_learns(case):
    """Updates, accumulation without one and several batches run uncounted when they are known."""
    Run(step=lambda m, b: step(m, (b["x"], b["y"]) if isinstance(b, dict) else b)).learn(**ALIKE[case])


def test_a_batch_whose_samples_may_differ_in_size_is_always_counted():
    """Of samples in a list, the sizes of the micro-batches are not those of the batch."""
    run = Run(step=lambda m, b: step(m, b if isinstance(b, tuple) else tuple(map(torch.stack, zip(*b, strict=True)))))
    for _ in range(LEARNT + 2):
        run.run(Samples([*zip(*make_batch(), strict=True)]))
    assert len(run.counted) == LEARNT + 2


def test_always_meets_data_dependent_growth_in_its_own_step():
    """The budget is never passed: the step is retried with less."""
    run = Run(options={"enforce": "always"})
    for _ in range(LEARNT):
        run.run()
    run.take(1.2)
    result = run.run()
    assert result.retries > 0
    assert result.peak_bytes <= run.plan.budget_bytes


def test_data_dependent_growth_is_met_at_the_next_counted_step(caplog):
    """Until then it passes the budget without an error; then it is retried with less, which is said, and counted on."""
    run = Run()
    run.learn()
    run.take(1.2)
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        results = [run.run() for _ in range(COUNT_EVERY)]
    [met, *later] = [index for index, result in enumerate(results) if result.retries]
    assert met == run.counted[0] - run.runner.steps + COUNT_EVERY
    assert next(event.step for event in run.events if isinstance(event, Retried)) == run.counted[0]
    assert f"step {run.counted[0]} ran out of memory at {SIZE} samples" in caplog.text
    assert results[met].peak_bytes <= run.plan.budget_bytes
    assert all(index > met for index in later)
    assert run.counted[:3] == [run.counted[0] + index for index in range(3)]


def test_steps_stay_exact_whether_counted_or_not():
    """Counted, uncounted and retried steps together make the weights of full batches."""
    run = Run(optimizer=torch.optim.SGD)
    oracle = Net()
    oracle.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.SGD(oracle.parameters(), lr=1e-3)
    for number in range(2 * COUNT_EVERY):
        if number == COUNT_EVERY // 2:
            run.take(1.2)
        run.run(make_batch(seed=number))
        step(oracle, make_batch(seed=number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(isinstance(event, Retried) for event in run.events)
    assert len(run.counted) < run.runner.steps
    for ours, full in zip(run.model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-12, atol=1e-14)


def test_memory_that_ends_in_an_uncounted_step_is_retried_at_once():
    """A real error needs no count; the next steps are counted until they agree again."""
    run = Run()
    run.learn()
    with oom_at(10):
        assert run.run().retries == 1
    assert not run.counted
    while run.runner.micro_batch_size < SIZE:
        run.run()
    run.counted.clear()
    for _ in range(5):
        run.run()
    assert len(run.counted) == 5


def test_a_tenant_is_met_at_once_and_its_memory_used_again():
    """Where less is free than such steps took, the step is counted and the size goes down, and back with the memory."""
    run, batch = Run(), make_batch()
    run.learn(batch=batch)
    held = CpuDevice().usage().allocated
    growth = run.run(batch).peak_bytes - held
    with tenant(run.plan.budget_bytes - held - growth * 3 // 4):
        for _ in range(2 * LEARNT):
            result = run.run(batch)
        assert run.counted[0] == LEARNT + 2
        assert max(result.micro_batch_sizes) < SIZE
        assert len(run.counted) < 2 * LEARNT
    assert max(run.run(batch).micro_batch_sizes) == SIZE
    run.counted.clear()
    run.run(batch)
    assert not run.counted


def test_a_skipped_step_is_no_example_of_others():
    """A batch in which nothing counts takes next to nothing, and so says nothing of the next ones."""
    run = Run(options={"weigh": lambda batch: batch[0].isfinite().all(1).sum()})
    run.run()
    for _ in range(2 * LEARNT):
        assert run.run(tuple(torch.full_like(part, torch.inf) for part in make_batch())).skipped
    run.counted.clear()
    run.run()
    assert len(run.counted) == 1


def test_uncounted_steps_run_compiled():
    """Under the count torch runs a compiled model as it was written."""
    calls = []

    def note(module, example):
        return lambda *arguments: calls.append(len(calls)) or module(*arguments)

    run = Run()
    run.model.body = torch.compile(run.model.body, backend=note)
    run.runner = autobatch.Runner(run.plan, run.model, step, run.model_optimizer)
    for _ in range(LEARNT):
        run.run()
        assert bool(calls) is (run.runner.steps - 1 not in run.counted)
    assert run.counted == [0, 1, 2, 3, 4]
    assert len(calls) == SAMPLES // SIZE


def test_the_host_is_read_once_a_second(monkeypatch):
    """A reading takes a dozen files: neither counting nor the look ahead asks for another."""
    readings, now = [], [1000.0]
    read = CpuDevice.available_bytes
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda device: readings.append(now[0]) or read(device))
    run = Run(options={"enforce": "always"})
    monkeypatch.setattr("autobatch.memory.cpu.time.monotonic", lambda: now[0])
    run.run()
    readings.clear()
    for _ in range(3):
        now[0] += 1.5
        for _ in range(LEARNT):
            run.run()
    assert len(readings) == len(set(readings)) == 3
