"""What the attributes of a Hugging Face Trainer hold, put back when a step or a trial is undone."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

from trainers import TARGET, Classes, Interrupted, bert, train, trainer_of
from transformers import Trainer, TrainerCallback

from autobatch.integrations.transformers.trainer_step import TrainerAttributes


class Reads(TrainerCallback):
    def __init__(self, counts):
        self.counts, self.seen = counts, []

    def on_step_end(self, *_, **__):
        self.seen.append(self.counts.get("samples", 0))


class Shares(Trainer):
    """Counts in a dict that a callback has, and in a list that two attributes are."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.counts, self.batches = {}, []
        self.alias = self.batches
        self.reads = Reads(self.counts)
        self.add_callback(self.reads)

    def compute_loss(self, model, inputs, *arguments, **options):
        samples = len(inputs["labels"])
        self.counts["samples"] = self.counts.get("samples", 0) + samples
        self.batches.append(samples)
        return super().compute_loss(model, inputs, *arguments, **options)


def test_what_a_callback_shares_stays_shared(tmp_path):
    """After the first batch's trials, and after a step that was retried."""
    make = partial(trainer_of, tmp_path, bert, Classes(), kind=Shares)
    split = train(make, attached={}, around=Interrupted({3: [300]}))
    assert split.retries == 1
    assert split.trainer.reads.seen == [TARGET * step for step in range(1, 7)]
    assert split.trainer.alias is split.trainer.batches
    assert sum(split.trainer.batches) == 6 * TARGET


def test_long_lists_of_metrics():
    """More entries than any other container may have: what TRL adds in a step that is undone is taken out."""
    losses = [1.0] * 1200
    metrics = defaultdict(lambda: defaultdict(list))
    metrics["eval"]["loss"] = losses
    trainer = SimpleNamespace(_metrics=metrics, _stored_metrics={"train": {"logits": [1.0] * 1200}})
    attributes = TrainerAttributes(trainer)
    taken = attributes.take()
    for _ in range(2):
        losses.append(2.0)
        metrics["eval"]["entropy"].append(3.0)
        metrics["train"]["loss"].append(3.0)
        trainer._stored_metrics["train"]["logits"] += [1.0, 2.0]
        attributes.put(taken)
        assert metrics["eval"]["loss"] is losses
        assert losses == [1.0] * 1200
        assert [*metrics] == ["eval"]
        assert [*metrics["eval"]] == ["loss"]
        assert len(trainer._stored_metrics["train"]["logits"]) == 1200
