"""Causes are named for batches with any keys."""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

import autobatch


class Key(Enum):
    """Keys that are no literals: their text is no code."""

    FEATURES = 1
    MASK = 2


def test_a_count_under_a_key_that_is_no_literal_is_named():
    """The loss is a mean over what the mask counts."""

    def step(model, batch):
        losses = model(batch[Key.FEATURES]).squeeze(-1).square()
        return (losses * batch[Key.MASK]).sum() / batch[Key.MASK].sum()

    torch.manual_seed(0)
    batch = {Key.FEATURES: torch.randn(8, 4), Key.MASK: torch.tensor([1, 1, 1, 0, 0, 1, 1, 0])}
    verdict = autobatch.verify(nn.Linear(4, 1), batch, step)
    assert not verdict.exact
    assert "Key.MASK" in str(verdict)


def test_a_count_in_samples_with_such_keys_is_named():
    """Each sample has a tensor of its own length."""

    def step(model, batch):
        return torch.cat([model(item[Key.FEATURES]) for item in batch]).square().mean()

    torch.manual_seed(0)
    batch = [{Key.FEATURES: torch.randn(length, 4)} for length in (1, 2, 3, 4, 5, 2, 1, 3)]
    verdict = autobatch.verify(nn.Linear(4, 1), batch, step)
    assert not verdict.exact
    assert "Key.FEATURES" in str(verdict)
