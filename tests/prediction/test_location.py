"""``prediction.tracing.location``: the submodule that runs, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.prediction.tracing.location import Location


class Watched(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.inner, self.note = nn.Linear(4, 4), note

    def forward(self, inputs):
        self.note()
        hidden = self.inner(inputs)
        self.note()
        hidden.register_hook(lambda _: self.note())
        return hidden.tanh()


def test_the_innermost_module_is_named_and_then_the_one_around_it():
    """On the way in, between its children, and outside of all."""
    seen = []
    model = nn.Sequential(Watched(lambda: seen.append(location.name())), nn.ReLU())
    location = Location(model)
    with location.follow():
        seen.append(location.name())
        model(torch.ones(2, 4))
        seen.append(location.name())
    assert seen == ["", "0", "0", ""]


def test_a_node_belongs_to_the_module_that_made_it():
    """While autograd runs, whose backward pass it is; outside of it nobody's."""
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(location.name())
            return gradient

    class Notes(nn.Module):
        def forward(self, inputs):
            return Noting.apply(inputs)

    model = nn.Sequential(nn.Linear(4, 4), Notes(), nn.Sequential(nn.Tanh(), Notes()))
    location = Location(model)
    with location.follow():
        Noting.apply(model(torch.ones(2, 4))).sum().backward()
    assert seen == ["", "2.1", "1"]
    assert location.name() == ""


def test_an_error_in_a_forward_pass_leaves_no_module_behind():
    """Also where the user catches it."""

    class Fails(nn.Module):
        def forward(self, inputs):
            raise ValueError("mine")

    model = nn.Sequential(Fails())
    location = Location(model)
    with location.follow():
        with pytest.raises(ValueError, match="mine"):
            model(torch.ones(1))
        assert location.name() == ""


def test_hooks_are_gone_afterwards():
    """Other models' forward passes are nobody's business then."""
    before = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with Location(nn.Linear(1, 1)).follow():
        assert len(torch.nn.modules.module._global_forward_pre_hooks) == len(before) + 1
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == before


def test_a_module_of_another_model_counts_as_the_one_that_calls_it():
    """A loss with weights of its own has no name in the model."""
    seen = []
    stranger = Watched(lambda: seen.append(location.name()))

    class Model(nn.Module):
        def forward(self, inputs):
            return stranger(inputs)

    model = nn.Sequential(Model())
    location = Location(model)
    with location.follow():
        model(torch.ones(2, 4))
    assert seen == ["0", "0"]
