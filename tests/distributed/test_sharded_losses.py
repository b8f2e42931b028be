"""Steps whose losses use only a part of what a sharded model returns, or more than the model: exact on each rank."""

import itertools
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of
from sampling import IN_PROOF, sample
from torch import nn
from torch.nn import functional as F
from workloads import make_batch

import autobatch
from autobatch.errors import AutobatchError
from autobatch.testing import FakeDevice

pytestmark = needs_sharding

SAMPLES = 12
EVEN = (6, 6)


class Heads(nn.Module):
    """Returns the outputs of two heads; the step may call the second alone, too."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 10), nn.Linear(10, 4), nn.Linear(10, 4)
        self.double()

    def forward(self, inputs):
        hidden = torch.tanh(self.body(inputs))
        return self.left(hidden), self.right(hidden)


class Body(Heads):
    def forward(self, inputs):
        return torch.tanh(self.body(inputs))


class WithLoss(Heads):
    """Computes its loss itself, and returns it beside the logits; it is nan if every label is ignored."""

    def forward(self, inputs, labels):
        left, right = super().forward(inputs)
        return {"loss": F.cross_entropy(left, labels), "logits": left, "other": right}


class OnlyLoss(WithLoss):
    def forward(self, inputs, labels):
        return {"loss": super().forward(inputs, labels)["loss"]}


def use_one(model, batch):
    return F.cross_entropy(model(batch[0])[0], batch[1])


def use_slice(model, batch):
    """A part of one, and the other beside the loss."""
    left, right = model(batch[0])
    return F.cross_entropy(left[:, :3].clone(), batch[1].clamp(max=2)), {"other": right}


def call_twice(model, batch):
    """One output of the first call, the other one of the second."""
    return F.cross_entropy(model(batch[0])[0] + 0.1 * model(2 * batch[0])[1], batch[1])


def call_head(model, batch):
    return F.cross_entropy(model.right(model(batch[0])), batch[1])


def state_terms(model, batch):
    """A stated sum, and a term that counts once a step."""
    left, right = model(batch[0])
    loss = F.cross_entropy(left, batch[1], reduction="sum")
    return {"loss": autobatch.Sum(loss, len(batch[1])), "once": autobatch.PerStep(0 * right.sum() + 0 * left.sum())}


def state_own_loss(model, batch):
    return autobatch.Mean(model(*batch)["loss"], count=(batch[1] >= 0).sum())


def split_by_label(model, batch):
    left, right = (F.cross_entropy(output, batch[1], reduction="none") for output in model(batch[0]))
    is_low = batch[1] < 2
    return {"low": left[is_low].mean(), "high": right[~is_low].mean()}


def count_labels(batch):
    return {"low": (batch[1] < 2).sum(), "high": (batch[1] >= 2).sum()}


def make_labels(low_only=False, ignored=False):
    """A batch whose second half has other labels."""
    inputs, labels = make_batch(SAMPLES, torch.float64)
    labels = torch.arange(SAMPLES) % 4
    if low_only:
        labels[SAMPLES // 2 :] %= 2
    if ignored:
        labels[SAMPLES // 2 :] = -100
    return inputs, labels


CASES = {
    "one of two outputs": (Heads, use_one, None, {}),
    "a slice": (Heads, use_slice, None, {}),
    "two calls": (Heads, call_twice, None, {}),
    "a head by itself": (Body, call_head, None, {}),
    "stated terms": (Heads, state_terms, None, {}),
    "a term that counts on one rank": (Heads, split_by_label, count_labels, {"low_only": True}),
    "the model's own loss, all ignored on one rank": (WithLoss, state_own_loss, None, {"ignored": True}),
}
DIVISIONS = (EVEN, (11, 1), (2, 10), (12, 0))


def whole_gradients(make_model, step, batch):
    torch.manual_seed(0)
    model = make_model()
    returned = step(model, batch)
    returned = returned[0] if isinstance(returned, tuple) else returned
    terms = returned.values() if isinstance(returned, dict) else [returned]
    losses = [
        term.loss / term.count if isinstance(term, autobatch.Sum) else getattr(term, "loss", term) for term in terms
    ]
    sum(losses[1:], start=losses[0]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def make_runner(make_model, step, *, weigh=None, beside=(), **options):
    """A Runner of this rank, in micro-batches of 3."""
    torch.manual_seed(0)
    model = shard(make_model())
    optimizer = torch.optim.SGD([*model.parameters(), *beside], lr=0.1)
    plan = make_rank_plans(EVEN, 3, weighed=weigh is not None, **SMALL)[dist.get_rank()]
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    return model, autobatch.Runner(plan, model, step, optimizer, weigh=weigh, device=device, **options)


def take_part(batch, division):
    """This rank's; ``None``: no samples."""
    start = sum(division[: dist.get_rank()])
    stop = start + division[dist.get_rank()]
    return tuple(part[start:stop] for part in batch) if stop > start else None


