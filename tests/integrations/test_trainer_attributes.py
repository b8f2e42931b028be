"""What the attributes of a Hugging Face Trainer hold, put back when a step or a trial is undone."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from types import SimpleNamespace

import torch
from trainers import TARGET, Classes, Interrupted, bert, train, trainer_of
from transformers import Trainer, TrainerCallback

from autobatch.integrations.transformers.trainer_step import TrainerAttributes


class Reads(TrainerCallback):
    """Logs what it shares with the Trainer."""

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


def test_every_kind_of_container_keeps_its_identity():
    """Nested ones, and tensors; twice, as a step may be retried twice."""
    inner, row = [1], torch.zeros(2)
    data = {"inner": inner, "row": row, "names": {"a"}, "last": deque([1, 2], maxlen=2), "pair": (inner, 1)}
    metrics = defaultdict(lambda: defaultdict(list))
    metrics["train"]["loss"].append(1.0)
    losses = metrics["train"]["loss"]
    trainer = SimpleNamespace(
        data=data, row=row, metrics=metrics, count=1, model=object(), wide=torch.ones(1).expand(3)
    )
    attributes = TrainerAttributes(trainer)
    taken, objects = attributes.take(), dict(vars(trainer))
    for _ in range(2):
        inner.append(2)
        row.add_(1)
        data["names"].add("b")
        data["last"].append(3)
        losses.append(2.0)
        trainer.metrics["eval"]["loss"].append(3.0)
        del data["pair"]
        trainer.data, trainer.count, trainer.new, trainer.model = {}, 2, [1], None
        attributes.put(taken)
        assert {**vars(trainer), "model": None} == {**objects, "model": None}
        assert trainer.data is data
        assert data == {"inner": [1], "row": row, "names": {"a"}, "last": deque([1, 2]), "pair": ([1], 1)}
        assert data["inner"] is data["pair"][0] is inner
        assert trainer.metrics["train"]["loss"] is losses
        assert losses == [1.0]
        assert [*trainer.metrics] == ["train"]
        assert trainer.row is data["row"] is row
        assert row.tolist() == [0, 0]


def test_tensors_of_another_shape_or_of_inference():
    """A tensor that a step has resized has its old shape again, and one of an evaluation its value."""
    grown = torch.ones(2)
    with torch.inference_mode():
        made = torch.zeros(2)
    trainer = SimpleNamespace(grown=grown, made=made)
    attributes = TrainerAttributes(trainer)
    taken = attributes.take()
    grown.data = torch.zeros(3)
    with torch.inference_mode():
        made.add_(1)
    attributes.put(taken)
    assert trainer.grown is grown
    assert (grown.tolist(), made.tolist()) == ([1, 1], [0, 0])


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
