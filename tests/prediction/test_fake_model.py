"""``prediction.tracing.fake_model``: fake tensors for a model and its optimizer, and the module that is running."""

from __future__ import annotations

from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.fake_model import Location, modules_of
from autobatch.prediction.tracing.trace import trace
from autobatch.step.workload import Workload


def _mean(model, batch):
    return model(batch).mean()


def _trace(model, run=_mean, optimizer=None, samples=3):
    return trace(Workload(model, run, None, optimizer), describe(torch.zeros(2, 16)), samples)


def _resident(traced, kind):
    return sorted(s for s, block in zip(traced.sizes, traced.blocks, strict=True) if block.kind == kind)


@pytest.mark.predicts
@pytest.mark.apart
def test_a_tensor_with_two_names_has_one_fake_tensor():
    """Tied weights, and a buffer that two modules share, are there once."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    shared = torch.ones(7)
    for layer in model:
        layer.register_buffer("shared", shared, persistent=False)
    traced = _trace(model)
    assert _resident(traced, "parameter") == [16 * 16 * 4]
    assert _resident(traced, "buffer") == [7 * 4]


@pytest.mark.predicts
@pytest.mark.apart
@pytest.mark.parametrize(
    ("buffer", "byte_count"),
    [
        (torch.ones(1).expand(1000), 4000),
        (torch.ones(10, 100)[:, :50], 2000),
        (torch.ones(10, 100).T, 4000),
        (torch.ones(1000, dtype=torch.bool), 1000),
        (torch.ones(()), 4),
    ],
    ids=["expanded", "sliced", "transposed", "bool", "one value"],
)
def test_a_buffer_takes_what_moving_it_to_the_card_makes(buffer, byte_count):
    """``.to("cuda")`` writes an expanded buffer out, and leaves the rest of a sliced one behind."""
    model = nn.Linear(16, 16)
    model.register_buffer("extra", buffer)
    assert _resident(_trace(model), "buffer") == [byte_count]


@pytest.mark.predicts
@pytest.mark.apart
@pytest.mark.parametrize(
    "make",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
    ids=lambda make: make.__name__,
)
def test_parametrized_weights_are_made_anew_in_each_step(make):
    """From the fake originals, which get the gradients."""
    model = make(nn.Linear(16, 16))
    traced = _trace(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trained = sorted(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert _resident(traced, "optimizer state") == trained


@pytest.mark.predicts
@pytest.mark.apart
def test_groups_of_parameters_keep_their_options():
    """Momentum where it is, none where it is not; a frozen parameter gets neither gradient nor state."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[2].weight.requires_grad_(False)
    groups = [
        {"params": model[0].parameters(), "momentum": 0.9},
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.5},
    ]
    traced = _trace(model, optimizer=torch.optim.SGD(groups, lr=0.1))
    assert _resident(traced, "optimizer state") == [16 * 16 * 4]
    assert _resident(traced, "gradient") == [16 * 8 * 4] * 2 + [16 * 16 * 4] * 2


class Marked(torch.Tensor):
    """A subclass that adds nothing."""


@pytest.mark.predicts
@pytest.mark.apart
def test_a_plain_subclass_is_one_block():
    """Memory is what counts."""
    model = nn.Linear(16, 16)
    model.register_buffer("extra", torch.ones(16).as_subclass(Marked))
    assert _resident(_trace(model, lambda m, b: (m(b) * m.extra).mean()), "buffer") == [64]


@pytest.mark.predicts
@pytest.mark.apart
def test_a_subclass_of_several_blocks_is_refused():
    """What its operators allocate is unknown."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(16, 16)
    model.register_buffer("extra", TwoTensor(torch.ones(16), torch.ones(16)))
    with pytest.raises(InvalidArgument, match=r"a TwoTensor of shape \(16,\) cannot be traced: plain tensors can"):
        _trace(model)


def test_a_parameter_without_a_shape_is_refused_before():
    """Lazy modules get theirs from the first sample."""
    with pytest.raises(
        InvalidArgument, match="parameter weight has no shape yet: run the model once on a sample first"
    ):
        _trace(nn.LazyLinear(3))


def _wrapped(step, times):
    """The step inside so many functions, as what-if and users' decorators put it."""
    if not times:
        return step

    @wraps(step)
    def run(model, batch):
        return step(model, batch)

    return _wrapped(run, times - 1)


class Trainer:
    """A step that is a bound method, with a loss in a dict, as users write it."""

    def __init__(self, loss):
        self.losses = {"main": [loss]}

    def step(self, model, batch):
        return self.losses["main"][0](model(batch), batch)

    def __call__(self, model, batch):
        return self.step(model, batch)


def _closing_over(loss):
    def inner(hidden, batch):
        return loss(hidden, batch)

    def helper(model, batch):
        return inner(model(batch), batch)

    return helper


_STEPS = {
    "closure": _closing_over,
    "method": lambda loss: Trainer(loss).step,
    "object": Trainer,
    "partial": lambda loss: partial(lambda criterion, model, batch: criterion(model(batch), batch), loss),
    "default": lambda loss: lambda model, batch, criterion=loss: criterion(model(batch), batch),
}


@pytest.mark.parametrize("times", [0, 1, 2, 30])
@pytest.mark.parametrize("make", _STEPS.values(), ids=_STEPS)
def test_what_a_step_closes_over_is_found_however_often_it_is_wrapped(make, times):
    """One function more around a step, as each what-if has, hides nothing."""
    model, loss = nn.Linear(16, 16), nn.BCEWithLogitsLoss(pos_weight=torch.ones(16))
    found = [module for _, module in modules_of(model, _wrapped(make(loss), times))]
    assert loss in found
    assert found.count(model) == 1


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
