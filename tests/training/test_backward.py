"""Backward passes are those of a loop by hand: tools, modes, subclasses and scalers on the way get what they expect."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from workloads import make_batch, mean_step

import autobatch


class Own(torch.Tensor):
    """A loss with a backward pass of its own."""

    calls = 0

    def backward(self):
        """Without torch's arguments."""
        Own.calls += 1
        self.as_subclass(torch.Tensor).backward()


def keep_loss(own, seen):
    """A tool with torch's own signature that passes on what it wants to."""

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        seen.append((self.item(), gradient))
        return own(self, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)

    return backward


def keep_engine(own, seen):
    """A tool in front of the engine."""

    def run(outputs, gradients, *arguments, **options):
        seen.append((outputs[0].item(), None))
        return own(outputs, gradients, *arguments, **options)

    return run


def keep_several(own, seen):
    """A tool in front of the function for several losses."""

    def backward(tensors, *arguments, **options):
        seen.append((tensors.item(), arguments[0]))
        return own(tensors, *arguments, **options)

    return backward


PLACES = {
    "Tensor.backward": (torch.Tensor, "backward", keep_loss),
    "autograd.backward": (torch.autograd, "backward", keep_several),
    "the engine, where backward looks for it": (torch.autograd, "_engine_run_backward", keep_engine),
    "the engine": (graph, "_engine_run_backward", keep_engine),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tool_on_the_way_gets_what_it_got_from_a_loop(place, monkeypatch):
    """Wherever it stands: the divided losses, no gradient to begin with, and the gradients stay what they are."""
    expected = make_runner()
    result = expected.accumulate(make_batch(8))
    runner, seen = make_runner(), []
    owner, name, make = PLACES[place]
    monkeypatch.setattr(owner, name, make(getattr(owner, name), seen))
    runner.accumulate(make_batch(8))
    if place != "the engine":  # torch's own function does not ask there
        assert [gradient for _, gradient in seen] == [None, None]
        assert sum(loss for loss, _ in seen) == pytest.approx(result.loss.item())
    assert all(map(torch.equal, gradients_of(runner), gradients_of(expected)))


@pytest.mark.slow
def test_a_tool_that_was_there_before_the_import_is_called():
    """Some ask to be imported first."""
    program = """
import torch
own, calls = torch.Tensor.backward, []
torch.Tensor.backward = lambda self: calls.append(self) or own(self)
import autobatch
model = torch.nn.Linear(6, 4)
batch = torch.randn(8, 6)
plan = autobatch.fit(model, 8, batch=batch, max_micro_batch=4, check=None)
calls.clear()
autobatch.Runner(plan, model, lambda model, part: model(part).square().mean(), None).accumulate(batch)
print(len(calls))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.split()[-1] == "2"


def test_a_function_mode_intercepts_it():
    """As without a Runner."""

    class Listens(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    runner, heard = make_runner(), []
    with Listens():
        runner.step(make_batch(8))
    assert heard.count(torch.Tensor.backward) == 2


def test_a_transform_of_functorch_is_refused_as_by_torch():
    """Inside it no gradient would arrive, and nothing would say so."""
    factors = [torch.tensor(1.0)]
    runner = make_runner(lambda model, part: mean_step(model, part) * factors[-1])
    for _ in range(2):  # in which what it writes is recorded
        runner.step(make_batch(8))

    def train(factor):
        factors.append(factor)
        return runner.step(make_batch(8)).loss

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(train)(torch.tensor(1.0))


def test_a_subclass_with_a_backward_of_its_own_is_asked():
    """It need not take torch's arguments."""
    Own.calls = 0
    plain, own = make_runner(), make_runner(lambda model, part: mean_step(model, part).as_subclass(Own))
    for runner in (plain, own):
        runner.accumulate(make_batch(8))
    assert Own.calls == 2
    assert all(map(torch.equal, gradients_of(own), gradients_of(plain)))


class Wide(torch.amp.GradScaler):
    """A scaler that returns three numbers for a loss."""

    def scale(self, outputs):
        """Wrong."""
        return super().scale(outputs).expand(3)


def test_a_scaler_that_returns_no_single_number_is_refused_by_torch():
    """As in a loop by hand: the sum of the numbers is not trained on."""
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        make_runner(scaler=Wide("cpu")).step(make_batch(8))


def make_runner(step=mean_step, **options):
    """Of two micro-batches a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), make_batch(8)
    plan = autobatch.fit(model, 8, batch=batch, step=mean_step, optimizer=optimizer, max_micro_batch=4)
    return autobatch.Runner(plan, model, step, optimizer, **options)


def gradients_of(runner):
    """Of the Runner's model."""
    return [parameter.grad for parameter in runner._workload.model.parameters()]
