"""A total that is returned beside its own parts would be counted twice: it is refused, and other dicts are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobatch
from autobatch import InvalidArgument
from autobatch.step.totals import refuse_totals

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def parts_of(model, batch):
    out = model(batch)
    return out.square().mean(), out.abs().mean(), out.exp().mean()


class Mul(torch.autograd.Function):
    """A loss that is not linear, in a node whose name begins as that of a product."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


TOTALS = {
    "a sum": lambda a, b, c: {"loss": a + b + c, "a": a, "b": b, "c": c},
    "at the end": lambda a, b, c: {"a": a, "b": b, "all": a + b},
    "weighted": lambda a, b, c: {"loss": a + 0.1 * b - c / 3, "a": a, "b": b, "c": c},
    "sum of a list": lambda a, b, c: {"loss": sum([a, b]), "a": a, "b": b},
    "stacked": lambda a, b, c: {"loss": torch.stack([a, b, c]).mean(), "a": a, "b": b, "c": c},
    "with a part of its own": lambda a, b, c: {"loss": a + b, "a": a},
    "the same tensor": lambda a, b, c: {"loss": a, "a": a},
    "in double": lambda a, b, c: {"loss": (a.double() + b.double()).float(), "a": a, "b": b},
    "with counts": lambda a, b, c: {"loss": autobatch.Mean(a + b, 8), "a": autobatch.Mean(a, 8)},
    "a sum with one that counts once": lambda a, b, c: {"loss": a + b, "a": autobatch.PerStep(a)},
}

TERMS = {
    "three terms": lambda a, b, c: {"a": a, "b": b, "c": c},
    "equal values": lambda a, b, c: {"a": a, "again": a.square().sqrt()},
    "a sum that has the value of one more": lambda a, b, c: {"loss": a, "b": b, "c": (a - b).detach() + 0 * c},
    "zeros": lambda a, b, c: {"loss": 0 * a, "b": 0 * b, "c": 0 * c},
    "entries of a stack": lambda a, b, c: {"a": a, "worst": torch.stack([a, b])[1]},
    "parts beside it": lambda a, b, c: (a + b, {"a": a, "b": b}),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", TOTALS)
def test_a_total_beside_its_parts_is_refused(name):
    """By fit, a Runner and verify; the message names the terms and what to return."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(model, batch):
        return TOTALS[name](*parts_of(model, batch))

    def alone(model, batch):
        return parts_of(model, batch)[0]

    with pytest.raises(InvalidArgument, match="twice"):
        autobatch.fit(model, 8, batch=BATCH, step=step, optimizer=optimizer, progress=False, reuse=False)
    with pytest.raises(InvalidArgument, match="twice"):
        autobatch.verify(model, BATCH, step)
    plan = autobatch.fit(model, 8, batch=BATCH, step=alone, optimizer=optimizer, progress=False, max_micro_batch=2)
    runner = autobatch.Runner(plan, model, step, optimizer)
    with pytest.raises(InvalidArgument) as refused:
        runner.step(BATCH)
    assert "'a'" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_their_own_are_trained(name):
    """Whatever their values are; the gradient is that of their sum."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch):
        return TERMS[name](*parts_of(model, batch))

    plan = autobatch.fit(model, 8, batch=BATCH, step=step, optimizer=optimizer, progress=False, max_micro_batch=2)
    autobatch.Runner(plan, model, step, optimizer).accumulate(BATCH)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    returned = step(model, BATCH)
    (sum(returned.values()) if isinstance(returned, dict) else returned[0]).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_what_is_not_linear_in_a_term_is_no_total_of_it():
    """A product of two losses, a ratio, and a function whose node is named as a product."""
    a, b, _ = parts_of(nn.Linear(4, 3), BATCH)
    for other in (a * b, a / b, a * a, Mul.apply(a)):
        refuse_totals({"a": a, "b": b, "other": other})


@pytest.mark.predicts
def test_a_prediction_refuses_it_too():
    """Nothing has a value there."""
    with pytest.raises(InvalidArgument, match="twice"):
        autobatch.predict(
            nn.Linear(4, 3), BATCH, lambda m, b: TOTALS["weighted"](*parts_of(m, b)), gpu="L4", target_batch=8
        )
