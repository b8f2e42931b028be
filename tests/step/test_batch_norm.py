"""Layers whose output for one sample depends on the others: found where, and only where, they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.step.model_info import batch_norms_in_train_mode, warn_of_batch_norms


def couples(layer):
    """Whether a sample's output changes with what stands beside it."""
    inputs = torch.linspace(-1, 1, 48).view(4, 4, 3)
    alone = layer(inputs)[:2]
    inputs[2:] *= 5
    return not torch.allclose(alone, layer(inputs)[:2])


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.BatchNorm1d(4, affine=False, momentum=None),
        lambda: nn.InstanceNorm1d(4),
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.LayerNorm(3),
        lambda: nn.Linear(3, 3),
    ],
)
def test_a_layer_is_named_exactly_if_it_couples_samples(make, is_training):
    """Asked of the layer itself: BatchNorm in train mode, and without running statistics always."""
    layer = make().train(is_training)
    assert bool(batch_norms_in_train_mode(layer)) == couples(layer)


def test_layers_are_named_as_the_model_names_them():
    """Those inside, in order; a model that is one layer has its type's name."""
    inner = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.SyncBatchNorm(2))
    model = nn.ModuleDict({"stem": nn.BatchNorm3d(2), "body": inner, "frozen": nn.BatchNorm1d(2).eval()})
    assert batch_norms_in_train_mode(model) == ["stem", "body.0", "body.2"]
    assert batch_norms_in_train_mode(nn.BatchNorm1d(2)) == ["BatchNorm1d"]


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["a"], "(a)"), (["a", "b", "c"], "(a, b, c)"), (["a", "b", "c", "d", "e"], "(a, b, c and 2 more)")],
)
def test_the_warning_names_layers_and_sizes(names, shown):
    """A few names, the micro-batch, the whole, and what would be exact."""
    text = warn_of_batch_norms(names, 43, 256)
    assert f"BatchNorm in train mode {shown}" in text
    assert "each micro-batch of 43 by itself, not the 256 together" in text
    assert "GroupNorm, or BatchNorm in eval mode, is exact" in text
