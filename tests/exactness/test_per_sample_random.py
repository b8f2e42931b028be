"""Random numbers of a step: what mixes samples is found by name, and noise that is each sample's own is exact."""

from __future__ import annotations

import pytest
import torch
from sampling import sample
from splits import small
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import make_batch, mean_step

import autobatch
from autobatch.exactness import determinism

INDICES = {
    "rand, argsort": lambda n: torch.rand(n).argsort(),
    "rand, sort": lambda n: torch.rand(n).sort().indices,
    "rand, sort descending": lambda n: torch.rand(n).sort(descending=True).indices,
    "rand, argsort descending": lambda n: torch.rand(n).argsort(descending=True),
    "rand, topk": lambda n: torch.rand(n).topk(n).indices,
    "randn, argsort": lambda n: torch.randn(n).argsort(),
    "normal_, argsort": lambda n: torch.empty(n).normal_().argsort(),
    "uniform_, argsort": lambda n: torch.empty(n).uniform_().argsort(),
    "exponential_, argsort": lambda n: torch.empty(n).exponential_().argsort(),
    "rand_like, argsort": lambda n: torch.rand_like(torch.ones(n)).argsort(),
    "Gumbel, argsort": lambda n: torch.distributions.Gumbel(0.0, 1.0).sample((n,)).argsort(),
    "randperm": torch.randperm,
    "randint": lambda n: torch.randint(n, (n,)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n), n),
    "multinomial with replacement": lambda n: torch.multinomial(torch.ones(n), n, replacement=True),
    "bernoulli": lambda n: swapped(torch.bernoulli(torch.full((n,), 0.5)).bool()),
    "rand, compared": lambda n: swapped(torch.rand(n) < 0.5),
}


def swapped(chosen):
    """Chosen samples are paired with their neighbours, others with themselves."""
    rows = torch.arange(len(chosen))
    return torch.where(chosen, rows.roll(1), rows)


def mixup(model, batch, indices):
    inputs, labels = batch
    order = indices(len(inputs))
    logits = model(0.7 * inputs + 0.3 * inputs[order])
    return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels[order])


def negatives(model, batch, indices):
    """Another sample of the batch is the one to be far from."""
    hidden = F.normalize(model(batch[0]), dim=1)
    return F.relu(0.5 + (hidden * hidden[indices(len(hidden))]).sum(1)).mean()


@pytest.mark.parametrize("use", sample([mixup, negatives], 4))
@pytest.mark.parametrize("name", sample(INDICES, 2))
def test_shuffling_samples_is_found_by_name(name, use):
    """Whatever the order is made of, the split is not exact, and the cause is the shuffling."""
    verdict = autobatch.verify(small(), make_batch(16), lambda model, batch: use(model, batch, INDICES[name]))
    assert not verdict.exact
    assert not verdict.unchecked
    assert verdict.relative_error > 1e-2
    assert "in-batch shuffling" in verdict.causes[0]


def turn_some(rows):
    return torch.stack([row.flip(0) if torch.rand(()) < 0.5 else row for row in rows])


def in_two_loops(rows):
    turned = [row.flip(0) if torch.rand(()) < 0.5 else row for row in rows]
    return torch.stack([row * (1 + torch.rand(6)) for row in turned])


def of_unequal_sizes(rows):
    """As many draws as there are boxes in a sample."""
    return torch.stack([row * torch.rand(1 + int(row[0] > 0)).sum() for row in rows])


def layer_after_layer(rows):
    """As many calls from one line as there are samples, and each for all of them."""
    for _ in range(16):
        rows = rows * (1 + 0.1 * torch.rand(len(rows), 1))
    return rows


def numbers_for_all(rows):
    """One number for all samples, as often as there are samples."""
    for _ in range(16):
        rows = rows * (1 + 0.1 * torch.rand(()))
    return rows


def patches(rows):
    """Some positions of each sample, in an order of its own: masked autoencoders."""
    return rows.gather(1, torch.rand(len(rows), 6).argsort(1))


def cut_out(rows):
    return rows.scatter(1, torch.randint(6, (len(rows), 1)), 0.0)


def diffused(rows):
    times = torch.randint(1, 1000, (len(rows),))[:, None] / 1000
    return (1 - times) * rows + times * torch.randn_like(rows)


AUGMENTATIONS = {
    "noise": lambda rows: rows + torch.randn_like(rows),
    "a coin in a loop": turn_some,
    "two loops": in_two_loops,
    "unequal sizes": of_unequal_sizes,
    "layer after layer": layer_after_layer,
    "numbers for all": numbers_for_all,
    "patches": patches,
    "cut out": cut_out,
    "diffusion": diffused,
    "flattened": lambda rows: rows * torch.rand(rows.numel()).view_as(rows),
    "samples last": lambda rows: (rows.T * torch.rand(6, len(rows))).T,
    "samples last, flattened": lambda rows: (rows.T.flatten() * torch.rand(6 * len(rows))).view(6, -1).T,
    "shared by all": lambda rows: rows * torch.rand(6),
    "features permuted": lambda rows: rows[:, torch.randperm(6)],
    "where the values say": lambda rows: rows.masked_scatter(rows > 0, torch.rand(int((rows > 0).sum()))),
    "drop path": lambda rows: rows * torch.bernoulli(torch.full((len(rows), 1), 0.3)),
    "a mask": lambda rows: rows * (torch.rand(len(rows), 6) > 0.5),
    "categories": lambda rows: rows * torch.multinomial(torch.ones(len(rows), 3), 2).sum(1, keepdim=True),
    "a generator of its own": lambda rows: rows * torch.rand(len(rows), 6, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("samples", [16, 7])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_what_each_sample_draws_for_itself_is_exact(name, samples):
    """Noise, masks and augmentation are the same for a sample in every division."""
    batch, change = make_batch(samples), AUGMENTATIONS[name]
    verdict = autobatch.verify(small(), batch, lambda model, part: mean_step(model, (change(part[0]), part[1])))
    assert verdict.exact, str(verdict)


class Recomputed(nn.Module):
    """Layers that are skipped or not, and noise, drawn again when a checkpoint recomputes them."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 4)
        self.reentrant = reentrant

    def run(self, layer, rows):
        if torch.rand(()) < 0.5:
            return rows + layer(rows) * torch.rand(len(rows), 1)
        return rows + torch.tanh(layer(rows + torch.randn_like(rows)))

    def forward(self, rows):
        rows = rows.clone().requires_grad_()
        for layer in self.layers:
            rows = checkpoint(self.run, layer, rows, use_reentrant=self.reentrant)
        return self.head(rows)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_draws_what_the_forward_pass_drew(reentrant):
    """Else it would take another way than the forward pass did."""
    torch.manual_seed(0)
    verdict = autobatch.verify(Recomputed(reentrant=reentrant), make_batch(16), mean_step)
    assert verdict.exact, str(verdict)


FORMS = ("rand", "uniform", "randn", "normal", "bernoulli", "randint", "random", "exponential", "cauchy", "log_normal")


@pytest.mark.parametrize("name", [f"{name}{form}" for name in (*FORMS, "geometric") for form in ("_", "_like")])
def test_every_form_of_a_distribution_is_replaced(name):
    """In a tensor that is given, and in one of its shape, where torch has it; a new one is one of these, or filled."""
    if hasattr(torch.ops.aten, name):
        assert determinism._kind_of(
            getattr(getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).overloads()[0])
        )
