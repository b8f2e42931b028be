"""What a Trainer's loss is a mean over is measured whatever ``check`` is, beside whole batches in float64."""

from __future__ import annotations

import logging
import random
from functools import partial

import numpy as np
import pytest
import torch
from sampling import sample
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from trainers import apart, count_labels, count_shifted, logs_apart, small_device, train, trainer_of
from transformers import Trainer, TrainerCallback, default_data_collator

from autobatch.errors import InexactSplit
from autobatch.integrations.transformers import attach

DIVIDED, SAMPLES = "divided by the whole batch's count", "mean over samples"
CHECKS = ("raise", "warn", None)
SINGLE = 1e-6
"""The Trainer adds up its losses in float32."""


class Points(Dataset):
    """Points of a class each; with ``tokens`` of several, of which the first few have one."""

    def __init__(self, *, ignored=False, tokens=0, alike=False, count=192):
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, *([tokens] if tokens else []), 8, generator=draw, dtype=torch.float64)
        self.labels = torch.randint(3, self.x.shape[:-1], generator=draw)
        if tokens:
            counts = 2 + torch.arange(count) % (tokens - 2)
            self.labels[torch.arange(tokens) >= counts[:, None]] = -100
        elif ignored:
            self.labels[::3] = -100
        self.alike = alike

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        row = 0 if self.alike else index
        return {"x": self.x[row], "labels": self.labels[row]}


class Model(nn.Module):
    """A model of transformers' kind: ``forward`` takes whatever the Trainer passes, and uses none of it."""

    def __init__(self, loss="mean", norm=nn.LayerNorm, draw=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Linear(16, 3)).double()
        self.reduction, self.draw, self.fits = loss, draw, 10**9

    def forward(self, x, labels=None, **kwargs):
        """Loss and logits; features of a sample are masked in train mode, as speech models do it."""
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        if self.draw is not None and self.training:
            x = x * torch.stack([self.draw() for _ in range(len(x))])
        logits = self.net(x)
        scores, targets = logits.flatten(0, -2), labels.flatten()
        if self.reduction == "shifted":
            scores, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if self.reduction == "samples":
            per_sample = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
            loss = (per_sample / (labels != -100).sum(1)).mean()
        elif self.reduction == "counted":
            loss = cross_entropy(scores, targets, reduction="sum") / (kwargs.get("num_items_in_batch") or len(x))
        else:
            loss = cross_entropy(scores, targets, reduction="sum" if self.reduction == "sum" else "mean")
        return {"loss": loss, "logits": logits}


def numpy_mask():
    """As transformers' ``_compute_mask_indices``: choices without replacement, from NumPy's global generator."""
    mask = torch.ones(8, dtype=torch.float64)
    mask[torch.from_numpy(np.random.choice(np.arange(8), 2, replace=False))] = 0
    return mask * (1 + np.random.rand())


def python_mask():
    """A span from Python's global generator; it waits for one that fits."""
    start = random.randrange(8)
    while start > 5:
        start = random.randrange(8)
    mask = torch.ones(8, dtype=torch.float64)
    mask[start : start + 1 + (random.random() < 0.5)] = random.uniform(0.1, 0.2)
    return mask


def trainer(folder, model=Model, data=None, kind=Trainer, **options):
    """A Trainer whose gradient is not clipped, so that a wrong scale of it shows."""
    chosen = {"max_steps": 3, "max_grad_norm": 1e9, "learning_rate": 0.01, "remove_unused_columns": False}
    given = {"collate": default_data_collator, "kind": kind, **chosen, **options}
    return trainer_of(folder, model, data or Points(), **given)


