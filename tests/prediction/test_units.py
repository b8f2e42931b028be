"""``prediction.tracing.ranks``: which modules of a model would be sharded apart."""

from __future__ import annotations

import pytest
from nets import GPT, ConvNet
from torch import nn

from autobatch.prediction.tracing.ranks import find_units


def name_units(model):
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in find_units(model)]


def make_pair():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: GPT(layers=3), ["blocks.0", "blocks.1", "blocks.2"]),
        (ConvNet, ["body.0", "body.1", "body.2"]),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []),  # single layers
        (lambda: nn.Sequential(make_pair(), make_pair(), nn.Linear(3, 1)), ["0", "1"]),
        (lambda: nn.ModuleDict({"a": make_pair(), "b": make_pair()}), ["a", "b"]),
        (lambda: nn.ModuleDict({"only": GPT()}), ["only.blocks.0", "only.blocks.1"]),
        (lambda: nn.ModuleList([GPT(), GPT()]), ["0", "1"]),  # nothing inside a unit is another one
        (lambda: nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]), []),  # no parameters
        (lambda: nn.Linear(3, 3), []),
    ],
)
def test_units_are_blocks_that_repeat(make, names):
    """The outermost ones of a class that a container has more than one of."""
    assert name_units(make()) == names
