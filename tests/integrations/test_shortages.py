"""Hugging Face's Trainer where memory ends: in training, in evaluation, and before a checkpoint that is resumed."""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import pytest
from sampling import sample
from trainers import (
    TARGET,
    Classes,
    Interrupted,
    OwnLoss,
    Texts,
    apart,
    bert,
    bit_for_bit,
    count_labels,
    count_shifted,
    gpt2,
    logs_apart,
    pad_masked,
    saved_state,
    small_device,
    train,
    trainer_of,
)
from transformers import Trainer

from autobatch.integrations.transformers import attach
from autobatch.integrations.transformers.trainer_step import TrainerAttributes
from autobatch.testing import oom_at

SINGLE = 1e-6
"""The Trainer adds up its losses in float32."""

FAULTS = {2: [57], 3: [300, 900], 4: [40]}


def test_what_a_step_counts_is_counted_once(tmp_path):
    """A number in the Trainer's attributes: neither the first batch's trials nor a retry leave anything in it."""

    def fail_once(trainer):
        inner, calls = trainer.training_step, []

        def step(*arguments):
            calls.append(1)
            with oom_at(400) if len(calls) == 3 else contextlib.nullcontext():
                return inner(*arguments)

        trainer.training_step = step

    trained = train(partial(trainer_of, tmp_path, kind=OwnLoss), attached={"weigh": count_shifted}, around=fail_once)
    assert trained.trainer.seen == 6 * TARGET
    assert trained.trainer.steps_done == sum(map(len, trained.sizes))
    assert trained.retries == 1


def test_looking_for_the_largest_samples_draws_nothing(tmp_path):
    """Where the collate function draws, and all fits: bit for bit as without autobatch."""
    make = partial(trainer_of, tmp_path, partial(bert, "BertForMaskedLM"), collate=pad_masked)
    options = {"device": small_device(10_000), "weigh": count_labels}
    whole, attached = train(make), train(make, attached=options)
    assert set(attached.sizes) == {(TARGET,)}
    assert bit_for_bit(whole, attached)


def test_steps_that_run_out_of_memory_end_exactly(tmp_path):
    """In forward, in backward and at once: weights to 1e-12, and the Trainer hears nothing of it."""
    make = partial(trainer_of, tmp_path)
    whole, split = train(make), train(make, attached={}, around=Interrupted(FAULTS))
    assert split.retries == 4
    assert apart(whole, split) < 1e-12
    assert split.recorder.calls == whole.recorder.calls
    assert logs_apart(whole, split) < SINGLE


def test_a_retried_step_is_bit_for_bit_the_planned_one(tmp_path):
    """With dropout in float32: a step in the final sizes from the start draws the same and ends the same."""

    def begin_smaller(trainer):
        inner, calls = trainer.training_step, []

        def step(*arguments):
            calls.append(1)
            if len(calls) == 2:
                inner.runner.load_state_dict({**after, "steps": 1})
            return inner(*arguments)

        trainer.training_step = step

    make = partial(trainer_of, tmp_path, lambda: gpt2(dropout=0.1).float(), max_steps=2)
    retried = train(make, attached={}, around=Interrupted({2: [57]}))
    assert retried.retries == 1
    after = retried.step.runner.state_dict()
    planned = train(make, attached={}, around=begin_smaller)
    assert planned.retries == 0
    assert planned.sizes == retried.sizes
    assert bit_for_bit(retried, planned)


