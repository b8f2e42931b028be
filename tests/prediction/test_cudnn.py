"""``prediction.tracing.cudnn``: recurrent layers allocate as one call does, and convolutions work on copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.batch.layout import describe
from autobatch.errors import CannotPredict
from autobatch.prediction.tracing.cudnn import Recurrence, reserve_bytes, workspace_bytes, workspaces_of
from autobatch.prediction.tracing.trace import trace, trace_timeline
from autobatch.step.workload import Workload

STEPS, WIDTH, HIDDEN = 5, 8, 16
_COUNTS = st.integers(1, 40)


def _step(model, batch):
    return model(batch if model.batch_first else batch.transpose(0, 1))[0].float().mean()


def _low_step(model, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return _step(model, batch)


def _layout():
    return describe(torch.zeros(2, STEPS, WIDTH))


def _workload(model, run=_step):
    return Workload(model, run, None, torch.optim.AdamW(model.parameters()))


def _sizes(traced, *, phase, kind):
    blocks = zip(traced.sizes, traced.blocks, strict=True)
    return [size for size, block in blocks if (block.phase, block.kind) == (phase, kind)]


@pytest.mark.predicts
@pytest.mark.apart
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({}, _step),
        ({"bias": False}, _low_step),
        ({"num_layers": 2, "dropout": 0.1, "bidirectional": True, "batch_first": True}, _step),
    ],
)
def test_recurrent_layers_are_traced_to_the_byte(kind, options, run):
    """Two traces determine any other size exactly; results and states have the shapes that they have on the CPU."""
    model = kind(WIDTH, HIDDEN, **options)
    shapes = []

    def shapes_of(module, batch):
        output, state = module(batch if module.batch_first else batch.transpose(0, 1))
        return [tuple(tensor.shape) for tensor in (output, *(state if isinstance(state, tuple) else (state,)))]

    def watched(module, batch):
        shapes.append(shapes_of(module, batch))
        return run(module, batch)

    timeline = trace_timeline(_workload(model, watched), _layout())
    assert not timeline.interpolated
    direct = trace(_workload(model, watched), _layout(), 9)
    assert (timeline.at(9).order, timeline.at(9).sizes) == (direct.order, direct.sizes)
    assert shapes[-1] == shapes_of(model, torch.zeros(9, STEPS, WIDTH))


@pytest.mark.predicts
@pytest.mark.apart
def test_an_lstm_saves_its_result_and_one_reserve_space():
    """After the forward pass: what it was given, the result, two states and what cuDNN keeps, and nothing a step."""
    traced = trace(Workload(nn.LSTM(WIDTH, HIDDEN), _step), _layout(), 7)
    activations = _sizes(traced, phase="forward", kind="activation")
    call = Recurrence("lstm", STEPS, 7, HIDDEN, HIDDEN, 1, 1, drops=False, dtype=torch.float32)
    assert activations.count(reserve_bytes(call)) == 4  # micro-batches
    assert reserve_bytes(call) == STEPS * 7 * HIDDEN * 5 * 4
    assert max(activations) == reserve_bytes(call)
    assert len(activations) < 4 * 10


@pytest.mark.predicts
@pytest.mark.apart
def test_gradients_of_all_weights_are_one_block():
    """CuDNN writes them into one buffer, and nothing copies them out of it."""
    model = nn.LSTM(WIDTH, HIDDEN, num_layers=2)
    traced = trace(Workload(model, _step), _layout(), 2)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert _sizes(traced, phase="backward", kind="gradient") == [total] * 2  # of the first micro-batch of two steps
    assert _sizes(traced, phase="backward", kind="temporary").count(total) == 2  # of the second one


@pytest.mark.predicts
@pytest.mark.apart
def test_autocast_keeps_all_weights_once_more_in_half():
    """In one buffer, which is saved for the backward pass."""
    model = nn.GRU(WIDTH, HIDDEN)
    total = sum(parameter.numel() for parameter in model.parameters())
    low, plain = (trace(Workload(model, run), _layout(), 3) for run in (_low_step, _step))
    assert _sizes(low, phase="forward", kind="activation").count(2 * total) == 4
    assert _sizes(plain, phase="forward", kind="activation").count(2 * total) == 0


@pytest.mark.predicts
@pytest.mark.apart
def test_a_projection_makes_results_narrower():
    """Not the cells: those stay as wide as the layer."""
    model = nn.LSTM(WIDTH, HIDDEN, proj_size=4)
    traced = trace(Workload(model, _step), _layout(), 7)
    call = Recurrence("lstm", STEPS, 7, HIDDEN, 4, 1, 1, drops=False, dtype=torch.float32)
    assert reserve_bytes(call) in traced.sizes
    assert STEPS * 7 * 4 * 4 in traced.sizes


@pytest.mark.predicts
@pytest.mark.apart
def test_a_layer_in_eval_mode_has_no_backward_pass():
    """As on a card, where torch raises."""

    def run(model, batch):
        model.eval()
        return _step(model, batch)

    with pytest.raises(CannotPredict, match="would raise on a card: cudnn RNN backward can only be called in training"):
        trace(Workload(nn.LSTM(WIDTH, HIDDEN), run), _layout(), 2)


@pytest.mark.predicts
@pytest.mark.apart
@pytest.mark.parametrize(("cell", "saved"), [(nn.GRUCell, 5), (nn.LSTMCell, 4)], ids=["GRU", "LSTM"])
def test_a_single_cell_is_one_kernel(cell, saved):
    """It keeps its gates in one block."""

    def run(model, batch):
        hidden = model(batch)
        return (hidden[0] if isinstance(hidden, tuple) else hidden).mean()

    traced = trace(Workload(cell(WIDTH, HIDDEN), run), describe(torch.zeros(2, WIDTH)), 11)
    assert _sizes(traced, phase="forward", kind="activation").count(11 * saved * HIDDEN * 4) >= 4


@given(
    cell=st.sampled_from(["lstm", "gru", "rnn"]),
    counts=st.tuples(*[_COUNTS] * 5),
    directions=st.integers(1, 2),
    drops=st.booleans(),
)
def test_both_spaces_grow_with_each_size(cell, counts, directions, drops):
    """Affine in the samples and the steps, never less with more of anything."""
    steps, samples, hidden, results, layers = counts
    call = Recurrence(cell, steps, samples, hidden, results, layers, directions, drops=drops, dtype=torch.float32)
    for rule in (reserve_bytes, workspace_bytes):
        assert rule(replace(call, samples=2 * samples)) == 2 * rule(call)
        assert rule(replace(call, steps=3 * steps)) == 3 * rule(call)
        assert rule(replace(call, hidden=hidden + 1)) > rule(call)
        assert rule(replace(call, layers=layers + 1)) >= rule(call)
        assert rule(replace(call, dtype=torch.float16)) * 2 == rule(call)


class Workspaces(TorchDispatchMode):
    """Notes what each operator would take."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found[func.overloadpacket.__name__] = workspaces_of(func, args, result)
        return result


def _run(inputs, weight, **options):
    with Workspaces() as operators:
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
    with Workspaces() as operators:
        F.conv2d(torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3, requires_grad=True)).sum().backward()
    assert len(operators.found["convolution_backward"]) == 1


def test_other_operators_take_nothing():
    """As far as is known."""
    with Workspaces() as operators:
        (torch.zeros(4, 4) @ torch.zeros(4, 4)).softmax(-1)
    assert set(map(tuple, operators.found.values())) == {()}
