"""The loss of evaluation batches in which memory ends, beside that of the same batches run whole."""

from __future__ import annotations

import logging
import types
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainers import Classes, OwnLoss, Packed, Recorder, Texts, bert, gpt2, mean_loss, pad, small_device, trainer_of
from transformers import Trainer

from autobatch.integrations.transformers import attach
from autobatch.integrations.transformers.evaluation_loss import EvaluationKinds, EvaluationLoss, find_contrast, weigh


class Ignored(Classes):
    """Some of the classes do not count."""

    def __init__(self, count, first=0):
        super().__init__(count)
        self.first = first

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "labels": -100} if index >= self.first and index % 3 == 0 else sample


class OfClasses(Trainer):
    """A loss of one's own."""

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


def evaluate(folder, *, fits=4, **options):
    """The loss of batches of 20, whole or with a device that so many samples fit."""
    trainer = trainer_of(folder, per_device_eval_batch_size=20, **options)
    if fits:
        attach(trainer, device=small_device(1000 + 100 * fits), headroom=0)
    return trainer.evaluate()["eval_loss"]


CASES = {
    "classes of which some are ignored": {"model": bert, "data": Ignored(60)},
    "classes of which some are ignored later": {"model": bert, "data": Ignored(60, first=20)},
    "a sum": {"model": bert, "data": Classes(60), "kind": Summed},
    "an own mean over shifted labels": {"kind": OwnLoss, "data": Texts(60)},
    "an own mean over shifted labels, texts of one length at first": {"kind": OwnLoss, "data": Packed(60, 20)},
    "label smoothing": {"data": Texts(60), "label_smoothing_factor": 0.1},
    "tokens": {"model": partial(bert, "BertForTokenClassification", num_labels=256), "data": Texts(60)},
    "compute_loss_func": {"data": Texts(60), "given": {"compute_loss_func": mean_loss}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_divided_batch_has_the_loss_of_the_whole(name, tmp_path, caplog):
    """Whatever it is a mean over; nothing is said but that memory ended."""
    options = CASES[name]
    options = {**options, "given": {**options.get("given", {}), "eval_dataset": options["data"]}}
    whole = evaluate(tmp_path, fits=0, **options)
    assert evaluate(tmp_path, **options) == pytest.approx(whole, rel=1e-6)
    assert not [record for record in caplog.records if "approximate" in record.getMessage()]


@pytest.mark.parametrize("fits", [3, 4, 5])
def test_a_loss_that_is_none_of_these_is_named_once(fits, tmp_path, caplog):
    """With what to do, and a number that is near."""
    options = {"model": bert, "data": Classes(60), "kind": Weighted, "given": {"eval_dataset": Classes(60)}}
    whole = evaluate(tmp_path, fits=0, **options)
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        assert evaluate(tmp_path, fits=fits, **options) == pytest.approx(whole, rel=0.1)
    (line,) = [record.getMessage() for record in caplog.records if "approximate" in record.getMessage()]
    size = {3: 3, 4: 3, 5: 5}[fits]  # halves of 20
    assert line == (
        "the loss of Weighted is not a mean or sum over samples or labels, so it is approximate for "
        f"evaluation batches that run in parts: with per_device_eval_batch_size={size} they run whole"
    )


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


def test_a_loss_in_bfloat16():
    """Parts then differ from the whole by rounding, and no warning is due."""
    arguments = SimpleNamespace(bf16=True, fp16=False, bf16_full_eval=False, fp16_full_eval=False)
    trainer = SimpleNamespace(args=arguments, model=torch.nn.Linear(1, 1))
    loss = EvaluationLoss(trainer)
    parts = [(torch.tensor(1.0), weigh(trainer, {}, 3)), (torch.tensor(2.0), weigh(trainer, {}, 2))]
    loss.learn(torch.tensor(1.41), torch.tensor(1.41), parts, 5)
    assert loss.ways == ["mean over samples"]


def test_samples_that_tell_most():
    """Neighbours of which one part has many labels and no part has none."""
    labels = torch.tensor([-100, -100, -100, 1, 1, 1, 1, -100, 1, -100, 1, 1])
    start = find_contrast({"labels": labels}, 12, 4, 2)
    counted = (labels[start : start + 4] != -100).reshape(2, 2).sum(1).tolist()
    assert sorted(counted) == [1, 2]
    assert find_contrast({"labels": torch.ones(12)}, 12, 4, 2) == 0


class Squares(nn.Module):
    """A mean, or where the batch has an entry more, a sum: of the classes' errors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))

    def forward(self, input_ids, attention_mask, labels, totals=None):
        errors = (self.weight * input_ids.sum(1) / 1000 - labels) ** 2
        return {"loss": errors.mean() if totals is None else errors.sum(), "errors": errors}


class Logging(Trainer):
    """Logs what the loss is, too."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.log({"error": float(outputs["loss"])})
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Totals(Classes):
    """Samples of a dataset whose loss is a sum."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "totals": 1.0}


def pad_totals(samples):
    """A batch with their entry."""
    totals = {"totals": torch.ones(len(samples))} if "totals" in samples[0] else {}
    return {**pad(samples), **totals}


def test_each_dataset_has_its_own_loss(tmp_path, caplog):
    """A mean over samples in the first, a sum in the second; what is logged, too."""

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
    assert parts[1] == pytest.approx(whole[1], rel=1e-6)
    assert not [record for record in caplog.records if "approximate" in record.getMessage()]


def test_losses_that_any_way_puts_together_alike_are_not_compared():
    """Losses of 0: nothing is run again for them."""
    trainer = SimpleNamespace()
    parts = [(torch.tensor(0.0), weigh(trainer, {}, 3)), (torch.tensor(0.0), weigh(trainer, {}, 2))]
    loss = EvaluationLoss(trainer)
    assert not loss.is_open(parts)
    assert loss.is_open([(torch.tensor(1.0), parts[0][1]), parts[1]])


def test_texts_that_differ_in_each_batch_are_one_kind_at_last(caplog):
    """So that samples are not run again in each of them; entries of other names are another kind still."""
    kinds = EvaluationKinds(SimpleNamespace())

    def find(**entries):
        return kinds.find({"labels": torch.ones(2), **entries})

    found = [find(file=f"{number}.txt") for number in range(100)]
    assert len({id(kind) for kind in found}) == 33
    assert find(file="0.txt") is found[0]
    assert find() is not found[-1]
    datasets = [find(file="new", dataset_name=f"{number}") for number in range(100)]
    assert len({id(kind) for kind in datasets}) == 100
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "evaluation batches of SimpleNamespace have 32 kinds, so batches that differ only by a new text in "
        "file count as one kind from now on, and their losses are combined in one way"
    )
