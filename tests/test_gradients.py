"""What stands in ``.grad``: seen when it changes, set aside, put back and added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.workload.gradients import GradientsAside, GradientStamps


def make_parameters():
    """One with a gradient, one without, one frozen."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), False)]
    parameters[0].grad = torch.full((3,), 5.0)
    return parameters


def set_gradient(index, gradient):
    """A change: another tensor stands there."""

    def change(parameters):
        parameters[index].grad = gradient

    return change


def run_backward(parameters):
    """As a step does it: one gradient is written in place, the other made."""
    (parameters[0].sum() * 2 + parameters[1].sum()).backward()


CHANGES = {
    "in-place add": lambda parameters: parameters[0].grad.add_(1),
    "in-place by zero": lambda parameters: parameters[0].grad.mul_(1),
    "write to a view": lambda parameters: parameters[0].grad[1:].zero_(),
    "foreach": lambda parameters: torch._foreach_mul_([parameters[0].grad], 0.5),
    "backward": run_backward,
    "backward of the second only": lambda parameters: parameters[1].sum().backward(),
    "replaced by an equal one": set_gradient(0, torch.full((3,), 5.0)),
    "tensor to None": set_gradient(0, None),
    "None to tensor": set_gradient(1, torch.ones(2)),
    "None to sparse": set_gradient(1, torch.ones(2).to_sparse()),
    "set to zero": lambda parameters: torch.optim.SGD(parameters).zero_grad(set_to_none=False),
    "set to None": lambda parameters: torch.optim.SGD(parameters).zero_grad(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stamp_sees_every_change(name):
    """Written in place or replaced, made or dropped, of whatever value."""
    parameters = make_parameters()
    stamps = GradientStamps(parameters)
    assert stamps.unchanged()
    CHANGES[name](parameters)
    assert not stamps.unchanged()


@pytest.mark.parametrize(
    "action",
    [
        lambda parameters: (parameters[0].sum() * 2).detach(),
        lambda parameters: parameters[0].sum() + parameters[1].sum(),
        lambda parameters: torch.autograd.grad(parameters[0].sum(), parameters[0]),
        lambda parameters: parameters[0].grad.norm(),
        lambda parameters: parameters[0].grad.clone().add_(1),
        lambda parameters: parameters[0].data.add_(1),
    ],
)
def test_a_stamp_sees_no_change_where_there_is_none(action):
    """A forward pass, a look at a gradient, a gradient that goes elsewhere, a change of the parameter itself."""
    parameters = make_parameters()
    stamps = GradientStamps(parameters)
    action(parameters)
    assert stamps.unchanged()


def test_a_sparse_gradient_is_seen_to_change():
    """It is replaced or added to, as torch likes."""
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    stamps = GradientStamps([table.weight])
    assert stamps.unchanged()
    table(torch.tensor([2])).sum().backward()
    assert not stamps.unchanged()


def test_an_address_that_comes_back_is_not_taken_for_the_old_gradient():
    """The stamp holds the old tensor, so a new one cannot be mistaken for it."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    stamps = GradientStamps([parameter])
    for _ in range(50):
        parameter.grad = None
        parameter.grad = torch.ones(3)
        assert not stamps.unchanged()


def test_clearing_drops_all_gradients():
    """And what the stamps held themselves."""
    parameters = make_parameters()
    stamps = GradientStamps(parameters)
    run_backward(parameters)
    stamps.clear()
    assert [parameter.grad for parameter in parameters] == [None] * 3
    assert stamps._stamps == []


def test_gradients_are_set_aside_without_a_copy_and_put_back():
    """The step begins with none; afterwards the very same tensors stand there, untouched, and None is None."""
    parameters = make_parameters()
    gradient = parameters[0].grad
    version = gradient._version
    aside = GradientsAside(parameters)
    assert [parameter.grad for parameter in parameters] == [None] * 3
    run_backward(parameters)
    aside.put_back()
    assert parameters[0].grad is gradient
    assert gradient._version == version
    assert gradient.tolist() == [5, 5, 5]
    assert parameters[1].grad is None


def test_earlier_gradients_are_added_into_themselves():
    """As ``backward`` does it: the earlier tensor gets the sum, a new one stays where there was none."""
    parameters = make_parameters()
    gradient = parameters[0].grad
    aside = GradientsAside(parameters)
    run_backward(parameters)
    new = parameters[1].grad
    aside.add()
    assert parameters[0].grad is gradient
    assert gradient.tolist() == [7, 7, 7]
    assert parameters[1].grad is new
    assert parameters[2].grad is None


def test_an_earlier_gradient_without_a_new_one_stays():
    """A parameter that the step did not use."""
    parameters = make_parameters()
    gradient = parameters[0].grad
    aside = GradientsAside(parameters)
    parameters[1].sum().backward()
    aside.add()
    assert parameters[0].grad is gradient
    assert gradient.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("earlier", "new"), [(True, True), (False, True), (True, False)], ids=str)
def test_sparse_and_dense_gradients_add_up(earlier, new):
    """As in ``backward``: an earlier sparse gradient takes a dense one as its sum, whichever came first."""
    weight = nn.Parameter(torch.ones(4, 2))
    first, second = torch.eye(4)[:, :2].contiguous(), torch.full((4, 2), 3.0)
    expected = first + second
    weight.grad = first.to_sparse() if earlier else first
    aside = GradientsAside([weight])
    weight.grad = second.to_sparse() if new else second
    aside.add()
    assert torch.equal(weight.grad.to_dense() if weight.grad.is_sparse else weight.grad, expected)
