"""Each cause is named where it is there and nowhere else: by itself, beside others, and beside what looks like it."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import pytest
import torch
from sampling import sample
from splits import info_nce, regulariser, small, sum_loss, with_batch_norm, with_spectral_norm
from torch import nn
from torch.nn import functional as F
from workloads import make_batch, mean_step

from autobatch.exactness.verification import verify
from autobatch.step.losses import Mean, PerStep, Sum

PHRASES = {
    "ignored": "ignores the gradient that it is given",
    "outside": "something outside the model moves",
    "state": "state that moves with every forward pass",
    "BatchNorm": "BatchNorm in train mode",
    "sum": "autobatch.Sum(loss, count)",
    "once": "autobatch.PerStep",
    "terms": "no sample's part of it depends on the others",
    "coupled": "depends on the others",
    "losses": "depends on the losses themselves",
    "weights": "such as class weights",
    "samples": "mean over samples, and is counted otherwise",
    "pairs": "in rows 2i and 2i + 1",
    "unsteady": "another gradient each time",
    "unknown": "its cause was not found",
}


def named(verdict: Any) -> set[str]:
    """The kinds of the causes; a cause of none of them raises."""
    kinds = [next(kind for kind in PHRASES if PHRASES[kind] in cause) for cause in verdict.causes]
    assert len(set(kinds)) == len(kinds), verdict
    return set(kinds)


class Fused(torch.autograd.Function):
    """A cross entropy whose backward pass multiplies by the gradient that it is given, or ignores it."""

    @staticmethod
    def forward(ctx, scores, labels, ignores):
        chance = scores.softmax(-1)
        ctx.save_for_backward((chance - F.one_hot(labels, scores.shape[1])) / len(scores))
        ctx.ignores = ignores
        return -chance[torch.arange(len(scores)), labels].log().mean()

    @staticmethod
    def backward(ctx, given):
        (gradient,) = ctx.saved_tensors
        return gradient if ctx.ignores else gradient * given, None, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, change):
        ctx.change = change
        return values.clone()

    @staticmethod
    def backward(ctx, given):
        return ctx.change(given), None


def fused(*, ignores):
    return lambda model, batch: Fused.apply(model(batch[0]), batch[1], ignores)


def changing_gradients(change):
    """A step in whose graph each gradient is changed."""
    return lambda model, batch: F.cross_entropy(Reversed.apply(model(batch[0]), change), batch[1])


class Counted(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body, self.idle = body, Idle()

    def forward(self, inputs):
        self.idle(inputs)
        return self.body(inputs)


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        self.average.lerp_(inputs.detach().mean().to(self.average.dtype), 0.1)


class Apart(nn.Module):
    """Has BatchNorm in a branch that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = small(), with_batch_norm()

    def forward(self, inputs):
        self.branch(inputs)
        return self.body(inputs)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Dropout(0.3), nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Dropout(0.5), nn.Linear(10, 4)
        )

    def forward(self, inputs):
        return self.body(inputs)


def follows_outside(*, matters=True, loss=mean_step):
    """A step with an average of the weights outside the model, which each call moves."""
    teacher = small(seed=1).requires_grad_(False)

    def step(model, batch):
        with torch.no_grad():
            for average, parameter in zip(teacher.parameters(), itertools.cycle(model.parameters()), strict=False):
                average.mul_(0.8).add_(parameter.mean(), alpha=0.2)
            wanted = teacher(batch[0])
        return loss(model, batch) + (F.mse_loss(model(batch[0]), wanted) if matters else 0.0)

    return step


class WithTeacher(nn.Module):
    """Holds the average of its weights, which the step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = small(), small(seed=1).requires_grad_(False)

    def forward(self, inputs):
        return self.student(inputs)


def follows_inside(model, batch):
    with torch.no_grad():
        for average, parameter in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            average.lerp_(parameter, 0.2)
        wanted = model.teacher(batch[0])
    return F.mse_loss(model(batch[0]), wanted)


def counting_calls():
    """A step that keeps a number of its own."""
    calls = itertools.count(1)
    return lambda model, batch: mean_step(model, batch) * (1 + 0.1 * next(calls))


def drawing_by_itself():
    """A step that draws in a way that nobody can hold still."""
    import os

    return lambda model, batch: mean_step(model, batch) * (1 + os.urandom(1)[0])


def of_some(model, batch):
    """A mean over samples that are chosen at random, each by a draw of its own."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    chosen = torch.rand(len(losses)) < 0.5
    return (losses * chosen).sum() / chosen.sum().clamp(min=1)


