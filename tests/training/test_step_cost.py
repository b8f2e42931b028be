"""What a step costs beside a hand-written loop, in numbers that no other program on the machine can change."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autobatch

MICRO_BATCHES = 4
SAMPLES = 64


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
