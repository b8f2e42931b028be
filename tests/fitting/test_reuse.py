"""What a process learnt about memory serves the next one: one trial instead of a search, or why it does not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.ledger.store import Store
from autobatch.testing import FakeDevice

MIB = 2**20


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    return tmp_path


def make(width=512, **changes):
    """What ``fit`` takes, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
    arguments = {
        "model": model,
        "target_batch": 1024,
        "batch": (torch.randn(1024, 64), torch.randint(4, (1024,))),
        "step": step,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "budget": "6MiB",
    }
    return {**arguments, **changes}


def step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def other_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def warnings_of(caplog):
    return [line for line in caplog.messages if "of an earlier run" in line]


@pytest.mark.usefixtures("home")
def test_the_second_fit_costs_one_trial(caplog):
    """The same plan comes of it, with its curve; it says which plan it confirms."""
    caplog.set_level(logging.INFO, "autobatch")
    first, second = autobatch.fit(**make()), autobatch.fit(**make())
    assert first.accumulation_steps > 1
    assert len(first.trials) > 2
    assert [trial.micro_batch_size for trial in second.trials] == [first.micro_batch_size]
    assert second.micro_batch_sizes == first.micro_batch_sizes
    assert second.peak_bytes == first.peak_bytes
    assert (second.confirms, second.curve) == (first.id, first.curve)
    assert second.id not in {"", first.id}
    [line] = warnings_of(caplog)
    assert f"plan {first.id} of an earlier run is for this step: one trial of {first.micro_batch_size}" in line


SCRIPT = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stdout)
sys.path.insert(0, sys.argv[1])
from test_reuse import make
import autobatch
arguments = make()
plan = autobatch.fit(**arguments)
runner = autobatch.Runner(plan, arguments["model"], arguments["step"], arguments["optimizer"])
for _ in range(3):
    runner.step(arguments["batch"])
print("trials", len(plan.trials))
"""


@pytest.mark.slow
def test_the_second_start_of_a_script_costs_one_trial(home):
    """In a process of its own each time; both runs are kept with their plans."""
    environment = {**os.environ, "AUTOBATCH_HOME": str(home), "AUTOBATCH_LEDGER": "on", "OMP_NUM_THREADS": "1"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout
        for _ in range(3)
    ]
    trials = [int(output.split("trials ")[1]) for output in outputs]
    assert trials[0] > 2
    assert trials[1:] == [1, 1]
    plans = Store(home).plans()
    runs = [Store(home).runs_of(plan.id) for plan in plans]
    assert [len(plan.trials) for plan in plans] == trials[::-1]
    assert [[(run.steps, run.outcome) for run in of_plan] for of_plan in runs] == [[(3, "finished")]] * 3


CHANGED = {
    "another width": lambda: make(width=520),
    "another step": lambda: make(step=other_step),
    "another optimizer": lambda: {**(found := make()), "optimizer": torch.optim.SGD(found["model"].parameters())},
    "another target": lambda: make(target_batch=1000),
    "another bound": lambda: make(max_micro_batch=100),
    "another objective": lambda: make(objective="memory"),
    "reuse=False": lambda: make(reuse=False),
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", CHANGED)
def test_what_is_not_the_same_is_searched_for(name, caplog):
    """Another question about the same step is warned of; of another step nothing is said."""
    caplog.set_level(logging.INFO, "autobatch")
    autobatch.fit(**make())
    plan = autobatch.fit(**CHANGED[name]())
    assert len(plan.trials) > 1
    assert plan.confirms == ""
    lines = warnings_of(caplog)
    assert len(lines) == (name in {"another target", "another bound", "another objective"})
    assert all("it was made for" in line for line in lines)


@pytest.mark.usefixtures("home")
def test_a_plan_that_needs_more_than_today_is_not_tried(caplog):
    """The log says both numbers."""
    caplog.set_level(logging.INFO, "autobatch")
    first = autobatch.fit(**make())
    second = autobatch.fit(**make(budget=first.peak_bytes))  # its headroom is then missing
    assert second.micro_batch_size < first.micro_batch_size
    [line] = warnings_of(caplog)
    assert f"plan {first.id} of an earlier run is not reused: it needs" in line
    assert autobatch.fit(**make(budget=first.peak_bytes)).confirms == second.id


@pytest.mark.usefixtures("home")
def test_more_room_than_then_is_used(caplog):
    """The limit has grown so far that a larger size fits: it is searched for, and remembered in turn."""
    caplog.set_level(logging.INFO, "autobatch")
    first = autobatch.fit(**make())
    second = autobatch.fit(**make(budget="64MiB"))
    assert second.micro_batch_size > first.micro_batch_size
    assert "may fit; searching again" in warnings_of(caplog)[0]
    assert autobatch.fit(**make(budget="64MiB")).confirms == second.id


class Grows(nn.Module):
    """Keeps more for the backward pass than its parameters tell: as many copies as somebody else says."""

    copies = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 512)

    def forward(self, rows):
        hidden = self.layer(rows)
        return torch.stack([hidden.sin() for _ in range(type(self).copies)]).sum()


def sum_step(model, rows):
    return model(rows) / len(rows)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("copies", "why"), [(4, "ran out of memory this time"), (1, "has changed")])
def test_a_change_that_the_fingerprint_cannot_see_is_found_by_the_trial(monkeypatch, caplog, copies, why):
    """The plan is right all the same, and the log says what was found; the trial is part of the evidence."""
    caplog.set_level(logging.INFO, "autobatch")
    model = Grows()
    monkeypatch.setattr(Grows, "copies", 2 if copies == 1 else 1)

    def fit():
        return autobatch.fit(
            model, 1024, batch=torch.randn(64, 64), step=sum_step, budget="4MiB", check=None, progress=False
        )

    first = fit()
    monkeypatch.setattr(Grows, "copies", copies)
    second = fit()
    assert second.trials[0].micro_batch_size == first.micro_batch_size
    assert second.confirms == ""
    assert second.peak_bytes <= second.limit_bytes
    assert (second.micro_batch_size < first.micro_batch_size) == (copies > 1)
    assert "searching again" in warnings_of(caplog)[-1]
    assert why in warnings_of(caplog)[-1]


def test_what_runs_on_a_stand_in_is_not_kept(home):
    """A user's own tests must neither find nor leave plans."""
    gpu = FakeDevice(lambda samples: 1000 + 50 * samples, total_bytes=4000)
    arguments = make(device=gpu, budget=None)
    plan = autobatch.fit(**arguments)
    runner = autobatch.Runner(plan, arguments["model"], step, arguments["optimizer"], device=gpu)
    runner.step(arguments["batch"])
    assert not list(home.iterdir())


