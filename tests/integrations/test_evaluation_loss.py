"""The loss of evaluation batches in which memory ends, beside that of the same batches run whole."""

from __future__ import annotations

import logging
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainers import (
    Classes,
    OwnLoss,
    Recorder,
    Texts,
    bert,
    count_labels,
    count_shifted,
    gpt2,
    mean_loss,
    pad,
    small_device,
    trainer_of,
)
from transformers import Trainer

from autobatch.integrations.transformers import attach


class Ignored(Classes):
    def __init__(self, count, first=0):
        super().__init__(count)
        self.first = first

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "labels": -100} if index >= self.first and index % 3 == 0 else sample


class OfClasses(Trainer):
    options = types.MappingProxyType({})

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = cross_entropy(outputs.logits, labels, **self.options)
        return (loss, outputs) if return_outputs else loss


class Summed(OfClasses):
    options = types.MappingProxyType({"reduction": "sum"})


class Weighted(OfClasses):
    options = types.MappingProxyType({"weight": torch.tensor([1.0, 3.0], dtype=torch.float64)})


def count_weights(inputs):
    """What a mean with class weights is over."""
    return Weighted.options["weight"][inputs["labels"]].sum()


def evaluate(folder, *, fits=4, weigh=None, **options):
    """The loss of batches of 20, whole or with a device that so many samples fit."""
    trainer = trainer_of(folder, per_device_eval_batch_size=20, **options)
    if fits:
        attach(trainer, device=small_device(1000 + 100 * fits), headroom=0, weigh=weigh)
    return trainer.evaluate()["eval_loss"]


CASES = {
    "classes of which some are ignored": ({"model": bert, "data": Ignored(60)}, count_labels),
    "classes of which some are ignored later": ({"model": bert, "data": Ignored(60, first=20)}, count_labels),
    "a sum": ({"model": bert, "data": Classes(60), "kind": Summed}, None),
    "an own mean over shifted labels": ({"kind": OwnLoss, "data": Texts(60)}, count_shifted),
    "label smoothing": ({"data": Texts(60), "label_smoothing_factor": 0.1}, None),
    "divided by the count": ({"data": Texts(60)}, None),
    "tokens": ({"model": partial(bert, "BertForTokenClassification", num_labels=256), "data": Texts(60)}, count_labels),
    "class weights": ({"model": bert, "data": Classes(60), "kind": Weighted}, count_weights),
    "compute_loss_func": ({"data": Texts(60), "given": {"compute_loss_func": mean_loss}}, count_shifted),
}


@pytest.mark.parametrize("name", CASES)
def test_a_divided_batch_has_the_loss_of_the_whole(name, tmp_path, caplog):
    """By each reading of it; only the shortage is in the log."""
    options, weigh = CASES[name]
    options = {**options, "given": {**options.get("given", {}), "eval_dataset": options["data"]}}
    whole = evaluate(tmp_path, fits=0, **options)
    assert evaluate(tmp_path, weigh=weigh, **options) == pytest.approx(whole, rel=1e-6)
    assert not [record for record in caplog.records if "approximate" in record.getMessage()]


@pytest.mark.parametrize("fits", [3, 4, 5])
@pytest.mark.parametrize("case", ["class weights", "some ignored", "some ignored later"])
def test_a_loss_that_is_read_otherwise_is_named_once(fits, case, tmp_path, caplog):
    """With what to do, and a number that is near."""
    data = Classes(60) if case == "class weights" else Ignored(60, first=20 if "later" in case else 0)
    kind = Weighted if case == "class weights" else Trainer
    options = {"model": bert, "data": data, "kind": kind, "given": {"eval_dataset": data}}
    whole = evaluate(tmp_path, fits=0, **options)
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        assert evaluate(tmp_path, fits=fits, **options) == pytest.approx(whole, rel=0.1)
    (line,) = [record.getMessage() for record in caplog.records if "approximate" in record.getMessage()]
    size = {3: 3, 4: 3, 5: 5}[fits]  # halves of 20
    assert f"the loss of {kind.__name__} is neither" in line
    assert "pass weigh=" in line
    assert f"per_device_eval_batch_size={size}" in line


def test_comparing_leaves_no_trace(tmp_path):
    """Random numbers are as before, and what the step counts is counted once."""

    def run(fits):
        trainer = trainer_of(tmp_path, gpt2, Texts(40), kind=OwnLoss, given={"eval_dataset": Texts(40)})
        if fits:
            attach(trainer, device=small_device(1000 + 100 * fits), headroom=0)
        torch.manual_seed(3)
        trainer.evaluate()
        return trainer.seen, torch.rand(1)

    assert run(0) == run(3)


class Squares(nn.Module):
    """A mean, or where the batch has an entry more, a sum: of the classes' errors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))

    def forward(self, input_ids, attention_mask, labels, totals=None):
        errors = (self.weight * input_ids.sum(1) / 1000 - labels) ** 2
        return {"loss": errors.mean() if totals is None else errors.sum(), "errors": errors}


class Logging(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.log({"error": float(outputs["loss"])})
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Totals(Classes):
    """Samples of a dataset whose loss is a sum."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "totals": 1.0}


def pad_totals(samples):
    totals = {"totals": torch.ones(len(samples))} if "totals" in samples[0] else {}
    return {**pad(samples), **totals}


def test_each_dataset_has_its_own_loss(tmp_path, caplog):
    """A mean over samples in the first, a sum in the second; means that are logged are the whole batches'."""

    def run(fits):
        data = {"mean": Classes(40), "sum": Totals(40), "mean again": Classes(40)}
        options = {"per_device_eval_batch_size": 20, "collate": pad_totals, "kind": Logging}
        trainer = trainer_of(tmp_path, Squares, given={"eval_dataset": data}, **options)
        recorder = Recorder()
        trainer.add_callback(recorder)
        if fits:
            attach(trainer, device=small_device(1000 + 100 * fits), headroom=0)
        found = trainer.evaluate()
        return [found[f"eval_{name}_loss"] for name in data], [log["error"] for log in recorder.logs if "error" in log]

    whole, parts = run(0), run(5)
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert parts[1][:2] + parts[1][-2:] == pytest.approx(whole[1][:2] + whole[1][-2:], rel=1e-6)
    assert not [record for record in caplog.records if "approximate" in record.getMessage()]
