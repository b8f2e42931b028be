"""``fit(check=)`` compares updates: an optimizer that reads more than ``.grad`` makes another one of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InexactSplit, InvalidArgument

RATE = 0.05


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


class Gathers(torch.optim.SGD):
    """Notes, in each pass, what goes into each layer and the gradient of what comes out."""

    def __init__(self, model, **options):
        super().__init__(model.parameters(), lr=RATE, **options)
        self.inputs, self.passes = {}, {}
        for layer in linears(model):
            layer.register_forward_hook(self.note_inputs)

    def note_inputs(self, layer, given, output):
        if output.requires_grad:
            self.inputs[layer] = given[0].detach()
            output.register_hook(lambda gradient: self.note_gradients(layer, gradient))

    def note_gradients(self, layer, gradient):
        self.passes.setdefault(layer, []).append((self.inputs[layer], gradient))


class PrivateSGD(Gathers):
    """Clips the gradient of each sample, as DP-SGD does, and keeps them in a dict."""

    largest = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for layer, passes in self.passes.items():
            inputs = torch.cat([one for one, _ in passes])
            rows = torch.cat([gradients * len(gradients) for _, gradients in passes])
            factors = (self.largest / (rows.norm(dim=1) * inputs.norm(dim=1))).clamp(max=1)
            layer.weight.grad = torch.einsum("n,no,ni->oi", factors, rows, inputs) / len(rows)
        self.passes.clear()
        super().step()


class SampleSGD(PrivateSGD):
    """The same, by the attribute that opacus gives its parameters."""

    def note_gradients(self, layer, gradient):
        super().note_gradients(layer, gradient)
        rows = torch.einsum("no,ni->noi", gradient, self.inputs[layer])
        layer.weight.grad_sample = [*getattr(layer.weight, "grad_sample", []), rows]

    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            vars(parameter).pop("grad_sample", None)


class Preconditioned(Gathers):
    """Divides by the covariance of what goes into a layer: an average over passes, as in K-FAC."""

    @torch.no_grad()
    def step(self, closure=None):
        for layer, passes in self.passes.items():
            average = self.state.setdefault(layer.weight, {}).setdefault("covariance", torch.zeros(()))
            for inputs, _ in passes:
                average = 0.5 * average + 0.5 * inputs.T @ inputs / len(inputs)
            self.state[layer.weight]["covariance"] = average
            damped = average + 0.1 * torch.eye(len(average))
            layer.weight.grad = layer.weight.grad @ torch.linalg.inv(damped)
        self.passes.clear()
        super().step()


class LastPass(Gathers):
    @torch.no_grad()
    def step(self, closure=None):
        for layer, passes in self.passes.items():
            layer.weight.grad /= 1 + passes[-1][1].norm()
        self.passes.clear()
        super().step()


class NoisySGD(torch.optim.SGD):
    """Adds noise to its update, from torch's generator or its own."""

    def __init__(self, model, generator=None):
        super().__init__(model.parameters(), lr=RATE)
        self.generator = generator

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            noise = torch.empty_like(parameter).normal_(generator=self.generator)
            parameter.add_(noise, alpha=1e-3)


class Wrapped:
    """No torch optimizer: passes all on to one."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def at_rate_0(optimizer):
    """As a scheduler with a warmup leaves it."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def in_two(model):
    """One that reads gradients alone, and one that reads more."""
    return [torch.optim.Adam(model.body[0].parameters()), Gathered(model)]


class Gathered(PrivateSGD):
    """The same, of all layers but the first."""

    def __init__(self, model):
        super().__init__(model)
        first = {id(parameter) for parameter in model.body[0].parameters()}
        group = self.param_groups[0]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in first]


READS_MORE = {
    "clipped samples": PrivateSGD,
    "grad_sample": SampleSGD,
    "a covariance": Preconditioned,
    "the last pass": LastPass,
    "with momentum": lambda model: PrivateSGD(model, momentum=0.9),
    "a warmup from 0": lambda model: at_rate_0(PrivateSGD(model)),
    "one of two": in_two,
    "in a wrapper": lambda model: Wrapped(PrivateSGD(model)),
}

READS_GRADIENTS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "foreach RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), foreach=True),
    "a rate that is a tensor": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.0)),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
    "two": lambda model: [torch.optim.Adam(model.body.parameters()), torch.optim.SGD(model.head.parameters())],
    "hooks that nothing reads": Gathers,
}


def fit_with(make, model=None, step=mean_step, batch=None, **options):
    """The plan of four micro-batches, the model and the optimizer."""
    torch.manual_seed(0)
    model = model or Plain()
    optimizer = make(model)
    plan = autobatch.fit(
        *(model, 16),
        batch=make_batch(16, torch.float64) if batch is None else batch,
        step=step,
        optimizer=optimizer,
        **{"max_micro_batch": 4, "reuse": False, **options},
    )
    return plan, model, optimizer


