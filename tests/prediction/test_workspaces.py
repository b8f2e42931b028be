"""``prediction.tracing.workspaces``: which convolutions work on copies, and how large these are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.prediction.tracing.workspaces import workspaces_of


class Operators(TorchDispatchMode):
    """Notes what each operator would take."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found[func.overloadpacket.__name__] = workspaces_of(func, args, result)
        return result


def _run(inputs, weight, **options):
    with Operators() as operators:
        F.conv2d(inputs.requires_grad_(), weight.requires_grad_(), **options).sum().backward()
    return operators.found


def _convolve(size=3, *, groups=1, memory_format=torch.contiguous_format, dtype=torch.float32):
    inputs = torch.zeros(2, 4, 8, 8, dtype=dtype).to(memory_format=memory_format)
    return _run(inputs, torch.zeros(8, 4 // groups, size, size, dtype=dtype), groups=groups, padding=size // 2)


def test_a_wide_kernel_copies_its_input_and_its_output():
    """Once forward; backward once for the input's gradient and once for the weight's."""
    copies = 4 * (2 * 4 * 8 * 8 + 2 * 8 * 8 * 8)
    found = _convolve()
    assert found["convolution"] == [copies]
    assert found["convolution_backward"] == [copies, copies]
    assert _convolve(dtype=torch.float64)["convolution"] == [2 * copies]


@pytest.mark.parametrize(
    "options", [{"size": 1}, {"groups": 2}, {"memory_format": torch.channels_last}], ids=["1 x 1", "grouped", "last"]
)
def test_other_convolutions_copy_nothing(options):
    """A product of matrices, a kernel of its own, and the layout that is wanted."""
    found = _convolve(**options)
    assert found["convolution"] == found["convolution_backward"] == []


def test_an_input_that_needs_no_gradient_saves_one():
    """The first layer's backward pass is of the weight alone."""
    with Operators() as operators:
        F.conv2d(torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3, requires_grad=True)).sum().backward()
    assert len(operators.found["convolution_backward"]) == 1


def test_other_operators_take_nothing():
    """As far as is known."""
    with Operators() as operators:
        (torch.zeros(4, 4) @ torch.zeros(4, 4)).softmax(-1)
    assert set(map(tuple, operators.found.values())) == {()}
