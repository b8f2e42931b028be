"""Hugging Face's Trainer with autobatch, beside the Trainer's own whole batches: 32 samples x 1, in float64.

Covers weights, logs, callbacks and learning rates for each option of the Trainer, what a loss turns out to be a mean
over, evaluation, resuming, and memory that ends. Does not cover other libraries' Trainers (``test_trl``,
``test_sentence_transformers``), several ranks (``test_ranks``), nor what is refused (``test_refusals``).
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from trainers import (
    TARGET,
    Classes,
    Interrupted,
    Numbers,
    Packed,
    Texts,
    apart,
    bert,
    bit_for_bit,
    gpt2,
    left_padded,
    logs_apart,
    mean_loss,
    pad_masked,
    saved_state,
    small_device,
    train,
    trainer_of,
)
from transformers import Trainer

from autobatch.integrations.transformers.trainer_state import TrainerAttributes
from autobatch.testing import oom_at

DIVIDED = "divided by the whole batch's count"
SINGLE = 1e-6
"""The Trainer adds up its losses in float32."""


def summed_loss(outputs, labels, num_items_in_batch=None):
    """What the Trainer's documentation asks for: a sum, divided by the count that it is given."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / num_items_in_batch


class OwnLoss(Trainer):
    """A subclass with its own loss, metric, and work around the step."""

    seen = 0
    steps_done = 0

    def training_step(self, *arguments, **options):
        self.steps_done += 1
        return super().training_step(*arguments, **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.seen = self.seen + len(labels)
        loss = mean_loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss


CASES = {
    "GPT-2": ({}, DIVIDED),
    "GPT-2, AdamW": ({"optim": "adamw_torch", "learning_rate": 1e-3}, DIVIDED),
    "BERT for classes": ({"model": bert, "data": Classes()}, "mean over samples"),
    "BERT for numbers": ({"model": partial(bert, num_labels=1), "data": Numbers()}, "mean over samples"),
    "BERT for tokens": ({"model": partial(bert, "BertForTokenClassification", num_labels=256)}, "mean over labels"),
    "masked language model": (
        {"model": partial(bert, "BertForMaskedLM"), "collate": pad_masked},
        "mean over labels",
    ),
    "label smoothing": ({"label_smoothing_factor": 0.1}, DIVIDED),
    "label smoothing of classes": ({"model": bert, "data": Classes(), "label_smoothing_factor": 0.1}, DIVIDED),
    "compute_loss_func that divides": ({"given": {"compute_loss_func": summed_loss}}, DIVIDED),
    "compute_loss_func that takes a mean": (
        {"given": {"compute_loss_func": mean_loss}},
        "mean over shifted labels",
    ),
    "a subclass": ({"kind": OwnLoss}, "mean over shifted labels"),
    "gradient checkpointing": ({"activation_checkpointing": True}, DIVIDED),
    "left padding": ({"collate": left_padded}, DIVIDED),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, DIVIDED),
    "NEFTune": ({"neftune_noise_alpha": 5.0}, DIVIDED),
    "texts of one length": ({"data": Packed()}, DIVIDED),
    "texts of one length at first": (
        {"data": Packed(ragged_from=100), "given": {"compute_loss_func": mean_loss}},
        "mean over shifted labels",
    ),
    "tokens counted": ({"include_num_input_tokens_seen": "non_padding"}, DIVIDED),
    "ReduceLROnPlateau": (
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "given": {"eval_dataset": Texts(48)},
            "metric_for_best_model": "eval_loss",
        },
        DIVIDED,
    ),
    "a loader with workers": ({"dataloader_num_workers": 1}, DIVIDED),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_ends_where_its_whole_batches_end(name, tmp_path):
    """Weights to 1e-12, learning rates and callbacks the same, and losses and norms to the Trainer's float32."""
    options, reading = CASES[name]
    make = partial(trainer_of, tmp_path, **options)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < (1e-12 if "AdamW" not in name else 1e-11)
    assert logs_apart(whole, split) < SINGLE
    assert logs_apart(whole, split, ["learning_rate", "epoch"]) == 0
    assert split.recorder.calls == whole.recorder.calls
    assert split.step.rule.reading == reading
    assert set(split.sizes) == {(7, 7, 6, 6, 6)}


