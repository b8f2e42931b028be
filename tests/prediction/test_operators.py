"""``autobatch.prediction.tracing.operators``: remembered shapes are those that would be found anew."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, ConvNet, images, step, tokens
from sampling import sample
from torch import nn

from autobatch.batch.samples import describe
from autobatch.prediction.tracing.operators import Operators
from autobatch.prediction.tracing.trace import trace
from autobatch.step.workload import Workload

pytestmark = [pytest.mark.apart, pytest.mark.predicts]


def _low(model, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return step(model, batch)


@pytest.mark.parametrize(
    ("model", "run", "example"),
    sample(
        [
            (ConvNet(), step, images),
            (ConvNet().to(memory_format=torch.channels_last), _low, images),
            (GPT(), _low, tokens),
            (GPT(checkpointed=False).bfloat16(), step, tokens),
        ],
        3,
    ),
)
def test_a_trace_is_the_same_without_remembering(model, run, example, monkeypatch):
    """Order, bytes and blocks do not depend on the shortcut."""
    workload, layout = Workload(model, run, None, torch.optim.AdamW(model.parameters())), describe(example())
    remembered = trace(workload, layout, 3)
    _forget_everything(monkeypatch)
    assert trace(workload, layout, 3) == remembered


def _forget_everything(monkeypatch):
    monkeypatch.setattr(
        Operators, "run", lambda operators, func, args, kwargs: operators._lay_out(func, args, func(*args, **kwargs))
    )


def _norm(make, *sizes, dtype=torch.float32, last=False):
    """A normalization after a layer, whose input and output are both needed by the backward pass."""
    layout = torch.channels_last if last else torch.preserve_format
    return nn.Sequential(make().to(dtype)), torch.zeros(2, *sizes, dtype=dtype).to(memory_format=layout)


def _in_eval_mode(model, batch):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return (model(batch * 1.5) * 0.5).square().mean()


def _squares(model, batch):
    return (model(batch * 1.5) * 0.5).square().mean()


@pytest.mark.parametrize("run", [_squares, _in_eval_mode])
@pytest.mark.parametrize(
    ("model", "batch"),
    sample(
        [
            _norm(lambda: nn.BatchNorm1d(6), 6),
            _norm(lambda: nn.BatchNorm1d(6), 6, 5),
            _norm(lambda: nn.BatchNorm2d(6), 6, 5, 4),
            _norm(lambda: nn.BatchNorm2d(6), 6, 5, 4, last=True),
            _norm(lambda: nn.BatchNorm2d(6), 6, 5, 4, dtype=torch.float64),
            _norm(lambda: nn.BatchNorm2d(6), 6, 5, 4, dtype=torch.bfloat16, last=True),
            _norm(lambda: nn.BatchNorm3d(6), 6, 5, 4, 3),
            _norm(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)), 6),
            _norm(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)), 6),
            _norm(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).requires_grad_(False)), 6),
            _norm(lambda: nn.Sequential(nn.Conv2d(6, 6, 3), nn.InstanceNorm2d(6, affine=True)), 6, 5, 4),
            _norm(lambda: nn.Sequential(nn.Conv2d(6, 6, 3), nn.SiLU(inplace=True), nn.ReLU()), 6, 5, 4, last=True),
            _norm(lambda: nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.ReLU(), nn.Hardtanh()), 6, 5, 4),
            _norm(lambda: nn.Sequential(nn.ConvTranspose2d(6, 6, 3), nn.ReLU(inplace=True)), 6, 5, 4),
        ],
        4,
    ),
)
def test_operators_that_torch_writes_out_are_the_same_made_of_plain_tensors(model, batch, run, monkeypatch):
    """Batch norms in either mode, with and without what they learn or track, in each layout and dtype; activations."""
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters) if parameters else None
    workload, layout = Workload(model, run, None, optimizer), describe(batch)
    remembered = trace(workload, layout, 3)
    _forget_everything(monkeypatch)
    assert trace(workload, layout, 3) == remembered
