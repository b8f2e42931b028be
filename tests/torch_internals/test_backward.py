"""A backward pass that begins in the engine is torch's own, bit for bit, and is left to whoever replaced that."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from workloads import make_batch, mean_step

import autobatch
from autobatch.torch_internals import backward as internals
from autobatch.torch_internals.backward import choose_backward


class Ends(torch.Tensor):
    """A tensor whose subclass hears of each function."""

    heard: list = []  # noqa: RUF012 - of the class, as torch asks the class

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Note it."""
        cls.heard.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def with_hooks(weight):
    """Of a tensor on the way and of the loss."""
    middle = weight.exp()
    middle.register_hook(lambda gradient: 2 * gradient)
    loss = middle.sum()
    loss.register_hook(lambda gradient: gradient + 1)
    return loss


def with_a_checkpoint(weight, *, reentrant):
    """Run again in the backward pass."""
    return checkpoint(lambda given: given.sin(), weight, use_reentrant=reentrant).square().mean()


LOSSES = {
    "a mean": lambda weight: (weight * 3).tanh().mean(),
    "a mean in float64": lambda weight: weight.double().sin().mean(),
    "hooks": with_hooks,
    "a checkpoint": lambda weight: with_a_checkpoint(weight, reentrant=False),
    "a re-entrant checkpoint": lambda weight: with_a_checkpoint(weight, reentrant=True),
    "a gradient inside": lambda weight: (
        torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)[0].square().mean()
    ),
    "a view of a number": lambda weight: weight.select(0, 1),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3])
def test_gradients_are_those_of_torchs_own_function(name, factor):
    """For each kind of loss, what it adds to .grad is the same in every bit, and so in a second pass."""
    weights = [torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2)]
    for run, weight in zip((torch.Tensor.backward, choose_backward()), weights, strict=True):
        for _ in range(2):
            loss = LOSSES[name](weight)
            run(loss, torch.full_like(loss, factor))
    assert choose_backward() is not torch.Tensor.backward
    assert torch.equal(*(weight.grad for weight in weights))


@pytest.mark.quick
def test_the_parameter_itself_can_be_the_loss():
    """Its gradient is a tensor of its own, not the one that the pass began with."""
    weight, begins = torch.tensor(2.0, requires_grad=True), torch.tensor(0.5)
    for _ in range(2):
        choose_backward()(weight, begins)
    assert weight.grad is not begins
    assert (weight.grad.item(), begins.item()) == (1.0, 0.5)


def test_the_graph_is_gone_afterwards_and_the_gradient_has_none():
    """As after ``loss.backward()``: activations do not stay, and a second pass is refused."""
    weight = torch.ones(3, requires_grad=True)
    loss = weight.exp().sum()
    choose_backward()(loss, torch.tensor(1.0))
    assert not weight.grad.requires_grad
    with pytest.raises(RuntimeError, match="a second time"):
        choose_backward()(loss, torch.tensor(1.0))


@pytest.mark.parametrize("owner", [torch.Tensor, torch.autograd])
def test_a_function_that_somebody_put_in_its_place_is_called(owner, monkeypatch):
    """A tool that counts backward passes sees those of a Runner, one a micro-batch."""
    runner, own, calls = make_runner(), owner.backward, []
    monkeypatch.setattr(owner, "backward", lambda *args, **options: calls.append(True) or own(*args, **options))
    runner.step(make_batch(8))
    assert len(calls) == 2


def test_a_mode_that_hears_of_each_function_hears_of_it():
    """As without a Runner."""

    class Listens(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    runner, heard = make_runner(), []
    with Listens():
        runner.step(make_batch(8))
    assert heard.count(torch.Tensor.backward) == 2


def test_a_subclass_hears_of_it():
    """It may run a backward pass of its own."""
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum().as_subclass(Ends)
    Ends.heard.clear()
    choose_backward()(loss, torch.tensor(0.5))
    assert torch.Tensor.backward in Ends.heard
    assert weight.grad.tolist() == [0.5] * 3


def test_a_tool_in_front_of_the_engine_is_called(monkeypatch):
    """It is looked up where torch's own function looks it up."""
    runner, own, calls = make_runner(), graph._engine_run_backward, []
    monkeypatch.setattr(graph, "_engine_run_backward", lambda *args, **names: calls.append(args) or own(*args, **names))
    runner.step(make_batch(8))
    assert len(calls) == 2


def test_a_release_in_which_it_was_not_tried_runs_torchs_own_function(monkeypatch):
    """What is not public may be another there; the gradient is the same."""
    norms = []
    for is_tried in (True, False):
        monkeypatch.setattr(internals, "_IS_TRIED", is_tried)
        assert (choose_backward() is torch.Tensor.backward) is not is_tried
        runner = make_runner(max_grad_norm=1.0)
        norms.append(runner.step(make_batch(8)).gradient_norm)
    assert torch.equal(*norms)


def make_runner(**options):
    """Of two micro-batches a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), make_batch(8)
    plan = autobatch.fit(model, 8, batch=batch, step=mean_step, optimizer=optimizer, max_micro_batch=4)
    return autobatch.Runner(plan, model, mean_step, optimizer, **options)