CASES = {
    "a mean": (partial(Model), Points(), SAMPLES),
    "a mean over samples of tokens": (partial(Model, "samples"), Points(tokens=7), SAMPLES),
    "a sum": (partial(Model, "sum"), Points(), DIVIDED),
    "a sum over tokens": (partial(Model, "sum"), Points(tokens=7), DIVIDED),
    "divided by the count": (partial(Model, "counted"), Points(tokens=7), DIVIDED),
    "a mean, masks by NumPy": (partial(Model, draw=numpy_mask), Points(), SAMPLES),
    "a sum, masks by NumPy": (partial(Model, "sum", draw=numpy_mask), Points(), DIVIDED),
    "a mean, masks by Python": (partial(Model, draw=python_mask), Points(), SAMPLES),
    "a sum, masks by Python": (partial(Model, "sum", draw=python_mask), Points(), DIVIDED),
    "a mean, labels ignored": (partial(Model), Points(ignored=True), count_labels),
    "a mean over tokens": (partial(Model), Points(tokens=7), count_labels),
    "a mean over shifted tokens": (partial(Model, "shifted"), Points(tokens=7), count_shifted),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", sample(CASES, 2))
def test_the_loss_is_read_as_the_trainer_takes_it(name, check, tmp_path):
    """Weights, losses and norms of gradients are those of whole batches, whether gradients are compared or not."""
    model, data, reading = CASES[name]
    weigh = reading if callable(reading) else None
    make = partial(trainer, tmp_path, model, data)
    whole, split = train(make), train(make, attached={"check": check, "weigh": weigh})
    assert split.step.rule.reading == ("mean over weigh(batch)" if weigh else reading)
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE
    assert set(split.sizes) == {(7, 7, 6, 6, 6)}


ADVICE = {
    "a mean, labels ignored": """(batch["labels"] != -100)""",
    "a mean over tokens": """(batch["labels"] != -100)""",
    "a mean over shifted tokens": """(batch["labels"][:, 1:] != -100)""",
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_mean_over_labels_is_refused_with_the_weigh_that_it_needs(name, tmp_path):
    """In words that can be pasted."""
    model, data, _ = CASES[name]
    with pytest.raises(InexactSplit) as raised:
        train(partial(trainer, tmp_path, model, data), attached={})
    assert f"pass weigh=lambda batch: {ADVICE[name]}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_weigh_is_refused(tmp_path):
    """What the user states is compared too."""
    with pytest.raises(InexactSplit, match="no way was found to split this loss exactly"):
        train(partial(trainer, tmp_path, Model, Points(tokens=7)), attached={"weigh": count_shifted})


@pytest.mark.parametrize("name", ADVICE)
def test_without_a_check_a_loss_of_another_reading_is_named(name, tmp_path, caplog):
    """It is divided as a mean over samples, which has no wrong scale."""
    model, data, _ = CASES[name]
    make = partial(trainer, tmp_path, model, data)
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        whole, split = train(make), train(make, attached={"check": None})
    assert any("could not read the loss as a mean or a sum" in record.getMessage() for record in caplog.records)
    assert logs_apart(whole, split, ["loss", "grad_norm"]) < 0.5


class Shortage(TrainerCallback):
    """In the second step memory ends with more than two samples."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.fits = 2 if state.global_step == 1 else 10**9


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("largest", [7, 32])
def test_a_shortage_in_the_middle_changes_no_scale(loss, check, largest, tmp_path):
    """Also where all steps before it have run whole."""
    make = partial(trainer, tmp_path, partial(Model, loss))
    whole = train(make)
    split = train(
        make,
        attached={"check": check, "device": small_device(1000 + 100 * largest)},
        around=lambda one: one.add_callback(Shortage()),
    )
    assert split.retries
    assert len(split.sizes[1]) >= 16
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE


@pytest.mark.parametrize(("loss", "reading"), [("mean", SAMPLES), ("sum", DIVIDED)])
@pytest.mark.parametrize("ignored", [False, True])
def test_batch_norm_without_a_check_is_read_right(loss, reading, ignored, tmp_path):
    """It is not exact, as its statistics are a micro-batch's; no factor is lost."""
    make = partial(trainer, tmp_path, partial(Model, loss, nn.BatchNorm1d), Points(ignored=ignored))
    whole, split = train(make), train(make, attached={"check": None})
    assert split.step.rule.reading == reading
    assert 1e-3 < logs_apart(whole, split, ["loss", "grad_norm"]) < 0.5


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_batch_norm_is_the_only_cause(loss, mode, tmp_path):
    """In whatever mode the model was: the Trainer's step sets it anew each time."""
    with pytest.raises(InexactSplit, match="BatchNorm in train mode") as raised:
        train(partial(trainer, tmp_path, lambda: Model(loss, nn.BatchNorm1d).train(mode)), attached={})
    assert "depends on the others" not in str(raised.value)
    assert "weigh=" not in str(raised.value)


class Frozen(Model):
    """Its BatchNorm layers stay in eval mode, as in detectors that are fine-tuned."""

    def train(self, mode=True):
        super().train(mode)
        for layer in self.net:
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        return self


@pytest.mark.parametrize("check", CHECKS)
def test_batch_norm_that_stays_in_eval_mode_is_exact(check, tmp_path):
    """The model's own ``train`` decides."""
    make = partial(trainer, tmp_path, partial(Frozen, norm=nn.BatchNorm1d))
    whole, split = train(make), train(make, attached={"check": check})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE


OWN = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def _same_draws():
    """Begin each test with the same numbers, whichever tests ran before it."""
    OWN.bit_generator.state = np.random.default_rng(3).bit_generator.state


def own_mask():
    """From a generator that nothing can hold still."""
    return torch.from_numpy(OWN.uniform(0.7, 1.3, 8))


@pytest.mark.parametrize(("loss", "reading"), [("mean", SAMPLES), ("sum", DIVIDED)])
@pytest.mark.parametrize("check", ["warn", None])
def test_where_nothing_can_be_compared_values_decide_and_are_named(loss, reading, check, tmp_path, caplog):
    """A sum of parts is as many means."""
    make = partial(trainer, tmp_path, partial(Model, loss, draw=own_mask))
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        whole, split = train(make), train(make, attached={"check": check})
    assert split.step.rule.reading == reading
    assert logs_apart(whole, split, ["loss", "grad_norm"]) < 0.2
    assert any(reading in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


class Penalised(Trainer):
    """Adds a penalty of weights; where it is mended, each micro-batch's share of it."""

    is_mended = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """A share of the batch's mean, and the penalty."""
        self.model_accepts_loss_kwargs = True
        loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]
        share = (inputs["labels"] != -100).sum() / num_items_in_batch if self.is_mended else 1
        return loss + share * 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())


class Mended(Penalised):
    is_mended = True


def test_a_penalty_of_weights_is_named_and_mended(tmp_path):
    """It counts once a micro-batch; a Trainer's way to count it once a step is its share of the labels."""
    make = partial(trainer, tmp_path, partial(Model, "counted"), Points(tokens=7))
    with pytest.raises(InexactSplit, match="counts once a micro-batch") as raised:
        train(partial(make, kind=Penalised), attached={})
    assert "num_items_in_batch" in str(raised.value)
    assert "in-batch" not in str(raised.value)
    assert "\n" not in str(raised.value)
    whole, split = train(partial(make, kind=Mended)), train(partial(make, kind=Mended), attached={})
    assert apart(whole, split) < 1e-9  # the share is a float32
    assert logs_apart(whole, split) < SINGLE


@pytest.mark.parametrize("check", ["warn", None])
def test_a_penalty_hides_no_count(check, tmp_path):
    """The data's part of the gradient is that of the batch, and the penalty is added as often as the Trainer would."""
    make = partial(trainer, tmp_path, partial(Model, "counted"), Points(tokens=7), Penalised, max_steps=1)
    split = train(make, attached={"check": check})
    assert split.step.rule.reading == DIVIDED


class Noisy(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] * OWN.uniform(0.99, 1.01)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(("kind", "near"), [(Trainer, 1e-6), (Noisy, 0.05)])
@pytest.mark.parametrize("check", CHECKS)
def test_evaluation_reads_the_loss_whatever_the_check(loss, kind, near, check, tmp_path):
    """The loss of batches that run in parts is the whole's; near it where numbers are drawn."""

    def make():
        given = {"eval_dataset": Points(count=40)}
        return trainer(tmp_path, partial(Model, loss), kind=kind, given=given, per_device_eval_batch_size=20)

    whole, split = make(), make()
    attach(split, device=small_device(), headroom=0, check=check)
    assert split.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=near)
    assert split.prediction_step.size < 20
