"""Recurrent layers allocate as one call of cuDNN does."""

from __future__ import annotations

import pytest
import torch
from sampling import sample
from torch import nn

from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.recurrent import Recurrence, reserve_bytes
from autobatch.prediction.tracing.trace import trace, trace_timeline
from autobatch.step.workload import Workload

STEPS, WIDTH, HIDDEN = 5, 8, 16


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
@pytest.mark.parametrize("kind", sample([nn.LSTM, nn.GRU, nn.RNN], 2), ids=lambda kind: kind.__name__)
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

    with pytest.raises(
        InvalidArgument, match="would raise on a card: cudnn RNN backward can only be called in training"
    ):
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
