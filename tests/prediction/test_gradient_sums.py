"""``prediction.tracing.recording``: which sums of gradients are made in place, and what if that cannot be known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.batch.samples import describe
from autobatch.prediction.tracing import recording
from autobatch.prediction.tracing.fake_device import present
from autobatch.prediction.tracing.recording import FakeMode, sole_holder
from autobatch.prediction.tracing.trace import trace
from autobatch.step.workload import Workload

SIZE = 50 * 64 * 4


def _backward_blocks(run):
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
    traced = trace(Workload(model, run), describe(torch.zeros(2, 64)), 50)
    return [s for s, block in zip(traced.sizes, traced.blocks, strict=True) if block.phase == "backward"].count(SIZE)


def _meet(model, batch):
    hidden = model[0](batch)
    return (model[1](hidden) + model[2](hidden)).mean()


def _meet_while_held(model, batch):
    held = []
    hidden = model[0](batch)
    first, second = model[1](hidden), model[2](hidden)
    for branch in (first, second):
        branch.grad_fn.register_hook(lambda given, _: held.append(given))
    return (first + second).mean()


@pytest.mark.predicts
@pytest.mark.apart
def test_a_gradient_that_somebody_holds_is_not_added_to():
    """A hook of the user's that keeps it makes torch allocate the sum: one block more in each micro-batch."""
    assert _backward_blocks(_meet_while_held) == _backward_blocks(_meet) + 4


@pytest.mark.predicts
@pytest.mark.apart
def test_this_torch_tells_who_holds_a_gradient():
    """Else every prediction here would count copies that a card does not have."""
    with present(), FakeMode():
        assert sole_holder() is not None


@pytest.mark.predicts
@pytest.mark.apart
@pytest.mark.parametrize(
    "counts",
    [lambda _: (4, 2, 4), lambda _: None, lambda _: torch.no_such_function],
    ids=["always the same", "none", "an error"],
)
def test_where_holders_cannot_be_told_more_is_predicted(counts, monkeypatch):
    """On a torch that counts otherwise each sum is a copy: too much is said, and never too little."""
    expected = _backward_blocks(_meet)
    sole_holder.cache_clear()
    monkeypatch.setattr(recording, "holders_of", counts)
    assert _backward_blocks(_meet) == expected + 4