@pytest.mark.parametrize("kind", [Trainer, OwnLoss])
def test_memory_that_ends_at_every_fifth_operation_of_a_step(kind, tmp_path, quiet_log):
    """Each time the gradient, the loss and the Trainer's own counts are those of the undisturbed step."""
    outcomes = {"exact": 0, "wrong": []}

    def sweep(trainer):
        attached, calls = trainer.training_step, []

        def measure(positions, model, batch, items):
            attached._bind(model, attached.plan)
            model.zero_grad()
            before = TrainerAttributes(trainer).take()
            with oom_at(*positions) as planned:
                loss = attached(model, dict(batch), items)
            counted = getattr(trainer, "seen", 0)
            TrainerAttributes(trainer).put(before)
            return planned.operations, (
                float(loss),
                counted,
                [parameter.grad.clone() for parameter in model.parameters()],
            )

        def step(model, inputs, num_items_in_batch=None):
            calls.append(1)
            if len(calls) == 2:
                operations, (loss, counts, gradients) = measure([10**9], model, inputs, num_items_in_batch)
                for position in sample(range(1, operations + 1, 5), 6):
                    _, (its, its_counts, others) = measure([position], model, inputs, num_items_in_batch)
                    errors = [float((a - b).abs().max()) for a, b in zip(gradients, others, strict=True)]
                    is_exact = max(errors) < 1e-14 and abs(its - loss) < 1e-12 and its_counts == counts
                    outcomes["exact"] += is_exact
                    outcomes["wrong"] += [] if is_exact else [(position, max(errors))]
                model.zero_grad()
            return attached(model, inputs, num_items_in_batch)

        trainer.training_step = step

    make = partial(trainer_of, tmp_path, partial(gpt2, n_layer=1), kind=kind, max_steps=2)
    weigh = count_shifted if kind is OwnLoss else None
    train(make, attached={"device": small_device(2600), "weigh": weigh}, around=sweep)
    assert outcomes["wrong"] == []
    assert outcomes["exact"] > 40


@pytest.mark.parametrize(("model", "data"), [(gpt2, Texts(48)), (bert, Classes(48))], ids=["GPT-2", "BERT"])
def test_evaluation_goes_on_with_less(model, data, tmp_path, caplog):
    """Loss and predictions are those of the whole batches; the size that fits stays for the batches after."""

    def make():
        given = {"eval_dataset": data, "compute_metrics": lambda found: {"sum": found.predictions.sum()}}
        return trainer_of(tmp_path, model, data, given=given, per_device_eval_batch_size=20, max_steps=1)

    expected = train(make).trainer.evaluate()
    trained = train(make, attached={})
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        found = trained.trainer.evaluate()
    for name in ("eval_loss", "eval_sum"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12)
    sizes = [record.args[:2] for record in caplog.records if "evaluation" in record.message]
    assert sizes == [(20, 10), (10, 5)]


def test_evaluation_before_training(tmp_path):
    """Without a plan there is no limit but the device's own."""
    trainer = trainer_of(tmp_path, given={"eval_dataset": Texts(40)})
    expected = trainer.evaluate()["eval_loss"]
    attached = trainer_of(tmp_path, given={"eval_dataset": Texts(40)})
    attach(attached)
    with oom_at(200):
        assert attached.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("restores", [False, True], ids=["", "with its callbacks"])
def test_a_resumed_run_ends_bit_for_bit(restores, tmp_path):
    """With dropout, in float32, in the smaller size that a shortage before the checkpoint has left."""

    def make(folder):
        options = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
        options["restore_callback_states_from_checkpoint"] = restores
        return trainer_of(tmp_path / folder, lambda: gpt2(dropout=0.1).float(), **options)

    first = train(partial(make, "one"), attached={}, around=Interrupted({2: [57]}))
    checkpoint = tmp_path / "one" / "checkpoint-3"
    resumed = train(partial(make, "two"), attached={}, resume=str(checkpoint))
    assert resumed.sizes == first.sizes[3:]
    assert bit_for_bit(first, resumed)
    assert first.recorder.logs[3:-1] == resumed.recorder.logs[:-1]
    assert resumed.step.plan == first.step.plan
    saved = [saved_state(tmp_path / folder / "checkpoint-6")["stateful_callbacks"] for folder in ("one", "two")]
    assert saved[0]["AutobatchState"] == saved[1]["AutobatchState"]


def test_a_checkpoint_from_before_autobatch_is_resumed(tmp_path):
    """It knows neither plan nor size, and the next checkpoint has them."""
    make = partial(trainer_of, tmp_path, save_strategy="steps", save_steps=2)
    train(make)
    resumed = train(make, attached={}, resume=str(tmp_path / "checkpoint-2"))
    assert len(resumed.sizes) == 4
    assert saved_state(tmp_path / "checkpoint-6")["stateful_callbacks"]["AutobatchState"]["attributes"]["saved"]
