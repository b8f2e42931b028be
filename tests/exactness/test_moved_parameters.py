"""Losses that compare samples, where the comparison is 0 with the parameters that a training begins with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sampling import sample
from splits import info_nce, regulariser, small
from torch import nn
from torch.nn import functional as F
from workloads import bits_of, differences, make_batch, mean_step

from autobatch.exactness.verification import verify


class Gated(nn.Module):
    """A branch behind a gate that begins at 0: ReZero, or a last layer of zeros."""

    def __init__(self, *, gate: int = 1) -> None:
        super().__init__()
        self.body, self.branch, self.gate = small(), small(seed=1), nn.Parameter(torch.zeros(gate))

    def forward(self, inputs):
        hidden = self.body(inputs)
        normalised = self.branch(inputs)
        normalised = (normalised - normalised.mean(0)) / (normalised.std(0, correction=0) + 0.1)
        return hidden + self.gate * normalised


class Adapted(nn.Module):
    """A frozen layer with an adapter of which one factor is 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = small().requires_grad_(False)
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 4, bias=False)
        nn.init.zeros_(self.up.weight)
        self.is_on = True

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs)) if self.is_on else self.base(inputs)


class Shared(nn.Module):
    """A policy, and a reference that nobody has frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = small()
        self.reference = copy.deepcopy(self.policy)

    def forward(self, inputs):
        return self.policy(inputs)


def ratios_of(model: Any, batch: Any, reference: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """How much likelier the policy makes an answer than the reference does, of two answers."""
    with torch.no_grad():
        before = reference(batch[0]).log_softmax(1)
    now = model(batch[0]).log_softmax(1) - before
    rows = torch.arange(len(now))
    return now[rows, batch[1]], now[rows, (batch[1] + 1) % 4]


def sorted_differences(first, second):
    return -F.logsigmoid(0.1 * (first.sort().values - second.sort().values)).mean()


def less_divergence(first, second):
    """The divergence is a mean over the batch, kept from below 0 and without a gradient."""
    divergence = second.mean().clamp(min=0).detach()
    return 1 - torch.sigmoid(0.5 * (first - divergence)).mean()


def each_by_itself(first, second):
    return -F.logsigmoid(0.1 * (first - second)).mean()


def of_policy(loss, *, beside=0.0):
    """A step with that loss between the model and a frozen copy of what it begins with."""
    reference = small().requires_grad_(False)
    return lambda model, batch: loss(*ratios_of(model, batch, reference)) + beside * mean_step(model, batch)


def of_adapter(loss):
    """The same, where the reference is the model without its adapter."""

    def step(model, batch):
        def reference(inputs):
            model.is_on = False
            found = model(inputs)
            model.is_on = True
            return found

        return loss(*ratios_of(model, batch, reference))

    return step


def of_submodule(loss):
    """The same, where the reference is a part of the model that could be trained."""
    return lambda model, batch: loss(*ratios_of(model, batch, model.reference))


KNOWN = small()[0].weight.detach().clone()


def zero_head() -> nn.Module:
    """Its last layer begins at 0."""
    model = small()
    nn.init.zeros_(model[2].weight)
    return model


CASES: dict[str, tuple[Any, Any, bool]] = {
    "sorted differences": (small, of_policy(sorted_differences), False),
    "sorted differences beside a mean": (small, of_policy(sorted_differences, beside=1.0), False),
    "a divergence of the batch": (small, of_policy(less_divergence), False),
    "a divergence of the batch beside a mean": (small, of_policy(less_divergence, beside=1.0), False),
    "sorted differences of an adapter": (Adapted, of_adapter(sorted_differences), False),
    "a divergence of the batch, of an adapter": (Adapted, of_adapter(less_divergence), False),
    "sorted differences from a submodule": (Shared, of_submodule(sorted_differences), False),
    "a gate": (Gated, mean_step, False),
    "a gate for each output": (lambda: Gated(gate=4), mean_step, False),
    "each by itself": (small, of_policy(each_by_itself), True),
    "each by itself, of an adapter": (Adapted, of_adapter(each_by_itself), True),
    "each by itself, from a submodule": (Shared, of_submodule(each_by_itself), True),
    "an adapter": (Adapted, mean_step, True),
    "a last layer of zeros": (zero_head, mean_step, True),
    "a penalty": (small, lambda model, batch: mean_step(model, batch) + regulariser(model), True),
}


def oracle(model: nn.Module, step: Any, batch: Any) -> float:
    """How far the split is from the whole in float64, by hand, with parameters that were moved in several ways."""
    return max(oracle_of(model, step, batch, seed) for seed in range(6))


def oracle_of(model: nn.Module, step: Any, batch: Any, seed: int) -> float:
    model = copy.deepcopy(model).double()
    batch = (batch[0].double(), batch[1])
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for name, parameter in model.named_parameters() if "reference" not in name]
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in parameters:
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def gradient(parts):
        total = sum(step(model, (batch[0][part], batch[1][part])) * len(range(16)[part]) / 16 for part in parts)
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])

    whole = gradient([slice(0, 16)])
    return float((gradient([slice(0, 5), slice(5, 16)]) - whole).norm() / whole.norm())


@pytest.mark.parametrize("name", sample(CASES, 3))
def test_a_comparison_that_is_0_at_first_is_found(name):
    """Before the first step, and without a trace; what is exact stays so."""
    make_model, step, is_exact = CASES[name]
    model, batch = make_model(), make_batch(16)
    before = bits_of(model)
    verdict = verify(model, batch, step)
    assert verdict.exact == is_exact, str(verdict)
    assert not verdict.unchecked
    assert differences(bits_of(model), before) == []
    if not is_exact:
        assert verdict.causes
        assert all("PerStep" not in cause and "outside" not in cause for cause in verdict.causes)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_agrees(name):
    """In float64 and by hand the split is exact after some training, or it is not."""
    make_model, step, is_exact = CASES[name]
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda layer, inputs: F.linear(inputs, *weights_like(layer, inputs)))
        error = oracle(make_model(), step, make_batch(16))
    assert (error < 1e-12) == is_exact, error


def weights_like(layer, inputs):
    """A layer's weight and bias in the dtype of its input: a reference outside the model has stayed in float32."""
    return layer.weight.to(inputs.dtype), None if layer.bias is None else layer.bias.to(inputs.dtype)


def test_coupling_that_shows_at_once_is_not_called_hidden():
    """Only what the values of the parameters hide is said to be hidden."""
    assert "once they have moved" not in str(verify(small(), make_batch(16), info_nce))
    assert "once they have moved" not in str(verify(Gated(), make_batch(16), mean_step))
    assert "once they have moved" in str(verify(small(), make_batch(16), of_policy(sorted_differences)))


def knows(model):
    """Whether the weights are those that it was made with."""
    weight = model[0].weight
    return torch.equal(weight, KNOWN.to(weight.dtype))


def refuses(model, batch):
    """A step that runs with the values that it knows."""
    if not knows(model):
        raise ValueError("these are not my weights")
    return mean_step(model, batch)


def overflows(model, batch):
    return mean_step(model, batch) * (1.0 if knows(model) else float("inf"))


@pytest.mark.parametrize("step", [refuses, overflows])
def test_a_step_that_does_not_run_with_other_values_is_judged_by_its_own(step):
    """It is no error of the user's."""
    verdict = verify(small(), make_batch(16), step)
    assert verdict.exact, str(verdict)
