"""Gradient hooks that a step registers and removes are as in a run without a failure."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autobatch


class Hooked(nn.Module):
    """Removes its gradient hook in each forward pass and registers another one, or only ever registers."""

    def __init__(self, removes=True):
        super().__init__()
        self.layers, self.handle, self.removes = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)), None, removes
        self.double()

    def forward(self, inputs):
        if self.removes and self.handle is not None:
            self.handle.remove()
        if self.removes or self.handle is None:
            self.handle = self.layers[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return self.layers(inputs)


def make_batch():
    """Three micro-batches of four."""
    torch.manual_seed(1)
    return torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)


def full_gradient(model, removes):
    """Of the whole batch, by another model with the same weights."""
    reference = Hooked(removes)
    reference.load_state_dict(model.state_dict())
    mse_loss(reference(make_batch()[0]), make_batch()[1]).backward()
    return reference.layers[0].weight.grad


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), KeyError()])
@pytest.mark.parametrize("failing_call", [1, 2, 3])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("removes", [True, False])
def test_one_hook_is_left_and_the_gradient_is_the_full_batchs(removes, steps_before, failing_call, error):
    """After a retry, and after a step that another error has undone: the handle still removes its hook."""
    torch.manual_seed(0)
    model, batch, calls, fails = Hooked(removes), make_batch(), [], []

    def step(model, part):
        loss = mse_loss(model(part[0]), part[1])
        calls.append(True)
        if fails and len(calls) == failing_call:
            fails.clear()
            raise error
        return loss

    plan = autobatch.fit(model, 12, batch=batch, step=step, max_micro_batch=4, check=None)
    runner = autobatch.Runner(plan, model, step, None)
    for _ in range(steps_before):
        runner.accumulate(batch)
        model.zero_grad()
    calls.clear()
    fails.append(True)
    try:
        runner.accumulate(batch)
    except KeyError:
        runner.accumulate(batch)
    assert len(model.layers[0].weight._backward_hooks) == 1
    torch.testing.assert_close(model.layers[0].weight.grad, full_gradient(model, removes), rtol=1e-12, atol=1e-14)
