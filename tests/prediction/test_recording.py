"""``prediction.tracing.recording``: every storage on the fake device, from its first tensor to its last."""

from __future__ import annotations

import gc

import pytest
import torch

from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.fake_device import DEVICE, present
from autobatch.prediction.tracing.recording import FakeMode, Recorder, make_fake

pytestmark = [pytest.mark.apart, pytest.mark.predicts]

KIB = 1024


def _record(run):
    """What was allocated and freed, in bytes: positive and negative."""
    with present(), FakeMode() as mode, Recorder(mode, lambda: "here") as recorder:
        run()
        gc.collect()
        traced = recorder.log.finish(2)
    return [traced.sizes[abs(event) - 1] * (1 if event > 0 else -1) for event in traced.order], traced


def _empty(kib):
    return torch.empty(kib * KIB // 4, device=DEVICE)


def _alias():
    tensor = _empty(1)
    views = [tensor.view(16, 16), tensor[3:], tensor.detach()]
    del tensor
    other = _empty(2)
    del other
    views.clear()


def _resize():
    tensor = _empty(1)
    tensor.resize_(KIB)


def _write():
    tensor = _empty(1)
    tensor.add_(1).mul_(tensor).zero_()
    tensor[3:].fill_(2)


def _host():
    torch.empty(KIB).add(1).exp_()


def _inside():
    torch.empty(2, 128, device=DEVICE).softmax(-1)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (_alias, [1, 2, -2, -1]),
        (_resize, [1, -1, 4, -4]),
        (_write, [1, -1]),
        (_host, []),
        (_inside, [1, 1, -1, -1]),
    ],
    ids=["a view keeps the storage", "a resize is another block", "writing is none", "nor is the host", "a result is"],
)
def test_blocks_come_and_go_with_their_storage(run, expected):
    """One event where the first tensor of a storage is made, one where the last is gone."""
    events, _ = _record(run)
    assert sorted(events) == sorted(size * KIB for size in expected)
    assert [abs(event) for event in events if event > 0] == [size * KIB for size in expected if size > 0]


def test_blocks_say_when_and_where_they_were_made():
    """Phase and submodule; what is alive after the forward pass is an activation."""

    def run():
        with recorder.forward():
            held.append(_empty(1))
            _empty(2)
        held.append(_empty(3))

    held = []
    with present(), FakeMode() as mode, Recorder(mode, lambda: "here") as recorder:
        run()
        traced = recorder.log.finish(2)
    labels = [(block.phase, block.kind, block.module) for block in traced.blocks]
    assert labels == [
        ("forward", "activation", "here"), ("forward", "temporary", "here"), ("backward", "temporary", "here"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 4).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
    ],
    ids=["sparse", "nested", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_other_layouts_are_refused(make):
    """Their memory is not that of one block."""
    tensor = make()
    with present(), FakeMode(), pytest.raises(InvalidArgument, match=r"cannot be traced: dense ones can"):
        make_fake(tensor)


def test_constants_that_the_step_closes_over_have_their_values():
    """They are real tensors on the host."""
    constant = torch.tensor(3.0)
    with present(), FakeMode() as mode, Recorder(mode, lambda: ""):
        assert constant.item() == 3.0
