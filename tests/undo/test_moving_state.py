"""Steps that change what is not a registered buffer: a retry ends as a run in the final pieces, a refusal as before.

A sample of the positions that tests/training/test_faults.py tries all of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from faults import CASES, Training
from moving_runner import make_runner
from torch import nn
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import CannotRetry
from autobatch.testing import FakeDevice, oom_at

FIRST = next(index for index, case in enumerate(CASES) if "key encoder" in case.name)
BY_NAME = pytest.mark.parametrize("case", CASES[FIRST:], ids=lambda case: case.name)


pytestmark = [
    pytest.mark.usefixtures("quiet_log"),
    # torch says so once a process, at the first sparse tensor that an optimizer makes.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


@BY_NAME
def test_any_other_error_leaves_everything_as_it_was(case):
    """An error of the user's own, late in the last micro-batch's forward pass."""
    training = Training(case, earlier_steps=1)
    before, step, calls = training.state(), training.step, []

    def fail(model, batch):
        loss = step(model, batch)
        calls.append(len(batch[0]))
        if len(calls) == 2:
            raise ValueError("planned")
        return loss

    training.step = fail
    with pytest.raises(ValueError, match="planned"):
        training.runner.step(training.batch)
    assert not differences(training.state(), before)


class MovesLate(nn.Module):
    """Begins to move a weight in a step that is not recorded, and which way it writes."""

    def __init__(self, *, way: str, since: int) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.way, self.since, self.passes = way, since, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes > self.since:
            with torch.no_grad():
                if self.way == "in place":
                    self.frozen.weight.add_(0.1)
                else:
                    self.frozen.weight.data = self.frozen.weight.data + 0.1
        return self.layer(inputs) * self.frozen(inputs)


def test_a_write_that_was_never_seen_before_is_an_error_and_never_a_wrong_result():
    """The third step, not recorded, is the first to write, and memory ends in its last micro-batch."""
    model = MovesLate(way="in place", since=4)
    runner, _ = make_runner(model)
    for _ in range(2):
        runner.step(make_batch(8))
    weight = model.layer.weight.detach().clone()
    batch = make_batch(8)
    with oom_at(12), pytest.raises(CannotRetry, match=r"shape \(4, 6\)"):
        runner.step(batch)
    assert torch.equal(model.layer.weight, weight)
    assert (model.passes, runner.steps) == (4, 2)


def test_a_write_that_was_seen_in_an_earlier_step_is_put_back():
    """It was first seen in a step that was not recorded and did not fail; from then on it is copied."""
    model = MovesLate(way="in place", since=4)
    runner, _ = make_runner(model)
    for _ in range(3):
        runner.step(make_batch(8))
    before, batch = model.frozen.weight.clone(), make_batch(8)
    with oom_at(12):
        result = runner.step(batch)
    assert result.retries == 1
    expected = before.clone()
    for _ in result.micro_batch_sizes:
        expected += 0.1
    assert torch.equal(model.frozen.weight, expected)


def test_assigned_data_needs_no_copy():
    """The old memory is as it was, whenever a step begins to assign."""
    model = MovesLate(way="assigned", since=4)
    runner, _ = make_runner(model)
    for _ in range(2):
        runner.step(make_batch(8))
    before, batch = model.frozen.weight.clone(), make_batch(8)
    with oom_at(12):
        result = runner.step(batch)
    expected = before.clone()
    for _ in result.micro_batch_sizes:
        expected += 0.1
    assert torch.equal(model.frozen.weight, expected)


def test_what_is_not_written_is_not_copied():
    """A frozen part that stays as it is costs nothing, however large it is."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4).requires_grad_(False))
    runner, _ = make_runner(model)
    for _ in range(3):
        runner.step(make_batch(8))
    assert runner._accumulation.record().memory == {}


