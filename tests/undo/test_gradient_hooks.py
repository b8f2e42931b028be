"""Gradient hooks that a step registers and removes are as in a run without a failure; other ones are refused."""

from __future__ import annotations

import pytest
import torch
from sampling import sample
from torch import nn
from torch.nn.functional import mse_loss

import autobatch
from autobatch.errors import InvalidArgument


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
@pytest.mark.parametrize("steps_before", sample([0, 1, 2, 3, 5], 2))
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


def make_scaled_training(place):
    """A model, a scale that only the optimizer holds, and the parameter at this place."""
    model, scale = nn.Linear(6, 1).double(), nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)

    def step(model, part):
        return mse_loss(model(part[0]) * scale, part[1])

    return model, step, optimizer, scale if place == "optimizer" else model.weight


REGISTER = {
    "a gradient hook": lambda parameter: parameter.register_hook(lambda gradient: gradient / gradient.norm()),
    "a post-accumulate-grad hook": lambda parameter: parameter.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("place", ["model", "optimizer"])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_hook_that_was_registered_after_the_runner_is_refused_and_nothing_has_moved(steps_before, place, kind):
    """In each step until it is removed, also on a parameter that only the optimizer holds."""
    model, step, optimizer, parameter = make_scaled_training(place)
    plan = autobatch.fit(model, 12, batch=make_batch(), step=step, optimizer=optimizer, max_micro_batch=4)
    runner = autobatch.Runner(plan, model, step, optimizer)
    for _ in range(steps_before):
        runner.step(make_batch())
    before, handle = [p.detach().clone() for p in model.parameters()], REGISTER[kind](parameter)
    for run in (runner.step, runner.accumulate):
        with pytest.raises(InvalidArgument, match=f"has {kind}"):
            run(make_batch())
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    assert runner.step(make_batch()).micro_batch_sizes == (4, 4, 4)


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_on_a_parameter_that_only_the_optimizer_holds_is_refused_from_the_start(kind):
    """By ``fit`` as by the Runner: its gradient is made of parts as well."""
    model, step, optimizer, parameter = make_scaled_training("optimizer")
    REGISTER[kind](parameter)
    with pytest.raises(InvalidArgument, match=rf"the optimizer's parameter of shape \(1,\) has {kind}"):
        autobatch.fit(model, 12, batch=make_batch(), step=step, optimizer=optimizer, max_micro_batch=4)


def test_a_hook_on_a_frozen_parameter_is_refused_once_it_is_trained():
    """No gradient reaches it before."""
    model, step, optimizer, parameter = make_scaled_training("model")
    REGISTER["a gradient hook"](parameter)
    parameter.requires_grad_(False)
    plan = autobatch.fit(model, 12, batch=make_batch(), step=step, optimizer=optimizer, max_micro_batch=4, check=None)
    runner = autobatch.Runner(plan, model, step, optimizer)
    runner.step(make_batch())
    parameter.requires_grad_(True)
    with pytest.raises(InvalidArgument, match="has a gradient hook"):
        runner.step(make_batch())
