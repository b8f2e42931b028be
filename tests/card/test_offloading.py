"""Offload on the stand-in card, whose memory is counted apart from the host's. Times mean nothing there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.memory.oom import is_oom
from autobatch.strategies import offloading
from autobatch.strategies.offloading import HostCopies, HostRoom

pytestmark = pytest.mark.card
LAYERS, WIDTH, LENGTH = 6, 64, 4096


class Block(nn.Module):
    """A block whose wide activations cannot be recomputed, or can."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.wide, self.narrow = kind, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "BatchNorm" else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = self.wide(hidden)
        if self.kind == "NumPy":
            changed = changed * (0.5 + np.random.random())
        changed = self.narrow(F.gelu(changed).sigmoid())
        return hidden + self.norm(changed.transpose(1, 2)).transpose(1, 2)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block(kind) for _ in range(LAYERS))), nn.Linear(WIDTH, 10)).cuda()


def make_batch(count: int = 4) -> torch.Tensor:
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)).cuda()


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).logsumexp(-1).square().mean()


def fit(model: nn.Module, **options) -> autobatch.Plan:
    options = {"budget": "8GiB", "batch": make_batch(), **options}
    return autobatch.fit(model, 4, step=step, max_micro_batch=1, headroom=0, check=None, reuse=False, **options)


@pytest.mark.parametrize("kind", ["NumPy", "BatchNorm"])
def test_a_step_fits_by_offload_where_nothing_can_be_recomputed(kind):
    """Its peak is that of the plan, well below the plain one, and the gradient is the plain step's."""
    model = make_model(kind)
    plain = fit(model)
    budget = int(0.75 * plain.peak_bytes)
    with pytest.raises(autobatch.DoesNotFit):
        fit(model, budget=budget, strategies=["checkpoint", "selective"])
    plan = fit(model, budget=budget, strategies="auto")
    assert set(plan.checkpointing.ways.values()) == {"offload"}
    assert plan.recomputable == ()
    assert plan.peak_bytes <= budget
    assert 0.97 * plain.trials[-1].peak_allocated <= plan.checkpointing.plain_bytes <= 1.15 * plain.peak_bytes
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] < 2**20  # fit has given it back
    gradients = []
    for own in (plain, plan):
        model.zero_grad()
        torch.manual_seed(1)
        np.random.seed(1)
        result = autobatch.Runner(own, model, step, None).accumulate(make_batch())
        assert result.retries == 0
        assert result.peak_bytes <= own.peak_bytes
        gradients.append([one.grad.clone() for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_what_is_offloaded_is_not_on_the_card_between_the_passes():
    """Little more than the inputs of a block is left on the card after its forward pass."""
    block, room = Block("plain").cuda(), HostRoom.read()
    held = []
    for forward in (block.forward, offloading.offloading(block, block.forward, room)):
        before = torch.cuda.memory_allocated()
        outputs = forward(make_batch(1))
        held.append(torch.cuda.memory_allocated() - before - outputs.nbytes)
        outputs.sum().backward()
        del outputs
    plain, moved = held
    assert moved <= 2 * LENGTH * WIDTH * 4 < plain / 4


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(monkeypatch):
    """A system may limit how much a process pins; then copies wait for each other."""
    make = torch.empty

    def refuse(*args, pin_memory: bool = False, **options):
        if pin_memory:
            error = torch.AcceleratorError("CUDA error: out of memory")
            assert is_oom(error)
            raise error
        return make(*args, **options)

    tensor = torch.arange(10_000.0, device="cuda").requires_grad_()
    copies = HostCopies(HostRoom(2**30), ())
    monkeypatch.setattr(torch, "empty", refuse)
    packed = copies.pack(tensor.exp())
    monkeypatch.undo()
    assert not isinstance(packed[0], torch.Tensor)
    assert torch.equal(copies.unpack(packed), tensor.exp())


def test_pinned_memory_of_earlier_steps_counts_as_room():
    """Torch keeps it, and later copies take it again."""
    before = HostRoom.read().left
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    pinned.fill_(1)
    del pinned
    assert HostRoom.read().left >= before - 2**26