def test_memory_that_died_is_forgotten():
    """A step that makes its own scratch tensors writes into none of an earlier step."""
    model, scratch = nn.Linear(6, 4), {}

    def step(model, batch):
        scratch["sum"] = torch.zeros(4)
        with torch.no_grad():
            scratch.get("last", scratch["sum"]).add_(1)
        scratch["last"] = scratch["sum"]
        return mean_step(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner, _ = make_runner(model)
    runner = autobatch.Runner(runner.plan, model, step, optimizer, device=FakeDevice(lambda n: n, total_bytes=1000))
    for _ in range(70):
        runner.step(make_batch(8))
    assert len(runner._accumulation.record().memory) <= 2


@dataclass
class Elsewhere:
    """A dataclass whose state is not in its fields."""

    name: str = "counter"
    places: ClassVar[list[str]] = []

    def take(self):
        return tuple(self.places)

    def put(self, taken):
        self.places[:] = taken


def test_a_dataclass_is_asked_for_what_it_takes():
    """Its own methods say what its state is, not its fields."""
    kept, runs = Elsewhere(), []

    def step(model, batch):
        runs.append(batch)
        kept.places.append(f"of {len(batch[0])}")
        if len(runs) == 2:
            raise torch.OutOfMemoryError("planned")
        return mean_step(model, batch)

    model = nn.Linear(6, 4)
    runner, optimizer = make_runner(model)
    device = FakeDevice(lambda n: n, total_bytes=1000)
    runner = autobatch.Runner(runner.plan, model, step, optimizer, device=device, keep=[kept])
    result = runner.step(make_batch(16))
    assert result.retries == 1
    assert kept.places == [f"of {size}" for size in result.micro_batch_sizes]


class Takes:
    """Its state comes by ``take`` and goes by ``put``."""

    def __init__(self):
        self.log = ["begun"]

    def take(self):
        return tuple(self.log)

    def put(self, taken):
        self.log[:] = taken

    def change(self):
        self.log.append("changed")

    def state(self):
        return list(self.log)


class Stated:
    """Its ``state_dict`` hands out its own tensor, and what it is given it takes as its own."""

    def __init__(self):
        self.total = torch.zeros(2)

    def state_dict(self):
        return {"total": self.total, "nested": [self.total]}

    def load_state_dict(self, state):
        self.total = state["total"]

    def change(self):
        self.total += 1

    def state(self):
        return self.total.tolist()


class Module(nn.Module):
    """A metric: its state is a plain attribute and a list."""

    def __init__(self):
        super().__init__()
        self.count, self.values = torch.zeros(()), []

    def change(self):
        self.count += 1
        self.values.append(self.count.clone())

    def state(self):
        return [float(self.count), len(self.values)]


class Data:
    """A value of one of the kinds that need no methods."""

    def __init__(self, value, change):
        self.value, self._change = value, change

    def change(self):
        self._change(self.value)

    def state(self):
        value = self.value
        return value.get_state().tolist() if isinstance(value, torch.Generator) else repr(value)


OBJECTS = {
    "take and put": Takes,
    "state_dict": Stated,
    "module": Module,
    "tensor": lambda: Data(torch.zeros(2), lambda value: value.add_(1)),
    "dict": lambda: Data({"sum": torch.zeros(2), "n": [0]}, lambda v: (v["sum"].add_(1), v["n"].append(1))),
    "generator": lambda: Data(torch.Generator().manual_seed(1), lambda value: torch.rand(1, generator=value)),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("position", [3, 8, 12], ids=["first piece", "backward", "second piece"])
def test_a_named_object_rides_on_the_step(make, position):
    """After a retry it is as after a run in the committed pieces, after an error as before."""
    item, model = make(), nn.Linear(6, 4)
    plan_runner, optimizer = make_runner(model)

    def step(model, batch):
        item.change()
        return mean_step(model, batch)

    named = getattr(item, "value", item)
    device = FakeDevice(lambda n: n, total_bytes=1000)
    runner = autobatch.Runner(plan_runner.plan, model, step, optimizer, keep=[named], device=device)
    batch = make_batch(8)
    with oom_at(position) as planned:
        result = runner.step(batch)
    assert planned.raised
    undisturbed = make()
    for _ in result.micro_batch_sizes:
        undisturbed.change()
    assert item.state() == undisturbed.state()

    def fail(model, batch):
        item.change()
        raise ValueError("planned")

    before = item.state()
    runner = autobatch.Runner(plan_runner.plan, model, fail, optimizer, keep=[named], device=device)
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    assert item.state() == before


def test_lazy_modules_may_be_fitted_and_trained():
    """Nothing needs to be run before: fit leaves them without a shape, and the first step gives them one."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))
    before = bits_of(model)
    runner, _ = make_runner(model)
    assert not differences(bits_of(model), before)
    assert all(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters())
    assert runner.step(make_batch(8)).loss.isfinite()
    assert model[0].weight.shape == (8, 6)
