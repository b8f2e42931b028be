"""Numbers that a Trainer's own ``compute_loss`` logs: once a step, averaged with the micro-batches' weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from trainers import (
    Classes,
    Interrupted,
    Recorder,
    Texts,
    apart,
    bert,
    count_shifted,
    gpt2,
    logs_apart,
    mean_loss,
    small_device,
    train,
    trainer_of,
)
from transformers import Trainer

from autobatch.errors import InvalidArgument
from autobatch.integrations.transformers import attach

IGNORED = -100


class Logging(Trainer):
    """Logs means over the labels that the Trainer counts, a constant and a text, in two calls."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        found, wanted = outputs["logits"].detach().argmax(-1), labels
        right = (found == wanted)[wanted != IGNORED]
        self.log({"accuracy": float(right.float().mean()), "rate": 0.5})
        self.log({"accuracy of all": float(right.float().mean()), "mode": "train"})
        return (loss, outputs) if return_outputs else loss


class MeanLogging(Logging):
    """Its loss is a mean over labels, whatever the Trainer counts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = mean_loss(model(**inputs), inputs["labels"])
        self.log({"own loss": loss.item()})
        return loss


def numbers(trained):
    for log in trained.recorder.logs:
        log.pop("mode", None)
    return trained


class SampleLogging(Logging):
    """Logs its loss, a mean over samples, too."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.log({"own loss": loss.item()})
        return (loss, outputs) if return_outputs else loss


CASES = {
    "divided by the whole batch's count": (partial(trainer_of, kind=Logging), None),
    "mean over weigh": (partial(trainer_of, kind=MeanLogging), count_shifted),
    "mean over samples": (partial(trainer_of, model=bert, data=Classes(), kind=SampleLogging), None),
}


@pytest.mark.parametrize("name", CASES)
def test_logs_are_those_of_whole_batches(name, tmp_path):
    """The same numbers, equally often, and none of the trials."""
    make, weigh = CASES[name]
    whole, split = train(partial(make, tmp_path)), train(partial(make, tmp_path), attached={"weigh": weigh})
    assert len(split.sizes[0]) > 1
    assert logs_apart(numbers(whole), numbers(split)) < 1e-5
    assert len(whole.trainer.state.log_history) == len(split.trainer.state.log_history)
    assert apart(whole, split) < 1e-12
    assert "log" not in vars(split.trainer)


def test_a_retried_step_logs_once(tmp_path):
    """Also where memory ends in a backward pass, after the micro-batch has logged."""
    make = partial(trainer_of, tmp_path, kind=Logging)
    places = {2: [60], 3: [155], 4: [185], 5: [180], 6: [900]}
    whole, split = train(make), train(make, attached={}, around=Interrupted(places))
    assert split.retries == 5
    assert logs_apart(numbers(whole), numbers(split)) < 1e-5


def test_a_resumed_training_logs_the_same(tmp_path):
    """As if it had not been interrupted."""
    make = partial(trainer_of, tmp_path, kind=Logging, save_strategy="steps", save_steps=3)
    undisturbed = train(make, attached={})
    resumed = train(make, attached={}, resume=str(tmp_path / "checkpoint-3"))
    later = [log for log in numbers(undisturbed).recorder.logs if log["epoch"] >= 0.5][1:]
    for log, its in zip(later[:-1], numbers(resumed).recorder.logs[:-1], strict=True):
        assert its == pytest.approx(log, rel=1e-5)


class RunsOut(Logging):
    """Memory ends in an evaluation of more than eight samples, after all is logged."""

    def prediction_step(self, model, inputs, *arguments, **named):
        found = super().prediction_step(model, dict(inputs), *arguments, **named)
        if "prediction_step" in vars(self) and len(inputs["labels"]) > 8:
            raise torch.OutOfMemoryError("out of memory")
        return found


@pytest.mark.parametrize("name", ["divided by the whole batch's count", "mean over samples"])
def test_an_evaluation_in_parts_logs_once_a_batch(name, tmp_path):
    """The numbers of the whole batches, and none of a part that was undone."""

    def evaluate(**attached):
        data = Classes(40) if "samples" in name else Texts(40)
        model, recorder = bert if "samples" in name else gpt2, Recorder()
        options = {"given": {"eval_dataset": data}, "per_device_eval_batch_size": 20}
        trainer = trainer_of(tmp_path, model, data, kind=RunsOut, **options)
        trainer.add_callback(recorder)
        if attached:
            attach(trainer, **attached)
        trainer.evaluate()
        return [{**log, "mode": 0} for log in recorder.logs if "eval_loss" not in log]

    expected, found = evaluate(), evaluate(check=None)
    assert len(expected) == len(found) == 4
    for log, its in zip(expected, found, strict=True):
        assert its == pytest.approx(log, rel=1e-5)


class Counter:
    """An object outside of the Trainer that a step changes."""

    def __init__(self):
        self.samples = 0

    def take(self):
        return self.samples

    def put(self, taken):
        self.samples = taken


def test_trials_count_nothing_in_what_is_kept(tmp_path):
    """An object of ``keep=`` has what the steps have counted."""
    counter = Counter()

    class Counting(Trainer):
        def compute_loss(self, model, inputs, **options):
            counter.samples += len(inputs["labels"])
            return super().compute_loss(model, inputs, **options)

    train(partial(trainer_of, tmp_path, kind=Counting), attached={"keep": [counter]}, around=Interrupted({2: [60]}))
    assert counter.samples == 192


@pytest.mark.parametrize(("name", "value"), [("hooks", 5), ("hooks", [5]), ("keep", 5), ("keep", [5])])
def test_what_cannot_be_called_or_kept_is_refused_before_anything_changes(name, value, tmp_path):
    """The Trainer is as before, so that ``attach`` can be called again."""
    trainer = trainer_of(tmp_path)
    before, size = dict(vars(trainer)), trainer.args.per_device_train_batch_size
    with pytest.raises(InvalidArgument, match=rf"^{name}"):
        attach(trainer, 64, device=small_device(), **{name: value})
    assert (vars(trainer), trainer.args.per_device_train_batch_size) == (before, size)