@pytest.mark.usefixtures("home")
def test_a_step_that_fails_ends_its_run_as_failed(home):
    """With our own words for it, and not with the user's."""
    arguments = make()
    plan = autobatch.fit(**arguments)

    def fails(model, batch):
        raise RuntimeError("the secret in the data")

    runner = autobatch.Runner(plan, arguments["model"], fails, arguments["optimizer"])
    with pytest.raises(RuntimeError):
        runner.step(arguments["batch"])
    [run] = Store(home).runs_of(plan.id)
    assert (run.outcome, run.reason) == ("failed", "RuntimeError")


def test_a_ledger_that_cannot_be_used_costs_a_line(tmp_path, monkeypatch, caplog):
    """The folder is a file, say: fit and Runner do all they do without one."""
    monkeypatch.setattr("autobatch.ledger.store._warned", set())
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    arguments = make()
    plan = autobatch.fit(**arguments)
    result = autobatch.Runner(plan, arguments["model"], step, arguments["optimizer"]).step(arguments["batch"])
    assert sum(result.micro_batch_sizes) == 1024
    assert [record.levelname for record in caplog.records if "the ledger in" in record.message] == ["WARNING"]


@pytest.mark.usefixtures("home")
def test_a_few_bytes_more_do_not_repeat_a_search_that_had_failed(caplog):
    """Memory that grows with the square: the next size has run out, though the curve would let it fit."""
    caplog.set_level(logging.INFO, "autobatch")

    def fit(budget):
        torch.manual_seed(0)
        layer = nn.Linear(8, 64)

        def compare(model, rows):
            hidden = model(rows)
            return (hidden @ hidden.T).exp().mean(dim=1).mean()

        return autobatch.fit(layer, 1024, batch=torch.randn(64, 8), step=compare, budget=budget, check=None)

    first = fit(3 * MIB)
    assert first.failing_size > first.micro_batch_size
    for more in (1, 4096, 8192):
        again = fit(3 * MIB + more)
        assert len(again.trials) == 1
        assert (again.failing_size, again.searched_bytes) == (first.failing_size, first.searched_bytes)


@pytest.mark.usefixtures("home")
def test_an_interrupt_ends_a_run_as_interrupted(home):
    """Ctrl-C is the user's will, and no failure."""
    arguments = make()
    plan = autobatch.fit(**arguments)

    def interrupted(model, batch):
        raise KeyboardInterrupt

    runner = autobatch.Runner(plan, arguments["model"], interrupted, arguments["optimizer"])
    with pytest.raises(KeyboardInterrupt):
        runner.step(arguments["batch"])
    [run] = Store(home).runs_of(plan.id)
    assert (run.outcome, run.reason) == ("interrupted", "KeyboardInterrupt")
