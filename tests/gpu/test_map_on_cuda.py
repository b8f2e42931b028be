"""``map`` on a real card: torch's allocator enforces the budget, and results may stay on the card."""

from __future__ import annotations

import gc

import pytest
import torch
from sampling import sample
from torch import nn

import autobatch
from autobatch.testing import oom_at

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
MIB = 2**20


@pytest.fixture(autouse=True)
def _empty_card():
    gc.collect()
    torch.cuda.empty_cache()


def make_net():
    """About 0.6 MiB of activations a sample."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 65536), nn.ReLU(), nn.Linear(65536, 8)).to(CUDA).eval()


@pytest.mark.parametrize("to", [None, "cpu"])
def test_a_batch_on_the_host_runs_in_pieces_on_the_card(to, caplog):
    """Nothing runs out, the budget is used and not passed, and results are those of the whole."""
    net, inputs, sizes = make_net(), torch.randn(1500, 256), []

    def score(piece):
        assert piece.device.type == "cuda"
        sizes.append(len(piece))
        return net(piece)

    result = autobatch.map(score, inputs, budget=400 * MIB, to=to)
    assert result.device.type == (to or "cuda")
    assert torch.cuda.max_memory_reserved() <= 400 * MIB
    assert sum(sizes) == 1500
    assert 100 < max(sizes) < 1500
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with torch.no_grad():
        expected = torch.cat([net(part.to(CUDA)) for part in inputs.split(100)])
    assert torch.allclose(result.to(CUDA), expected, atol=1e-4)


@pytest.mark.parametrize("holes", sample([0, 1, 2], 3))
def test_a_segment_taken_for_a_small_piece_does_not_hide_what_a_sample_takes(holes, caplog):
    """Twenty MiB are taken from the card for the first block of eight samples that finds no hole in those held."""
    net, inputs, sizes = make_net(), torch.randn(1500, 256), []
    with torch.no_grad():
        net(inputs[:1].to(CUDA))  # cuBLAS makes its workspace now
    fillers, before = [], torch.cuda.memory_reserved()
    while torch.cuda.memory_reserved() == before:
        fillers.append(torch.empty(8 * 65536, device=CUDA))
    del fillers[-1 - holes :]
    torch.cuda.empty_cache()

    def score(piece):
        sizes.append(len(piece))
        return net(piece)

    autobatch.map(score, inputs, budget=420 * MIB)
    assert sum(sizes) == 1500
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_samples_are_moved_as_they_are_needed():
    """A stream on the host gives results on the card."""
    net = make_net()
    results = list(autobatch.map(net, iter(torch.randn(300, 256)), budget=400 * MIB))
    assert len(results) == 300
    assert {result.device.type for result in results} == {"cuda"}


def test_a_shortage_on_the_card_costs_one_piece():
    """Planned at an operation of each piece; generators go on as before."""
    net, inputs = make_net(), torch.randn(64, 256)
    expected = autobatch.map(net, inputs)
    with oom_at(3, 9) as planned:
        result = autobatch.map(net, inputs)
    assert len(planned.raised) == 2
    assert torch.allclose(result, expected, atol=1e-4)
