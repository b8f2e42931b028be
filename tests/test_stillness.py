"""A step held still: constant draws, no dropout, float32, and nothing left of it afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autobatch.exactness.stillness import still, widen

DRAWS = {
    "rand": lambda n: torch.rand(n, 3),
    "randn": lambda n: torch.randn(n, 3),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(2, 4),
    "normal": lambda n: torch.normal(torch.ones(n, 3), 0.5),
    "normal_": lambda n: torch.empty(n, 3).normal_(),
    "randint": lambda n: torch.randint(10, (n, 3)),
    "random_": lambda n: torch.empty(n, 3).random_(0, 8),
    "exponential_": lambda n: torch.empty(n, 3).exponential_(),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 3), 0.3)),
    "dropout": lambda n: F.dropout(torch.ones(n, 3), 0.8),
    "multinomial": lambda n: torch.multinomial(torch.tensor([[0.2, 0.5, 0.3]]).repeat(n, 1), 2),
    "gamma": lambda n: torch.distributions.Gamma(torch.full((n, 3), 2.0), 1.0).sample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_the_same_for_every_row_of_any_number(name):
    """No draw depends on how many samples are drawn for, nor on which of them."""
    with still(nn.Linear(1, 1), []):
        few, many = DRAWS[name](2), DRAWS[name](5)
    assert torch.equal(few[:1].expand_as(few), few)
    assert torch.equal(many[:1].expand_as(many), many)
    assert torch.equal(few[0], many[0])


def test_a_permutation_shows():
    """Samples that are shuffled among themselves are still shuffled."""
    with still(nn.Linear(1, 1), []):
        assert torch.randperm(4).tolist() == [3, 2, 1, 0]


def test_autocast_does_nothing_and_the_users_object_is_as_before():
    """An autocast of the user's is off while the step is held still, and on again afterwards."""
    model, autocast = nn.Linear(4, 4), torch.autocast("cpu", dtype=torch.bfloat16)
    with still(model, [*model.parameters()]), autocast:
        assert model(torch.ones(1, 4)).dtype == torch.float32
    with autocast:
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16


def test_half_precision_is_wide_inside_only():
    """Parameters, buffers and casts by hand are float32 inside, and what they were afterwards."""
    model = nn.BatchNorm1d(4).bfloat16()
    with still(model, [*model.parameters()]):
        assert model(torch.randn(3, 4).bfloat16()).dtype == torch.float32
    assert {tensor.dtype for tensor in (model.weight, model.running_mean)} == {torch.bfloat16}


def test_widen_copies_and_keeps_the_wish_for_a_gradient():
    """A widened tensor is another, in float32, which requires a gradient where the original does."""
    tensor = torch.ones(2, dtype=torch.float16, requires_grad=True)
    wide = widen(tensor)
    assert wide.dtype == torch.float32
    assert wide.requires_grad
    assert wide.is_leaf
