"""Hugging Face's Trainer with autobatch, beside the Trainer's own whole batches: 32 samples x 1, in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from trainers import (
    TARGET,
    Classes,
    Numbers,
    OwnLoader,
    OwnLoss,
    Packed,
    Stream,
    Texts,
    apart,
    bert,
    bit_for_bit,
    count_labels,
    count_shifted,
    gpt2,
    left_padded,
    logs_apart,
    mean_loss,
    pad_masked,
    small_device,
    train,
    trainer_of,
)
from transformers import Trainer

DIVIDED, WEIGHED = "divided by the whole batch's count", "mean over weigh(batch)"
SINGLE = 1e-6
"""The Trainer adds up its losses in float32."""


def summed_loss(outputs, labels, num_items_in_batch=None):
    """What the Trainer's documentation asks for: a sum, divided by the count that it is given."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / num_items_in_batch


CASES = {
    "GPT-2": ({}, DIVIDED),
    "GPT-2, AdamW": ({"optim": "adamw_torch", "learning_rate": 1e-3}, DIVIDED),
    "BERT for classes": ({"model": bert, "data": Classes()}, "mean over samples"),
    "BERT for numbers": ({"model": partial(bert, num_labels=1), "data": Numbers()}, "mean over samples"),
    "BERT for tokens": (
        {"model": partial(bert, "BertForTokenClassification", num_labels=256), "weigh": count_labels},
        WEIGHED,
    ),
    "masked language model": (
        {"model": partial(bert, "BertForMaskedLM"), "collate": pad_masked, "weigh": count_labels},
        WEIGHED,
    ),
    "label smoothing": ({"label_smoothing_factor": 0.1}, DIVIDED),
    "label smoothing of classes": ({"model": bert, "data": Classes(), "label_smoothing_factor": 0.1}, DIVIDED),
    "compute_loss_func that divides": ({"given": {"compute_loss_func": summed_loss}}, DIVIDED),
    "compute_loss_func that takes a mean": (
        {"given": {"compute_loss_func": mean_loss}, "weigh": count_shifted},
        WEIGHED,
    ),
    "a subclass": ({"kind": OwnLoss, "weigh": count_shifted}, WEIGHED),
    "gradient checkpointing": ({"activation_checkpointing": True}, DIVIDED),
    "left padding": ({"collate": left_padded}, DIVIDED),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, DIVIDED),
    "NEFTune": ({"neftune_noise_alpha": 5.0}, DIVIDED),
    "texts of one length": ({"data": Packed()}, DIVIDED),
    "texts of one length at first": (
        {
            "data": Packed(ragged_from=100),
            "given": {"compute_loss_func": mean_loss},
            "weigh": count_shifted,
        },
        WEIGHED,
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
    "a stream": ({"data": Stream()}, DIVIDED),
    "a loader of one's own": ({"kind": OwnLoader}, DIVIDED),
    "a loader with workers": ({"dataloader_num_workers": 1}, DIVIDED),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_ends_where_its_whole_batches_end(name, tmp_path):
    """Weights to 1e-12, learning rates and callbacks the same, and losses and norms to the Trainer's float32."""
    options, reading = CASES[name]
    make = partial(trainer_of, tmp_path, **{key: value for key, value in options.items() if key != "weigh"})
    whole, split = train(make), train(make, attached={"weigh": options.get("weigh")})
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


@pytest.mark.slow
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


class SumLoss(Trainer):
    """A loss that adds up, whatever the Trainer counts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / 1000


def test_a_loss_that_is_a_sum(tmp_path):
    """It is found to add up over micro-batches, though the Trainer counts labels for a model that can divide."""
    make = partial(trainer_of, tmp_path, kind=SumLoss)
    whole, split = train(make), train(make, attached={})
    assert split.step.rule.reading == DIVIDED
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-6


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
