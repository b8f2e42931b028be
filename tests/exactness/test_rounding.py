"""``verify`` judges each parameter on its own scale: small parts that are wrong, and gradients that are nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sampling import sample
from splits import small
from torch import nn
from torch.nn import functional as F
from workloads import make_batch, mean_step

import autobatch
from autobatch.exactness import comparison
from autobatch.exactness.determinism import deterministic


class TwoHeads(nn.Module):
    """A regression beside a classifier; they share nothing."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.regression, self.classifier = nn.Linear(6, 1), classifier


def two_losses(model, batch, *, scale, classify=mean_step):
    """The squared error of targets that large, and a loss of the classifier."""
    return F.mse_loss(model.regression(batch[0]).squeeze(1), scale * batch[1].float()) + classify(
        model.classifier, batch
    )


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def summed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def contrasted(model, batch):
    hidden = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(hidden @ F.normalize(batch[0][:, :4], dim=1).T, torch.arange(len(hidden)))


SMALL_PARTS = {
    "BatchNorm": (with_batch_norm, mean_step),
    "a sum": (small, summed),
    "in-batch negatives": (small, contrasted),
    "a mean over part of the samples": (
        small,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1].masked_fill(batch[0][:, 0] > 0.3, -100)),
    ),
}


@pytest.mark.parametrize("scale", sample([1e6, 3e3, 1.0], 3))
@pytest.mark.parametrize("name", SMALL_PARTS)
def test_a_small_part_that_is_wrong_is_found_and_named(name, scale):
    """However large the gradient beside it: the error is that of the part, and the part is named, and nothing else."""
    make_classifier, classify = SMALL_PARTS[name]
    torch.manual_seed(0)
    model = TwoHeads(make_classifier())
    verdict = autobatch.verify(model, make_batch(16), partial(two_losses, scale=scale, classify=classify))
    assert not verdict.exact
    assert verdict.relative_error > 1e-2
    assert {found.module.partition(".")[0] for found in verdict.modules} == {"classifier"}
    assert verdict.modules[0].relative_error == verdict.relative_error
    assert verdict.modules[0].module in str(verdict)
    plan_of = partial(autobatch.fit, model, 64, batch=make_batch(16), max_micro_batch=16)
    plan = plan_of(step=partial(two_losses, scale=scale, classify=classify))
    assert str(plan.verdict) in plan.warnings
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan


class Attention(nn.Module):
    """Keys with a bias, which no softmax can see: its true gradient is 0."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.heads, self.out = heads, nn.Linear(width, width)

    def forward(self, hidden):
        split = [
            layer(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*split)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Tied embeddings of which most rows are never used, a frozen layer, key biases, LayerNorm and GroupNorm."""

    def __init__(self, layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 24)
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(24), Attention()]) for _ in range(layers))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.norm = nn.GroupNorm(4, 24)
        self.head = nn.Linear(24, 200, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.to(dtype)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for norm, attention in self.layers:
            hidden = hidden + attention(norm(hidden))
        hidden = self.norm(self.frozen(hidden).transpose(1, 2)).transpose(1, 2)
        return self.head(hidden)


def next_token(model, batch):
    """All rows have the same number of labels."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def sentences(samples=16):
    return torch.randint(0, 50, (samples, 9), generator=torch.Generator().manual_seed(2))


class BeforeSoftmax(nn.Module):
    """A bias that is the same for all classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = small(), nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.body(inputs) + self.shift


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift, self.norm = small(), nn.Parameter(torch.ones(1)), nn.LayerNorm(4)

    def forward(self, inputs):
        return self.norm(self.body(inputs) + self.shift)


def tiny(model, batch):
    """A head whose gradients are 1e-8 of the other's."""
    return mean_step(model[0], batch) + 1e-8 * mean_step(model[1], batch)


EXACT = {
    "key biases": (Transformer, next_token, sentences()),
    "key biases, seven samples": (Transformer, next_token, sentences(7)),
    "key biases, six layers": (partial(Transformer, 6), next_token, sentences()),
    "key biases in bfloat16": (partial(Transformer, dtype=torch.bfloat16), next_token, sentences()),
    "key biases in float64": (partial(Transformer, dtype=torch.float64), next_token, sentences()),
    "torch's own layers": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)),
            nn.TransformerEncoderLayer(2, 2, 8, 0.1, batch_first=True),
            nn.Flatten(),
            nn.Linear(6, 4),
        ),
        mean_step,
        make_batch(16),
    ),
    "a bias that softmax does not see": (BeforeSoftmax, mean_step, make_batch(16)),
    "a bias that LayerNorm does not see": (Centred, mean_step, make_batch(16)),
    "a convolution's bias before InstanceNorm": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 2), nn.InstanceNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)
        ),
        mean_step,
        make_batch(16),
    ),
    "a bias before GroupNorm of one channel": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 2), nn.GroupNorm(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 4)
        ),
        mean_step,
        make_batch(16),
    ),
    "BatchNorm in eval mode": (lambda: with_batch_norm().eval(), mean_step, make_batch(16)),
    "a tiny part that is right": (lambda: nn.ModuleList([small(), small(seed=1)]), tiny, make_batch(16)),
    "a large part that is right": (
        lambda: TwoHeads(small()),
        partial(two_losses, scale=1e6),
        make_batch(16),
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", EXACT)
def test_a_gradient_that_is_nothing_but_rounding_is_no_false_alarm(name, seed):
    """Parameters without a true gradient, tiny ones, rows never used: the split is exact, and said to be."""
    make_model, step, batch = EXACT[name]
    torch.manual_seed(seed)
    verdict = autobatch.verify(make_model(), batch, step)
    assert verdict.exact, str(verdict)
    assert verdict.modules == ()


@pytest.mark.parametrize("name", EXACT)
def test_no_false_alarm_where_float64_cannot_be_run(name, monkeypatch):
    """For want of memory, or on a device that has none: float32 alone knows its own rounding."""
    make_model, step, batch = EXACT[name]
    torch.manual_seed(0)

    def refuse(model, parameters, dtype):
        if dtype == torch.float64:
            raise TypeError("this device has no float64")
        return deterministic(model, parameters, dtype)

    monkeypatch.setattr(comparison, "deterministic", refuse)
    verdict = autobatch.verify(make_model(), batch, step)
    assert verdict.exact, str(verdict)


@pytest.mark.parametrize("name", ["key biases", "torch's own layers", "a large part that is right"])
def test_the_same_models_are_found_wrong_where_they_are(name):
    """A floor for rounding hides nothing: a sum instead of the mean."""
    make_model, step, batch = EXACT[name]
    torch.manual_seed(0)
    verdict = autobatch.verify(
        make_model(), batch, lambda model, part: step(model, part) * len(part if torch.is_tensor(part) else part[0])
    )
    assert not verdict.exact
    assert verdict.relative_error > 0.1
