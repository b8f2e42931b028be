"""Which calls of cuDNN a convolution of torch's is, read on tensors without memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.prediction.tracing.kernels import find_calls, find_layout

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def run(space=2, *, transposed=False, groups=1, kernel=3, stride=1, channels=32, size=16, last=False, **options):
    """The arguments and the result of a forward pass, and the arguments of a backward pass."""
    inputs = torch.empty(4, channels, *[size] * space, device="meta", **options)
    shape = (channels, 48 // groups) if transposed else (48 * (channels // 32), channels // groups)
    weight = torch.empty(*shape, *[kernel] * space, device="meta", **options)
    if last:
        inputs = inputs.to(memory_format=torch.channels_last if space == 2 else torch.channels_last_3d)
    rest = ([stride] * space, [kernel // 2] * space, [1] * space, transposed, [0] * space, groups)
    args = (inputs, weight, None, *rest)
    result = FORWARD(*args)
    return args, result, (torch.empty_like(result), inputs, weight, None, *rest, [True, True, False])


@given(
    space=st.integers(1, 3),
    transposed=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
)
def test_sizes_are_those_of_the_tensors(space, transposed, groups, kernel, stride):
    """A transposed convolution is the gradient of one whose input is its output."""
    args, result, backward = run(space, transposed=transposed, groups=groups, kernel=kernel, stride=stride, size=9)
    sides = [tuple(tensor.unsqueeze(2).shape if space == 1 else tensor.shape) for tensor in (args[0], result)]
    inputs, outputs = reversed(sides) if transposed else sides
    calls = [*find_calls(FORWARD, args, result), *find_calls(BACKWARD, backward, None)]
    kinds = ["forward", "input gradient", "weight gradient"]
    if transposed:
        kinds = ["input gradient", "forward", "weight gradient"]
    assert [call.convolution.kind for call in calls] == kinds
    for call in calls:
        assert call.convolution.inputs == inputs
        assert call.convolution.outputs == outputs
        assert call.convolution.groups == groups
        assert call.copied_bytes == ()


@pytest.mark.parametrize("last", [False, True])
def test_what_lies_otherwise_is_copied(last):
    """The gradient of a sum is one number, repeated; and a weight is rarely laid out as its input."""
    args, result, backward = run(last=last)
    repeated = torch.empty((), device="meta").expand(result.shape)
    calls = find_calls(BACKWARD, (repeated, *backward[1:]), None)
    weight, inputs, outputs = args[1].nbytes, args[0].nbytes, result.nbytes
    assert [call.copied_bytes for call in calls] == [(outputs, weight) if last else (outputs,), (outputs,)]
    assert find_calls(FORWARD, args, result)[0].copied_bytes == ((weight,) if last else ())
    assert inputs


def test_a_gradient_that_nobody_wants_is_no_call():
    """That of the first layer's input."""
    _, _, backward = run()
    calls = find_calls(BACKWARD, (*backward[:-1], [False, True, True]), None)
    assert [call.convolution.kind for call in calls] == ["weight gradient"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"last": True}, torch.channels_last),
        ({"last": True, "space": 3}, torch.channels_last_3d),
        ({"last": True, "dtype": torch.float64}, None),
    ],
)
def test_results_lie_as_the_input_does(options, expected):
    """But not in float64, for which cuDNN has no such kernels."""
    args, _, backward = run(**options)
    assert find_layout(FORWARD, args) is expected
    assert find_layout(BACKWARD, backward) is expected
    assert find_layout(torch.ops.aten.relu.default, args) is None


DEPTHWISE = [
    ({}, False),
    ({"last": True}, True),
    ({"dtype": torch.bfloat16}, False),
    ({"dtype": torch.float16, "kernel": 7}, False),
    ({"dtype": torch.float16, "stride": 2}, False),
    ({"dtype": torch.float16, "size": 6}, False),
]


@pytest.mark.parametrize(("options", "expected"), DEPTHWISE)
def test_torch_has_kernels_of_its_own_for_depthwise_convolutions(options, expected):
    """With channels first; the same table holds on a card (``tests/gpu``)."""
    channels = options.get("channels", 32)
    inputs = torch.empty(4, channels, *[options.get("size", 16)] * 2, device="meta", dtype=options.get("dtype"))
    if options.get("last"):
        inputs = inputs.to(memory_format=torch.channels_last)
    kernel = options.get("kernel", 3)
    weight = torch.empty(channels, 1, kernel, kernel, device="meta", dtype=options.get("dtype"))
    args = (inputs, weight, None, [options.get("stride", 1)] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], channels)
    assert bool(find_calls(FORWARD, args, FORWARD(*args))) is expected


def test_without_cudnn_torch_runs_none_in_it(monkeypatch):
    """As the user's switch says."""
    args, result, _ = run()
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert find_calls(FORWARD, args, result) == []
