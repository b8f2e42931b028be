"""Which count ``verify`` advises: the best one, never what was passed, also of samples in lists."""

from __future__ import annotations

import re

import pytest
import torch
from splits import shifted_token_mean, small, token_mean, tokens
from torch import nn
from torch.nn import functional as F
from workloads import make_batch

import autobatch
from autobatch.errors import InexactSplit


def advice_of(verdict):
    """The function that is advised, and its code."""
    found = re.search(r"weigh=lambda batch: (.*) \(that leaves", verdict.causes[0])
    assert found, verdict.causes[0]
    code = found[1]
    return eval(f"lambda batch: {code}"), code


def long_tokens(seed=0, samples=16, length=129):
    """Rows of nearly one length: labels and their shifted counts are nearly in proportion, to less than 1e-3."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, 4, (samples, length), generator=generator)
    for row in range(samples):
        labels[row, length - row % 5 :] = -100
        if row % 2:
            labels[row, 0] = -100  # padded on the left: it has no label to lose
    return {"x": torch.randn(samples, length, 6, generator=generator), "labels": labels}


def unshifted(batch):
    """Labels of a language model, with the first of each row, which is none."""
    return (batch["labels"] != -100).sum()


@pytest.mark.parametrize("weigh", [None, unshifted], ids=["samples", "all labels"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_count_is_advised_and_following_it_ends_the_advice(weigh, seed):
    """For a causal language model that is the shifted labels, though all labels are nearly right."""
    batch = long_tokens(seed)
    verdict = autobatch.verify(small(seed=seed), batch, shifted_token_mean, weigh)
    assert not verdict.exact
    advised, code = advice_of(verdict)
    assert code == '(batch["labels"][:, 1:] != -100).sum()'
    assert "below 1e-06 instead of" in verdict.causes[0]
    assert autobatch.verify(small(seed=seed), batch, shifted_token_mean, advised).exact


COUNTS = {
    "all labels": unshifted,
    "twice all labels": lambda batch: 2 * unshifted(batch),
    "labels as a float": lambda batch: float(unshifted(batch)),
    "samples": lambda batch: len(batch["x"]),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("step", [shifted_token_mean, token_mean])
def test_what_was_passed_is_never_advised(name, step):
    """Nor what is equal to it, on whatever scale."""
    batch, weigh = long_tokens(), COUNTS[name]
    verdict = autobatch.verify(small(), batch, step, weigh)
    if verdict.exact:
        return
    advised, _ = advice_of(verdict)
    ratios = [
        float(weigh(part) / advised(part))
        for row in range(16)
        for part in [{key: value[row : row + 1] for key, value in batch.items()}]
    ]
    assert max(ratios) - min(ratios) > 1e-3 * max(ratios)


def coupled(model, batch):
    hidden = F.normalize(model(batch["x"]).mean(1), dim=1)
    return F.cross_entropy(5 * hidden @ hidden.T, torch.arange(len(hidden)))


def test_no_count_is_advised_where_none_helps():
    """In-batch negatives stay what they are."""
    verdict = autobatch.verify(small(), tokens(), coupled, lambda batch: (batch["labels"] != -100).sum())
    assert not verdict.exact
    assert "pass weigh=lambda" not in verdict.causes[0]


def test_a_step_that_states_its_count_is_advised_to_state_another():
    """weigh= beside a stated count would be refused."""

    def step(model, batch):
        return autobatch.Mean(token_mean(model, batch), count=len(batch["x"]))

    [cause] = autobatch.verify(small(), tokens(), step).causes
    assert 'state (batch["labels"] != -100).sum() as its count' in cause


class Detector(nn.Module):
    """A class for each box of each image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.boxes = nn.Linear(6, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, images, targets):
        hidden = [self.body(image) + self.boxes(target["boxes"]) for image, target in zip(images, targets, strict=True)]
        return self.head(torch.cat(hidden).tanh())


def box_mean(model, batch):
    images, targets = batch
    return F.cross_entropy(model(images, targets), torch.cat([target["labels"] for target in targets]))


def targets_of(samples, *, as_tuples=False, empty=False):
    """Boxes and labels of each image, as many as there are."""
    generator = torch.Generator().manual_seed(4)
    counts = [(1 + 3 * row) % 5 + (0 if empty else 1) for row in range(samples)]
    boxes = [torch.rand(count, 4, generator=generator) for count in counts]
    labels = [torch.randint(4, (count,), generator=generator) for count in counts]
    return [{"boxes": one, "labels": other} for one, other in zip(boxes, labels, strict=True)]


def detection(samples, **options):
    """Images in one tensor and targets in a list."""
    return make_batch(samples)[0], targets_of(samples, **options)


BATCHES = {"images in a tensor": detection(12), "an image without boxes": detection(12, empty=True)}


@pytest.mark.parametrize("name", BATCHES)
def test_lists_of_samples_of_unequal_sizes_are_judged(name):
    """A mean over boxes is not one over images; the count that is advised makes it exact."""
    batch = BATCHES[name]
    verdict = autobatch.verify(Detector(), batch, box_mean)
    assert not verdict.exact
    assert not verdict.unchecked
    assert verdict.relative_error > 1e-2
    advised, code = advice_of(verdict)
    assert code.startswith("sum(len(item[")
    assert autobatch.verify(Detector(), batch, box_mean, advised).exact


def test_a_plan_for_lists_of_samples_warns_or_raises():
    """``fit`` says it as ``verify`` does."""
    options = {"batch": detection(12), "step": box_mean, "max_micro_batch": 6}
    plan = autobatch.fit(Detector(), 24, **options)
    [warning] = [warning for warning in plan.warnings if "not exact" in warning]
    assert "mean over sum(len(item[" in warning
    with pytest.raises(InexactSplit, match="mean over sum"):
        autobatch.fit(Detector(), 24, check="raise", **options)


def test_a_diagnosis_that_fails_leaves_the_verdict(monkeypatch, caplog):
    """What is inexact stays so, whatever becomes of the search for its cause; the log has the error."""
    monkeypatch.setattr("autobatch.exactness.loss_weights.units_of", lambda _: {}["no such thing"])
    verdict = autobatch.verify(small(), tokens(), token_mean)
    assert not verdict.exact
    assert not verdict.unchecked
    assert "its cause could not be found (KeyError" in verdict.causes[0]
    assert "no such thing" in caplog.text
