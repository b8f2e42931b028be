"""The rule by which a Trainer divides its loss is found again if later batches are of another kind, or show more."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import SequentialSampler
from trainers import (
    Classes,
    Packed,
    Texts,
    apart,
    bert,
    bit_for_bit,
    count_labels,
    gpt2,
    logs_apart,
    pad,
    train,
    trainer_of,
)
from transformers import Trainer
from trl_trainers import embedder_of_two

from autobatch.errors import InexactSplit

SINGLE = 1e-6
"""The Trainer adds up its losses in float32."""


class InOrder(Trainer):
    """Its batches are the dataset's, one after another: 32 samples each."""

    def _get_train_sampler(self, *_, **__):
        return SequentialSampler(self.train_dataset)


class SomeIgnored(Classes):
    """Every third class is ignored, but in the first two batches."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "labels": -100} if index >= 64 and index % 3 == 0 else sample


class PackedClasses(Packed):
    """Texts of one length in the first two batches, with a class each."""

    def __init__(self):
        super().__init__(ragged_from=64)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index], "labels": sum(self.texts[index]) % 2}


class MeanOverPositions(nn.Module):
    """Takes padding for text: its batches must not be trimmed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.classify = nn.Embedding(256, 16), nn.Linear(16, 2)
        self.double()

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.classify(torch.tanh(self.embed(input_ids)).mean(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def mean_over_all_labels(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100)


def test_a_rule_is_found_again_if_a_later_batch_shows_more(tmp_path):
    """The first two batches have no padding, so that nothing was trimmed in the comparison."""
    make = partial(trainer_of, tmp_path, kind=InOrder, model=MeanOverPositions, data=PackedClasses())
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE
    assert str(split.step.rule) == "micro-batches are rows; the loss is a mean over samples"


LATER = {
    "classes that are ignored later": ({"model": bert, "data": SomeIgnored()}, count_labels),
    "unequal numbers of labels later": (
        {"data": Packed(ragged_from=64), "given": {"compute_loss_func": mean_over_all_labels}},
        count_labels,
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_mean_over_labels_is_refused_when_a_batch_shows_it(name, tmp_path):
    """It is a mean over samples until labels are ignored; the error says what to pass, and with that it is exact."""
    options, weigh = LATER[name]
    make = partial(trainer_of, tmp_path, kind=InOrder, **options)
    with pytest.raises(InexactSplit, match="no way was found to split this loss exactly") as raised:
        train(make, attached={})
    assert "weigh=" in str(raised.value)
    assert "\n" not in str(raised.value)
    whole, split = train(make), train(make, attached={"weigh": weigh})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE
    assert split.step.rule.reading == "mean over weigh(batch)"


class Changing(Trainer):
    """From its third step on it adds a loss that compares samples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean over samples, and later the spread of the logits."""
        outputs = model(**inputs)
        loss = outputs.loss + (outputs.logits.std() if self.state.global_step >= 2 else 0)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_that_changes_as_it_trains_is_found_out(tmp_path):
    """Batches 2, 4, 8 and so on are compared with their parts as the first was."""
    with pytest.raises(InexactSplit, match="Changing: no way was found to split this loss exactly"):
        train(partial(trainer_of, tmp_path, kind=Changing, model=bert, data=Classes()), attached={})


class OfTasks(InOrder):
    """Its third batch is of another task, whose loss compares samples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean over samples, and for that task the spread of the logits."""
        task = inputs.pop("task")
        outputs = model(**inputs)
        loss = outputs.loss + (outputs.logits.std() if task == "spread" else 0)
        return (loss, outputs) if return_outputs else loss


class OneOfTwoTasks(Classes):
    """Texts with a class and a task each."""

    def __getitem__(self, index):
        """The third 32 are of another task."""
        return {**super().__getitem__(index), "task": "spread" if index // 32 == 2 else "plain"}


def test_a_batch_of_another_kind_is_compared_when_it_comes(tmp_path):
    """The third is none of those that are compared by their number."""

    def collate(samples):
        return {**pad(samples), "task": samples[0]["task"]}

    data, options = OneOfTwoTasks(), {"remove_unused_columns": False}
    make = partial(trainer_of, tmp_path, kind=OfTasks, model=bert, data=data, collate=collate, **options)
    with pytest.raises(InexactSplit, match="OfTasks: no way was found to split this loss exactly"):
        train(make, attached={})


def test_what_is_known_not_to_be_exact_is_compared_once(tmp_path, caplog):
    """With check='warn' there is one warning, and not one for each batch that would be compared."""
    make = partial(trainer_of, tmp_path, kind=Changing, model=bert, data=Classes())
    train(make, attached={"check": "warn"})
    assert sum("no way was found" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("first", ["one", "other"])
def test_each_dataset_has_its_own_rule(first, tmp_path):
    """Both losses are exact: batches of both datasets come in turn, and each is divided as it must be."""
    losses = {"one": "CosineSimilarityLoss", "other": "TripletLoss"}
    make = partial(embedder_of_two, tmp_path, losses, first)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE


def test_a_resumed_training_knows_whose_rule_was_saved(tmp_path):
    """The next batch is of the other dataset: its rule is found, and all ends as if nothing had been interrupted."""
    losses = {"one": "CosineSimilarityLoss", "other": "TripletLoss"}
    make = partial(embedder_of_two, tmp_path, losses, "one", save_strategy="steps", save_steps=3)
    undisturbed = train(make, attached={})
    resumed = train(make, attached={}, resume=str(tmp_path / "checkpoint-3"))
    assert bit_for_bit(undisturbed, resumed)


@pytest.mark.parametrize("first", ["one", "other"])
def test_a_dataset_whose_loss_compares_samples_is_refused_when_it_comes(first, tmp_path):
    """Whichever comes first."""
    losses = {"one": "CosineSimilarityLoss", "other": "CoSENTLoss"}
    with pytest.raises(InexactSplit, match="depends on the others in its micro-batch"):
        train(partial(embedder_of_two, tmp_path, losses, first), attached={})


class Pairs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs[0], labels=inputs[1])
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_batch_may_be_a_tuple(tmp_path):
    """Rows of both tensors."""

    def collate(samples):
        rows = torch.tensor([sample["input_ids"] for sample in samples])
        return rows, torch.tensor([sum(sample["input_ids"]) % 2 for sample in samples])

    make = partial(trainer_of, tmp_path, kind=Pairs, model=bert, data=Packed(), collate=collate)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12


def test_a_model_of_which_two_samples_do_not_fit_is_not_called_inexact(tmp_path):
    """It could not be checked, which is another thing."""
    make = partial(trainer_of, tmp_path, model=gpt2, data=Texts())
    with pytest.raises(InexactSplit, match=r"it could not be checked whether this loss can be split: .*memory"):
        train(make, attached={"device": one_sample_device()})


def one_sample_device():
    from autobatch.testing import FakeDevice

    return FakeDevice(lambda samples: 1000 + 100 * samples, total_bytes=1150)
