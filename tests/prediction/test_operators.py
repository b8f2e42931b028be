"""``autobatch.prediction.tracing.operators``: remembered shapes are those that would be found anew."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, ConvNet, images, step, tokens

from autobatch.batch.layout import describe
from autobatch.prediction.tracing.operators import Operators
from autobatch.prediction.tracing.trace import trace
from autobatch.step.workload import Workload

pytestmark = [pytest.mark.apart, pytest.mark.predicts]


def _low(model, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return step(model, batch)


@pytest.mark.parametrize(
    ("model", "run", "example"),
    [
        (ConvNet(), step, images),
        (ConvNet().to(memory_format=torch.channels_last), _low, images),
        (GPT(), _low, tokens),
        (GPT(checkpointed=False).bfloat16(), step, tokens),
    ],
)
def test_a_trace_is_the_same_without_remembering(model, run, example, monkeypatch):
    """Order, bytes and blocks do not depend on the shortcut."""
    workload, layout = Workload(model, run, None, torch.optim.AdamW(model.parameters())), describe(example())
    remembered = trace(workload, layout, 3)
    monkeypatch.setattr(
        Operators, "run", lambda operators, func, args, kwargs: operators._lay_out(func, args, func(*args, **kwargs))
    )
    assert trace(workload, layout, 3) == remembered
