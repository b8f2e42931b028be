"""What a step costs beside a hand-written loop, in numbers that no other program on the machine can change."""

from __future__ import annotations

import inspect

import pytest
import torch
from builders.python_calls import count_calls
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autobatch

MICRO_BATCHES = 4
SAMPLES = 64
MOST_CALLS = 40
"""Python calls of a step beyond those of the loop: 20 with CPython 3.11, which calls a comprehension too."""

MOST_FRAMES = 6


def classify(model, batch):
    """A mean loss."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def make_training():
    """A small model, its optimizer and a batch."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 10))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(SAMPLES, 16), torch.randint(10, (SAMPLES,)))


def make_runner(model, optimizer, batch, step=classify):
    """A plan of four micro-batches, and what runs it."""
    size = SAMPLES // MICRO_BATCHES
    plan = autobatch.fit(model, SAMPLES, batch=batch, step=step, optimizer=optimizer, max_micro_batch=size)
    assert plan.accumulation_steps == MICRO_BATCHES
    return autobatch.Runner(plan, model, step, optimizer)


def run_by_hand(model, optimizer, batch):
    """The loop that a user would write."""
    inputs, labels = batch
    size = SAMPLES // MICRO_BATCHES
    for part in zip(inputs.split(size), labels.split(size), strict=True):
        (classify(model, part) * (len(part[1]) / len(labels))).backward()
    optimizer.step()
    optimizer.zero_grad()


class CountOperators(TorchDispatchMode):
    """Counts torch's operators but ``detach``, which computes nothing."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """One more."""
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def test_a_step_makes_few_python_calls():
    """Beyond those of the loop by hand, in a step that is not recorded and in which nothing is written down."""
    model, optimizer, batch = make_training()
    runner = make_runner(model, optimizer, batch)
    for _ in range(5):
        runner.step(batch)
        run_by_hand(model, optimizer, batch)
    # The least of a few: once a second free memory is read, and the ledger writes now and then.
    ours = min(count_calls(lambda: runner.step(batch)) for _ in range(5))
    assert ours - count_calls(lambda: run_by_hand(model, optimizer, batch)) <= MOST_CALLS


def test_a_step_runs_no_more_operators_than_the_loop():
    """But for the running loss: the product of loss and share, and its backward pass, are left out."""
    model, optimizer, batch = make_training()
    runner = make_runner(model, optimizer, batch)
    counts = []
    for run in (lambda: runner.step(batch), lambda: run_by_hand(model, optimizer, batch)):
        for _ in range(5):
            run()
        with CountOperators() as counter:
            run()
        counts.append(counter.count)
    assert counts[0] <= counts[1]


def test_nothing_is_called_for_each_parameter_or_module():
    """A step of a model of ten times as many makes as many calls of ours."""
    extra = []
    for layers in (2, 20):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)), nn.Linear(8, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        batch = torch.randn(SAMPLES, 8), torch.randint(10, (SAMPLES,))
        runner = make_runner(model, optimizer, batch)
        for _ in range(5):
            runner.step(batch)
            run_by_hand(model, optimizer, batch)
        ours = min(count_calls(lambda run=runner, given=batch: run.step(given)) for _ in range(5))
        extra.append(ours - count_calls(lambda m=model, o=optimizer, b=batch: run_by_hand(m, o, b)))
    assert abs(extra[1] - extra[0]) <= 2


@pytest.mark.parametrize("where", ["backward", "update"])
def test_few_frames_lie_between_the_user_and_torch(where, monkeypatch):
    """From the call of ``runner.step`` to ``backward`` and to ``optimizer.step``."""
    model, optimizer, batch = make_training()
    runner = make_runner(model, optimizer, batch)
    for _ in range(5):
        runner.step(batch)
    depths = []

    def note(*_args, **_options):
        names = [frame.frame.f_globals.get("__name__", "") for frame in inspect.stack()]
        depths.append(sum(name.startswith("autobatch.") for name in names))

    if where == "update":
        optimizer.register_step_pre_hook(note)
    else:
        backward = torch.Tensor.backward
        monkeypatch.setattr(torch.Tensor, "backward", lambda *args, **options: note() or backward(*args, **options))
    runner.step(batch)
    assert depths
    assert max(depths) <= MOST_FRAMES
