"""What a fit and an import cost, in counts that a busy machine cannot change."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.step.loop_guard import LoopGuard
from autobatch.undo.training_state import TrainingState

TARGET = 64


def make():
    """What ``fit`` takes: layers whose every guarantee costs something, as BatchNorm and dropout."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10)]
    model = nn.Sequential(*layers)
    return {
        "model": model,
        "target_batch": TARGET,
        "batch": (torch.randn(TARGET, 1, 8, 8), torch.randint(10, (TARGET,))),
        "step": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "reuse": False,
    }


@contextmanager
def thawed():
    """As in a user's process: in tests all imports are frozen. Only explicit collections run."""
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@contextmanager
def counting_calls(monkeypatch, owner, name):
    """A list that gets an entry with each call of a method."""
    calls, method = [], getattr(owner, name)

    def count(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, count)
        yield calls


@contextmanager
def full_collections():
    """A list that gets an entry with each collection that looks at every object of the process."""
    found = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2 and gc.get_freeze_count() == 0:
            found.append(info)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


class Holding(CpuDevice):
    """The CPU, where tensors of so many bytes are alive beside the model's."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def usage(self):
        usage = super().usage()
        return usage.model_copy(update={"allocated": usage.allocated + self.held})


@pytest.mark.parametrize(("held", "collections"), [(10**12, 1), (0, 0)])
def test_all_objects_are_looked_at_for_garbage_once_where_the_device_holds_more_than_the_model(held, collections):
    """Each such collection takes 0.1 to 0.2 s once torch, NumPy and SciPy are imported; later ones see new objects."""
    with thawed(), full_collections() as found:
        autobatch.fit(**make(), device=Holding(held))
        assert gc.get_freeze_count() == 0
    assert len(found) == collections


def test_what_the_user_has_frozen_stays_frozen():
    """Objects in the permanent generation, as before a fork, are still there after a fit."""
    with thawed():
        gc.freeze()
        frozen = gc.get_freeze_count()
        autobatch.fit(**make())
        assert gc.get_freeze_count() > 0.9 * frozen


def test_a_fit_that_raises_leaves_nothing_frozen():
    """Whatever the step raises."""
    given = make() | {"step": lambda model, batch: model(batch[0]).missing}
    with thawed():
        with pytest.raises(AttributeError, match="missing"):
            autobatch.fit(**given)
        assert gc.get_freeze_count() == 0


def test_state_is_put_back_once_after_each_attempt(monkeypatch):
    """Trials, the first step, and the search for the smallest size."""
    with counting_calls(monkeypatch, TrainingState, "rewind") as rewinds:
        plan = autobatch.fit(**make())
    attempts = len(plan.trials) + 2
    assert len(rewinds) == attempts


def test_a_step_is_searched_for_optimizers_once(monkeypatch):
    """Not again for each trial and each run of the check, which all call the same step."""
    with counting_calls(monkeypatch, LoopGuard, "find") as searches:
        autobatch.fit(**make())
    assert len(searches) == 1


def test_a_fit_calls_the_step_a_known_number_of_times():
    """One sample, the first step, two micro-batches a trial; the check runs no more than a few whole batches."""
    given, calls = make(), []
    step = given["step"]

    def count(model, batch):
        calls.append(len(batch[1]))
        return step(model, batch)

    plan = autobatch.fit(**given | {"step": count}, check=None)
    assert len(calls) == 1 + 1 + 2 * len(plan.trials)
    calls.clear()
    autobatch.fit(**given | {"step": count})
    compared = calls[2 + 2 * len(plan.trials) :]
    assert 2 * 16 <= sum(compared) <= 8 * 16


def test_import_takes_little_time_and_no_library():
    """No torch, NumPy or pydantic before the first use, and few modules of ours."""
    program = "import sys; import autobatch; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=200).split()
    assert not {"torch", "numpy", "pydantic", "scipy"} & {*imported}
    assert len([name for name in imported if name.startswith("autobatch")]) <= 5
