"""What an evaluation whose batches run in parts leaves behind, beside the same with whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainers import Classes, bert, pad, small_device, trainer_of
from transformers import Trainer

from autobatch.integrations.transformers import attach
from autobatch.testing import oom_at


class Tally:
    """As a metric of a library: an object of another class."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("samples", torch.zeros(2000))

    def forward(self, labels):
        self.samples[: len(labels)] += 1


class Counts(Trainer):
    """Counts samples before a pass and after it; in between, memory ends if they are too many."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.tally, self.collected, self.counting = Tally(), [], Counting()
        self.model.seen = []
        self.model.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        labels = inputs["labels"]
        self.tally.seen += len(labels)
        self.counting(labels)
        model.seen.append(len(labels))
        model.rows += len(labels)
        if len(labels) > self.most:
            raise torch.OutOfMemoryError("of a test")
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        self.collected.append(logits.repeat(1, 500))
        return loss, logits, labels


def evaluate(folder, kind=Counts, *, fits=None, keep=()):
    """The Trainer after an evaluation of three batches of 20, whole or where so many samples fit."""
    data = Classes(60)
    trainer = trainer_of(folder, bert, data, kind=kind, given={"eval_dataset": data}, per_device_eval_batch_size=20)
    trainer.most = fits or 20
    if fits:
        device = small_device(10**6 if kind is Counts else 1000 + 100 * fits)
        attach(trainer, device=device, headroom=0, keep=[getattr(trainer, name) for name in keep])
    trainer.evaluate()
    return trainer


def test_what_keep_names_counts_each_sample_once(tmp_path):
    """Metrics of other classes, modules and large results; and what the model itself counts."""
    whole, parts = evaluate(tmp_path), evaluate(tmp_path, fits=8, keep=["tally", "collected", "counting"])
    assert parts.prediction_step.size == 5
    assert parts.tally.seen == whole.tally.seen == 60
    assert torch.allclose(torch.cat(parts.collected), torch.cat(whole.collected))
    assert parts.counting.samples.sum() == whole.counting.samples.sum() == 60
    assert sum(parts.model.seen) == sum(whole.model.seen) == 60
    assert parts.model.rows == whole.model.rows == 60


class Writes(Trainer):
    """Counts classes in a large tensor that nobody names, and adds to metrics as TRL does, which have many entries."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.histogram = torch.zeros(5000)
        self._metrics = {"train": {}, "eval": {"share": [0.0] * 1200}}

    def compute_loss(self, model, inputs, *arguments, **options):
        labels = inputs["labels"]
        self.histogram += torch.bincount(labels, minlength=5000)
        self._metrics["eval"]["share"].append(float(labels.double().mean()))
        return super().compute_loss(model, inputs, *arguments, **options)


def test_what_is_compared_is_not_counted(tmp_path):
    """Memory that is written into is put back, whoever holds it, and a batch has one entry of each metric."""
    whole, parts = evaluate(tmp_path, Writes), evaluate(tmp_path, Writes, fits=5)
    assert parts.prediction_step.size == 5
    assert torch.equal(parts.histogram, whole.histogram)
    assert parts._metrics["eval"]["share"] == pytest.approx(whole._metrics["eval"]["share"])


def test_memory_that_ends_anywhere_in_an_evaluation(tmp_path, quiet_log):
    """In a part, in the record of what it may change, in samples that are run again: all is as with a whole batch."""
    batch = pad([Classes(20)[index] for index in range(20)])
    outcomes = []

    def measure(*positions):
        trainer = trainer_of(tmp_path, bert, kind=Counts)
        trainer.most = 10 if positions else 20  # so that the rest of the batch is compared
        if positions:
            attach(trainer, device=small_device(10**6), headroom=0, keep=[trainer.tally])
        with oom_at(*positions or [10**9]) as planned:
            loss = trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=False)[0]
        outcomes.append((float(loss), trainer.tally.seen, sum(trainer.model.seen), int(trainer.model.rows)))
        return planned.operations

    measure()
    for position in range(1, measure(10**9) - 8, 9):  # the last ones put the results together
        measure(position)
    assert len(outcomes) > 40
    for outcome in outcomes:
        assert outcome == pytest.approx(outcomes[0], rel=1e-12)
