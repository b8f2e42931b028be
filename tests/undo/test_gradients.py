"""What stands in ``.grad``: seen when it changes, set aside, put back and added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.errors import InvalidArgument
from autobatch.training.misuse import GradientWatch
from autobatch.undo.gradients import EarlierGradients, Float32Sums


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


def is_unchanged(watch):
    """Whether no gradient has changed."""
    try:
        watch.refuse_change()
    except InvalidArgument:
        return False
    return True


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
    stamps = GradientWatch(parameters, Float32Sums())
    assert is_unchanged(stamps)
    CHANGES[name](parameters)
    assert not is_unchanged(stamps)


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
    stamps = GradientWatch(parameters, Float32Sums())
    action(parameters)
    assert is_unchanged(stamps)


def test_a_sparse_gradient_is_seen_to_change():
    """It is replaced or added to, as torch likes."""
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    stamps = GradientWatch([table.weight], Float32Sums())
    assert is_unchanged(stamps)
    table(torch.tensor([2])).sum().backward()
    assert not is_unchanged(stamps)


def test_an_address_that_comes_back_is_not_taken_for_the_old_gradient():
    """The stamp holds the old tensor, so a new one cannot be mistaken for it."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    stamps = GradientWatch([parameter], Float32Sums())
    for _ in range(50):
        parameter.grad = None
        parameter.grad = torch.ones(3)
        assert not is_unchanged(stamps)


def test_gradients_are_set_aside_without_a_copy_and_put_back():
    """The step begins with none; afterwards the very same tensors stand there, untouched, and None is None."""
    parameters = make_parameters()
    gradient = parameters[0].grad
    version = gradient._version
    earlier = EarlierGradients(parameters)
    assert parameters[0].grad is gradient
    earlier.set_aside()
    assert [parameter.grad for parameter in parameters] == [None] * 3
    run_backward(parameters)
    earlier.restore()
    assert parameters[0].grad is gradient
    assert gradient._version == version
    assert gradient.tolist() == [5, 5, 5]
    assert parameters[1].grad is None


def test_earlier_gradients_are_added_and_stay_as_they_were_until_settled():
    """The sum can be undone; settled, it stands in the earlier tensor, as after ``backward``."""
    parameters = make_parameters()
    gradient = parameters[0].grad
    earlier = EarlierGradients(parameters)
    earlier.set_aside()
    run_backward(parameters)
    new = parameters[1].grad
    earlier.add()
    assert parameters[0].grad.tolist() == [7, 7, 7]
    assert gradient.tolist() == [5, 5, 5]
    earlier.settle()
    assert parameters[0].grad is gradient
    assert gradient.tolist() == [7, 7, 7]
    assert parameters[1].grad is new
    assert parameters[2].grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_summed_in_float32(dtype):
    """512 gradients of which each is lost in a narrow sum give their true sum, rounded once."""
    parameter, wide = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3))
    sums = Float32Sums()
    sums.begin([parameter, wide])
    for _ in range(512):
        (parameter.sum() + wide.sum()).backward()
        assert parameter.grad is None
    sums.multiply(0.5)
    sums.write()
    sums.end()
    assert parameter.grad.dtype is dtype
    assert parameter.grad.tolist() == [256] * 3
    assert wide.grad.tolist() == [512] * 3  # its own sum is wide enough and not this class's matter
    parameter.grad = None
    parameter.sum().backward()
    assert parameter.grad.tolist() == [1] * 3, "hooks stay behind"


def test_a_stamp_sees_a_gradient_that_went_into_a_float32_sum():
    """``.grad`` is None before and after, and yet a backward pass has touched it."""
    parameter, sums = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), Float32Sums()
    sums.begin([parameter])
    stamps = GradientWatch([parameter], sums)
    assert is_unchanged(stamps)
    parameter.sum().backward()
    assert not is_unchanged(stamps)
    sums.clear()
    sums.write()
    assert parameter.grad is None


def test_sparse_narrow_gradients_are_summed_too():
    """An embedding's sparse gradient in bfloat16 becomes one sparse gradient."""
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.bfloat16)
    sums = Float32Sums()
    sums.begin([table.weight])
    for _ in range(3):
        table(torch.tensor([1, 4])).sum().backward()
    sums.write()
    sums.end()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 3, 0, 0, 3]


def test_an_earlier_gradient_without_a_new_one_stays():
    """A parameter that the step did not use: a copy while the step can be undone, its own tensor after."""
    parameters = make_parameters()
    gradient = parameters[0].grad
    aside = EarlierGradients(parameters)
    aside.set_aside()
    parameters[1].sum().backward()
    aside.add()
    assert parameters[0].grad is not gradient
    assert parameters[0].grad.tolist() == [5, 5, 5]
    aside.settle()
    assert parameters[0].grad is gradient
    assert gradient.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("earlier", "new"), [(True, True), (False, True), (True, False)], ids=str)
def test_sparse_and_dense_gradients_add_up(earlier, new):
    """As in ``backward``: an earlier sparse gradient takes a dense one as its sum, whichever came first."""
    weight = nn.Parameter(torch.ones(4, 2))
    first, second = torch.eye(4)[:, :2].contiguous(), torch.full((4, 2), 3.0)
    expected = first + second
    weight.grad = first.to_sparse() if earlier else first
    aside = EarlierGradients([weight])
    aside.set_aside()
    weight.grad = second.to_sparse() if new else second
    aside.add()
    assert torch.equal(weight.grad.to_dense() if weight.grad.is_sparse else weight.grad, expected)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_parameter_that_states_its_gradients_dtype_gets_it(grad_dtype):
    """A bfloat16 weight with float32 gradients needs no sum beside them, and a sum is rounded to what is stated."""
    parameter, sums = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), Float32Sums()
    parameter.grad_dtype = grad_dtype
    sums.begin([parameter])
    for _ in range(512):
        parameter.sum().backward()
    sums.write()
    sums.end()
    assert parameter.grad.dtype is (grad_dtype or torch.bfloat16)
    assert parameter.grad.tolist() == [512] * 3