def test_size_and_accumulation_become_one_batch(tmp_path):
    """8 samples x 4 are 32 at once: the Trainer counts the same steps, and calls back once a step."""
    whole = train(partial(trainer_of, tmp_path))
    split = train(
        partial(trainer_of, tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4), attached={}
    )
    assert apart(whole, split) < 1e-12
    assert split.recorder.calls == whole.recorder.calls
    arguments = split.trainer.args
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (TARGET, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile's
def test_a_compiled_model(tmp_path):
    """The Trainer compiles it, and autobatch runs what it is given."""
    make = partial(trainer_of, tmp_path, max_steps=2, torch_compile=True, torch_compile_backend="aot_eager")
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE


def test_losses_are_scaled(tmp_path):
    """With a GradScaler the Trainer unscales, clips and updates as with whole batches."""

    def scale(trainer):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    make = partial(trainer_of, tmp_path)
    whole, split = train(make, around=scale), train(make, attached={}, around=scale)
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < SINGLE
    assert split.trainer.accelerator.scaler.get_scale() == whole.trainer.accelerator.scaler.get_scale()


def test_autocast_is_the_trainers(tmp_path):
    """In bfloat16: the difference is that of sums in another order, of numbers with eight bits."""
    make = partial(trainer_of, tmp_path, lambda: gpt2().float(), bf16=True)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-2
    assert logs_apart(whole, split, ["loss"]) < 1e-3


@pytest.mark.parametrize("target", [30, 45])
def test_a_target_of_any_size(target, tmp_path):
    """Also where the epoch's last batch is smaller: 192 samples are 6 x 30 and 12, or 4 x 45 and 12."""
    whole = train(partial(trainer_of, tmp_path, per_device_train_batch_size=target, max_steps=8))
    split = train(partial(trainer_of, tmp_path, per_device_train_batch_size=7, max_steps=8), attached={}, target=target)
    assert apart(whole, split) < 1e-12
    assert (7, 5) in split.sizes or (6, 6) in split.sizes


def test_a_batch_that_fits_is_run_as_the_trainer_made_it(tmp_path):
    """With dropout bit for bit as without autobatch: finding the rule and the plan has drawn nothing."""
    make = partial(trainer_of, tmp_path, partial(gpt2, dropout=0.1))
    whole, attached = train(make), train(make, attached={"device": small_device(10_000)})
    assert set(attached.sizes) == {(TARGET,)}
    assert bit_for_bit(whole, attached)
    assert logs_apart(whole, attached) == 0


def test_a_batch_is_trimmed_where_it_is_padding(tmp_path):
    """Micro-batches of short texts are narrower than the batch, and none is wider."""
    widths = []

    class Watched(Trainer):
        def compute_loss(self, model, inputs, **options):
            widths.append(inputs["input_ids"].shape[1])
            return super().compute_loss(model, inputs, **options)

    trained = train(partial(trainer_of, tmp_path, kind=Watched, max_steps=1), attached={})
    step = widths[-len(trained.sizes[0]) :]
    assert step == sorted(step, reverse=True)
    assert step[0] > 1.5 * step[-1]


def test_what_a_step_counts_is_counted_once(tmp_path):
    """A number in the Trainer's attributes: neither the first batch's trials nor a retry leave anything in it."""

    def fail_once(trainer):
        inner, calls = trainer.training_step, []

        def step(*arguments):
            calls.append(1)
            with oom_at(400) if len(calls) == 3 else contextlib.nullcontext():
                return inner(*arguments)

        trainer.training_step = step

    trained = train(partial(trainer_of, tmp_path, kind=OwnLoss), attached={}, around=fail_once)
    assert trained.trainer.seen == 6 * TARGET
    assert trained.trainer.steps_done == sum(map(len, trained.sizes))
    assert trained.retries == 1


FAULTS = {2: [57], 3: [300, 900], 4: [40]}


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
            attached._bind(model, attached.rule, attached.plan)
            model.zero_grad()
            before = TrainerAttributes(trainer).take()
            with oom_at(*positions) as planned:
                loss = attached(model, dict(batch), items)
            counted = {name: value for name, value in TrainerAttributes(trainer).take().items() if name == "seen"}
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
                for position in range(1, operations + 1, 5):
                    _, (its, its_counts, others) = measure([position], model, inputs, num_items_in_batch)
                    errors = [float((a - b).abs().max()) for a, b in zip(gradients, others, strict=True)]
                    is_exact = max(errors) < 1e-14 and abs(its - loss) < 1e-12 and its_counts == counts
                    outcomes["exact"] += is_exact
                    outcomes["wrong"] += [] if is_exact else [(position, max(errors))]
                model.zero_grad()
            return attached(model, inputs, num_items_in_batch)

        trainer.training_step = step

    make = partial(trainer_of, tmp_path, partial(gpt2, n_layer=1), kind=kind, max_steps=2)
    train(make, attached={"device": small_device(2600)}, around=sweep)
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
    from autobatch.integrations.transformers import attach

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


def test_training_twice(tmp_path):
    """The second ``train()`` goes on with the plan of the first, as the Trainer goes on with its optimizer."""
    make = partial(trainer_of, tmp_path, max_steps=2)
    whole, split = train(make), train(make, attached={})
    plan = split.step.plan
    whole.trainer.train()
    split.trainer.train()
    assert split.step.plan == plan
    assert apart(whole, split) < 1e-12


def test_the_budget_is_found_on_the_real_step(tmp_path):
    """On the CPU, by counting: more samples in a micro-batch with more memory, and no step beyond it."""
    plans = []
    for budget in ("2MiB", "6MiB"):
        model = partial(gpt2, n_embd=32)
        trained = train(
            partial(trainer_of, tmp_path, model, max_steps=1),
            attached={"device": None, "budget": budget, "headroom": 0.1, "progress": False},
        )
        plans.append(trained.step.plan)
        assert trained.step.result.peak_bytes <= trained.step.plan.budget_bytes
    assert plans[0].micro_batch_size < plans[1].micro_batch_size