def error_of(model, expected):
    """Relative, of the worst parameter; infinite where only one of the two has a gradient."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        if (parameter.grad is None) != (expected[name] is None):
            return torch.inf
        if parameter.grad is not None:
            difference = (parameter.grad.full_tensor() - expected[name]).norm()
            worst = max(worst, (difference / expected[name].norm().clamp(min=1e-12)).item())
    return worst


def step_through(name):
    """Errors of each division, at once and after steps with which the passes are known; CI takes every second."""
    make_model, step, weigh, labels = CASES[name]
    batch, errors = make_labels(**labels), []
    expected = whole_gradients(make_model, step, batch)
    ways = [*itertools.product((False, True), DIVISIONS)]
    for is_known, division in sample(ways[[*CASES].index(name) % 2 :] if not IN_PROOF else ways, 2):
        model, runner = make_runner(make_model, step, weigh=weigh)
        for _ in range(2 if is_known or 0 in division else 0):
            runner.accumulate(take_part(make_labels(), EVEN))
            model.zero_grad()
        runner.accumulate(take_part(batch, division))
        errors.append(error_of(model, expected))
    return errors


class Scaled:
    """A step with parameters of its own, outside of the model."""

    def __init__(self):
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float32))

    def __call__(self, model, batch):
        return F.cross_entropy(model(batch[0])[0] * self.scale + self.shift, batch[1])

    def parameters(self):
        return [self.scale, self.shift]


def use_outside():
    """Differences of all parameters from one process's, after clipped steps of several divisions."""
    step, plain, norm = Scaled(), Scaled(), 0.05
    model, runner = make_runner(Heads, step, beside=step.parameters(), max_grad_norm=norm)
    torch.manual_seed(0)
    whole = Heads()
    optimizer = torch.optim.SGD([*whole.parameters(), *plain.parameters()], lr=0.1)
    batch = make_labels()
    for division in ((8, 4), (12, 0), (1, 11)):
        plain(whole, batch).backward()
        nn.utils.clip_grad_norm_([*whole.parameters(), *plain.parameters()], norm)
        optimizer.step()
        optimizer.zero_grad()
        runner.step(take_part(batch, division))
    pairs = [
        *zip((p.full_tensor() for p in model.parameters()), whole.parameters(), strict=True),
        *zip(step.parameters(), plain.parameters(), strict=True),
    ]
    return [(found - expected).abs().max().item() for found, expected in pairs]


def refuse(make_model, step, batch=None, prepare=lambda step: None):
    model, runner = make_runner(make_model, step)
    prepare(step)
    with pytest.raises(AutobatchError) as caught:
        runner.accumulate(take_part(batch or make_labels(), EVEN))
    stays = any(parameter.grad is not None for parameter in (*model.parameters(), *getattr(step, "parameters", list)()))
    return f"{type(caught.value).__name__}: {caught.value}", stays


def run_all():
    found = {name: step_through(name) for name in CASES}
    found["outside"] = use_outside()
    found["unknown"] = refuse(Heads, Scaled())
    found["only a loss"] = refuse(OnlyLoss, state_own_loss, make_labels(ignored=True))
    step = Scaled()
    _, runner = make_runner(Heads, step, beside=step.parameters())
    step.scale.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(AutobatchError) as caught:
        runner.accumulate(take_part(make_labels(), EVEN))
    found["frozen on one"] = f"{type(caught.value).__name__}: {caught.value}"
    return found


@cache
def answers():
    return run_ranks(run_all, limit_seconds=200)


def results_of(name):
    return [value[name] for value in values_of(answers())]


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_whole_target(name):
    """In passes that count for nothing zeros flow from what the loss would have used, and from nothing else."""
    for errors in results_of(name):
        assert max(errors) < 1e-12


def test_parameters_that_only_the_optimizer_holds_are_summed_over_the_ranks():
    """And count in the norm once."""
    first, second = results_of("outside")
    assert first == second
    assert max(first) < 1e-7


def test_parameters_that_are_in_neither_are_refused():
    """A graph of a sharded model ends at other tensors than the model's parameters."""
    for text, stays in results_of("unknown"):
        assert text.startswith(
            "InvalidArgument: the step trains a parameter of shape (4,) that is in neither the model nor "
        )
        assert not stays


def test_a_parameter_that_is_frozen_on_one_rank_only_is_refused():
    """As in DistributedDataParallel."""
    assert (
        results_of("frozen on one")
        == ["InvalidArgument: the ranks train different parameters: make and freeze the same ones on each"] * 2
    )


def test_a_loss_of_nan_that_only_the_model_has_seen_is_refused():
    """0 times nan is nan, and there is nothing else from which zeros could flow."""
    first, second = results_of("only a loss")
    assert second[0].startswith("InvalidArgument: the model returns only its loss")
    assert "nan or infinite" in second[0]
    assert first[0].startswith("RankFailed: accumulate 0 was undone on every rank, because it failed on ")
    assert not first[1]
    assert not second[1]