def all_and_some(model, batch):
    """A mean over all samples, and one over those that are chosen at random."""
    return mean_step(model, batch) + of_some(model, batch)


def standardised(model, batch):
    scores = model(batch[0])
    return F.cross_entropy((scores - scores.mean(0)) / (scores.std(0, correction=0) + 0.1), batch[1])


def deviation(model, batch):
    """Not a number for a micro-batch of one sample."""
    scores = model(batch[0])
    return F.cross_entropy(scores / (scores.std(0) + 0.1), batch[1])


def correlation(model, batch):
    return -torch.corrcoef(torch.stack([model(batch[0])[:, 0], batch[1].to(batch[0].dtype)]))[0, 1]


def hardest(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(min(3, len(losses))).values.mean()


def single_otherwise(model, batch):
    loss = mean_step(model, batch)
    return loss if len(batch[0]) == 1 else loss + model(batch[0]).square().mean()


def penalty(model):
    """0.01 times the squared weights."""
    return 0.01 * regulariser(model)


def sparse_labels(model, batch):
    """Two means, one over labels of which some are missing."""
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + F.cross_entropy(out.flip(1), batch[2])


def missing(samples=16):
    """A batch with other labels, of which some are missing."""
    inputs, labels = make_batch(samples)
    return inputs, labels, labels.masked_fill(torch.arange(samples) % 3 == 0, -100)


class Scalar(nn.Module):
    """Two parameters: any two gradients add up to any third with some weights."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, inputs):
        return self.line(inputs[:, :1])


def ratio(model, batch):
    chance = model(batch[0]).sigmoid()
    return 1 - 2 * (chance[:, 0] * batch[1]).sum() / (chance.sum() + batch[1].sum())


def n_times(power, step=sum_loss):
    """A loss that is divided by a power of the number of samples."""
    return lambda model, batch: step(model, batch) / len(batch[0]) ** power


BATCH = make_batch(16)
len_of = lambda batch: len(batch[0])  # noqa: E731

CASES: dict[str, tuple[Any, Any, Any, Any, set[str]]] = {
    # What ignores the gradient that it is given.
    "a loss that ignores its gradient": (small, fused(ignores=True), None, BATCH, {"ignored"}),
    "the same, multiplied": (small, fused(ignores=False), None, BATCH, set()),
    "beside one that does not": (
        small, lambda m, b: fused(ignores=True)(m, b) + model_square(m, b), None, BATCH, {"ignored"},
    ),
    "a part of the parameters": (
        small, lambda m, b: mean_step(m, b) + Fused.apply(m[0](b[0])[:, :4], b[1], True), None, BATCH, {"ignored"},
    ),
    "counted by weigh": (small, fused(ignores=True), len_of, BATCH, {"ignored"}),
    "stated": (small, lambda m, b: Mean(fused(ignores=True)(m, b), len_of(b)), None, BATCH, {"ignored"}),
    "ignored, in a model with a counter": (lambda: Counted(small()), fused(ignores=True), None, BATCH, {"ignored"}),
    "ignored, after BatchNorm": (with_batch_norm, fused(ignores=True), None, BATCH, {"ignored", "BatchNorm"}),
    "ignored for each sample, and a sum": (
        small, lambda m, b: sum_loss(m, b) + sign_alone(m, b), None, BATCH, {"sum"},
    ),
    "ignored, and in-batch negatives": (
        small, lambda m, b: fused(ignores=True)(m, b) + info_nce(m, b), None, BATCH, {"ignored", "coupled"},
    ),
    "ignored, and an average outside": (
        small, follows_outside(loss=fused(ignores=True)), None, BATCH, {"ignored", "outside"},
    ),
    "a hook that ignores the loss's gradient": (
        small, lambda m, b: Reversed.apply(mean_step(m, b), torch.ones_like), None, BATCH, {"ignored"},
    ),
    "clipped for each sample": (
        small, changing_gradients(lambda given: given.clamp(-0.002, 0.002)), None, BATCH, set(),
    ),
    "clipped for each sample, and in-batch negatives": (
        small, lambda m, b: info_nce(m, b) + changing_gradients(lambda given: given.clamp(-0.002, 0.002))(m, b), None,
        BATCH, {"coupled"},
    ),
    "reversed in the graph": (small, changing_gradients(lambda given: -2 * given), None, BATCH, set()),
    # A penalty on weights.
    "a penalty in a mean": (small, lambda m, b: mean_step(m, b) + penalty(m), None, BATCH, set()),
    "a penalty, stated as a mean": (
        small, lambda m, b: Mean(mean_step(m, b) + penalty(m), len_of(b)), None, BATCH, set(),
    ),
    "a penalty in a sum": (small, lambda m, b: Sum(sum_loss(m, b) + penalty(m), len_of(b)), None, BATCH, {"once"}),
    "a penalty in a loss that was divided before": (
        small, lambda m, b: Sum(sum_loss(m, b) / 16 + penalty(m), len_of(b) / 16), None, BATCH, {"once"},
    ),
    "a penalty by itself": (
        small, lambda m, b: {"loss": Mean(mean_step(m, b), len_of(b)), "penalty": PerStep(penalty(m))}, None, BATCH,
        set(),
    ),
    "a penalty in a sum that is read as a mean": (
        small, lambda m, b: sum_loss(m, b) + penalty(m), None, BATCH, {"sum", "once"},
    ),
    "a penalty beside in-batch negatives": (small, lambda m, b: info_nce(m, b) + penalty(m), None, BATCH, {"coupled"}),
    "in-batch negatives and a penalty in a sum": (
        small, lambda m, b: Sum(info_nce(m, b) + penalty(m), len_of(b) / 16), None, BATCH, {"coupled"},
    ),
    "a penalty after BatchNorm": (
        with_batch_norm, lambda m, b: Sum(sum_loss(m, b) / 16 + penalty(m), len_of(b) / 16), None, BATCH,
        {"BatchNorm", "once"},
    ),
    # Constants and counts.
    "a sum": (small, sum_loss, None, BATCH, {"sum"}),
    "a sum divided by a constant": (small, lambda m, b: sum_loss(m, b) / 1000, None, BATCH, {"sum"}),
    "a mean times a constant": (small, lambda m, b: mean_step(m, b) / 1000, None, BATCH, set()),
    "a loss that was divided before": (
        small, lambda m, b: Sum(sum_loss(m, b) / 1000, len_of(b) / 1000), None, BATCH, set(),
    ),
    "a mean with count 1": (small, lambda m, b: Mean(mean_step(m, b), 1), None, BATCH, {"samples"}),
    "divided by the square of the number": (small, n_times(2), None, BATCH, {"losses"}),
    "divided by the root of the number": (small, n_times(0.5), None, BATCH, {"losses"}),
    "a single sample otherwise": (small, single_otherwise, None, BATCH, {"terms"}),
    "two means": (small, sparse_labels, None, missing(), {"terms"}),
    # BatchNorm.
    "BatchNorm": (with_batch_norm, mean_step, None, BATCH, {"BatchNorm"}),
    "BatchNorm and dropout": (Dropping, mean_step, None, BATCH, {"BatchNorm"}),
    "BatchNorm, and a step that calls train()": (
        with_batch_norm, lambda m, b: mean_step(m.train(), b), None, BATCH, {"BatchNorm"},
    ),
    "BatchNorm that no loss reads": (Apart, mean_step, None, BATCH, set()),
    "BatchNorm that no loss reads, and a sum": (Apart, sum_loss, None, BATCH, {"sum"}),
    "BatchNorm and in-batch negatives": (with_batch_norm, info_nce, None, BATCH, {"BatchNorm", "coupled"}),
    "BatchNorm and a mean with count 1": (
        with_batch_norm, lambda m, b: Mean(mean_step(m, b), 1), None, BATCH, {"BatchNorm", "samples"},
    ),
    "BatchNorm as a function": (
        small, lambda m, b: F.cross_entropy(F.batch_norm(m(b[0]), None, None, training=True, eps=0.1), b[1]), None,
        BATCH, {"coupled"},
    ),
    # State that moves.
    "an average outside": (small, follows_outside(), None, BATCH, {"outside"}),
    "an average outside that no loss reads": (small, follows_outside(matters=False), None, BATCH, set()),
    "an average outside, counted by weigh": (small, follows_outside(), len_of, BATCH, {"outside"}),
    "an average outside, beside a counter": (lambda: Counted(small()), follows_outside(), None, BATCH, {"outside"}),
    "an average outside, and a sum": (small, follows_outside(loss=sum_loss), None, BATCH, {"outside", "terms"}),
    "an average outside, and spectral norm": (with_spectral_norm, follows_outside(), None, BATCH, {"outside", "state"}),
    "an average outside that no loss reads, and spectral norm": (
        with_spectral_norm, follows_outside(matters=False), None, BATCH, {"state"},
    ),
    "an average inside": (WithTeacher, follows_inside, None, BATCH, {"state"}),
    "spectral norm": (with_spectral_norm, mean_step, None, BATCH, {"state"}),
    "spectral norm, and a sum": (with_spectral_norm, sum_loss, None, BATCH, {"state", "sum"}),
    "a counter": (lambda: Counted(small()), mean_step, None, BATCH, set()),
    "a counter, and a sum": (lambda: Counted(small()), sum_loss, None, BATCH, {"sum"}),
    "a number of the step's own": (small, counting_calls(), None, BATCH, {"unsteady"}),
    "the same, beside a counter": (lambda: Counted(small()), counting_calls(), None, BATCH, {"unsteady"}),
    "draws that nobody holds": (with_batch_norm, drawing_by_itself(), None, BATCH, {"unsteady"}),
    # Statistics over the batch, and what draws.
    "standardised over the batch": (small, standardised, None, BATCH, {"coupled"}),
    "no deviation of one sample": (small, deviation, None, BATCH, {"coupled"}),
    "correlation over the batch": (small, correlation, None, BATCH, {"coupled"}),
    "in-batch negatives": (small, info_nce, None, BATCH, {"coupled"}),
    "the hardest": (small, hardest, None, BATCH, {"coupled"}),
    "a mean over samples chosen at random": (small, of_some, None, BATCH, {"weights"}),
    "two means, one over samples chosen at random": (small, all_and_some, None, BATCH, {"terms"}),
    "a ratio of sums, and two parameters": (Scalar, ratio, None, (BATCH[0], BATCH[1].float()), {"coupled"}),
}  # fmt: skip


def model_square(model, batch):
    return model(batch[0]).square().mean()


def sign_alone(model, batch):
    """A sum whose gradient is its sign, whatever is given."""
    return Reversed.apply(model(batch[0]), torch.sign).sum()


@pytest.mark.parametrize("name", sample(CASES, 3))
def test_causes_are_those_that_are_there(name):
    """No other, and none is left out; an exact split has none."""
    make_model, step, weigh, batch, expected = CASES[name]
    torch.manual_seed(0)
    verdict = verify(make_model(), batch, step, weigh)
    assert not verdict.unchecked
    assert named(verdict) == expected, str(verdict)
    assert verdict.exact == (not expected)


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
    verdict = verify(nn.Linear(4, 1), batch, step)
    assert not verdict.exact
    assert "Key.MASK" in str(verdict)


def test_a_count_in_samples_with_such_keys_is_named():
    """Each sample has a tensor of its own length."""

    def step(model, batch):
        return torch.cat([model(item[Key.FEATURES]) for item in batch]).square().mean()

    torch.manual_seed(0)
    batch = [{Key.FEATURES: torch.randn(length, 4)} for length in (1, 2, 3, 4, 5, 2, 1, 3)]
    verdict = verify(nn.Linear(4, 1), batch, step)
    assert not verdict.exact
    assert "Key.FEATURES" in str(verdict)