def updated(make, sizes):
    """The parameters after one step in these micro-batches."""
    torch.manual_seed(0)
    model = Plain()
    optimizer = make(model)
    for member in optimizer if isinstance(optimizer, list) else [optimizer]:
        for group in member.param_groups:
            group["lr"] = RATE
    inputs, labels = make_batch(16, torch.float64)
    for part in zip(inputs.split(sizes), labels.split(sizes), strict=True):
        (mean_step(model, part) * len(part[0]) / 16).backward()
    for member in optimizer if isinstance(optimizer, list) else [optimizer]:
        member.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", READS_MORE)
def test_an_optimizer_that_reads_more_than_the_gradient_is_named(name):
    """Micro-batches by hand make another update, and the check says so, refuses it where asked, and leaves no trace."""
    make = READS_MORE[name]
    torch.manual_seed(0)
    before = torch.cat([parameter.detach().flatten() for parameter in Plain().parameters()])
    whole, parts = updated(make, [16]), updated(make, [4] * 4)
    assert (parts - whole).norm() > 1e-2 * (whole - before).norm()
    plan, *_ = fit_with(make)
    assert not plan.verdict.exact
    [warning] = [warning for warning in plan.warnings if "not exact" in warning]
    assert "reads more than .grad" in warning
    with pytest.raises(InexactSplit, match=r"reads more than \.grad"):
        fit_with(make, check="raise")


@pytest.mark.parametrize("name", READS_GRADIENTS)
def test_an_optimizer_that_reads_the_gradient_alone_is_exact(name):
    """Adam's division of tiny gradients, state, several, fused and foreach kernels do not make it another one."""
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    assert fit_with(READS_GRADIENTS[name], check="raise")[0].verdict.exact


@pytest.mark.parametrize("has_own", [False, True], ids=["torch's generator", "its own"])
def test_noise_in_the_update_is_no_difference(has_own):
    """Also where passes draw, as dropout does, so that another number of them leaves generators elsewhere."""

    def step(model, batch):
        return mean_step(model, (F.dropout(batch[0], 0.3), batch[1]))

    generator = torch.Generator().manual_seed(3) if has_own else None
    plan, *_ = fit_with(lambda model: NoisySGD(model, generator), step=step, check="raise")
    assert plan.verdict.exact


def test_an_update_that_is_another_each_time_is_not_blamed_on_the_parts():
    """A count outside anything that can be put back changes it as much as anything else might."""
    turns = itertools.count(1)

    class Counts(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            self.param_groups[0]["params"][0].add_(float(next(turns) % 7))
            super().step()

    plan, *_ = fit_with(lambda model: Counts(model.parameters(), lr=RATE), check="raise")
    assert plan.verdict.exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_compared(dtype):
    """In float32, as its gradient is; and its parameters stay what they are."""
    options = {"model": Plain(dtype), "batch": make_batch(16, dtype)}
    assert fit_with(lambda model: torch.optim.AdamW(model.parameters()), **options)[0].verdict.exact
    plan, model, _ = fit_with(PrivateSGD, **{**options, "model": Plain(dtype)})
    assert not plan.verdict.exact
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_rows_of_a_sparse_gradient_are_compared():
    """Of an embedding: each run gets the same numbers in the rows that its samples have."""

    def step(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    model = nn.EmbeddingBag(50, 4, sparse=True)
    tokens = torch.randint(50, (16, 3), generator=torch.Generator().manual_seed(0))
    batch = tokens, torch.arange(16) % 4
    plan, *_ = fit_with(
        lambda model: torch.optim.SparseAdam(model.parameters()), model=model, step=step, batch=batch, check="raise"
    )
    assert plan.verdict.exact


WARMING = (lambda model: at_rate_0(PrivateSGD(model)), READS_GRADIENTS["a rate that is a tensor"])


@pytest.mark.parametrize("make", [PrivateSGD, *WARMING, READS_GRADIENTS["Adam"]])
def test_the_comparison_leaves_no_trace(make):
    """A resumed optimizer's state, gradients, generators and step hooks are bit for bit as before."""
    torch.manual_seed(0)
    model = Plain()
    optimizer = make(model)
    mean_step(model, make_batch(16, torch.float64)).backward()
    optimizer.step()
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before = bits_of(model, optimizer)
    autobatch.fit(
        model, 16, batch=make_batch(16, torch.float64), step=mean_step, optimizer=optimizer, max_micro_batch=4
    )
    assert differences(bits_of(model, optimizer), before) == []
    assert not steps


@pytest.mark.parametrize("run", ["fit", "Runner"])
def test_gradients_of_single_samples_are_refused_by_name(run):
    """The wrapper of opacus gives each parameter ``grad_sample``; without a check nothing else would show it."""
    plan, model, optimizer = fit_with(READS_GRADIENTS["SGD"])
    for parameter in model.parameters():
        parameter.grad_sample = None
    batch = make_batch(16, torch.float64)
    with pytest.raises(InvalidArgument, match="grad_sample") as caught:
        if run == "fit":
            autobatch.fit(model, 16, batch=batch, step=mean_step, optimizer=optimizer, check=None)
        else:
            autobatch.Runner(plan, model, mean_step, optimizer)
    assert "\n" not in str(caught.value)
