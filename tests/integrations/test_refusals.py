"""What ``attach`` refuses, in which words, and what it takes as arguments."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from builders.refused_options import REFUSED_OPTIONS
from torch import nn
from trainers import Classes, Stream, Texts, bert, gpt2, mean_loss, small_device, train, trainer_of
from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from trl_trainers import embedder_of_two

from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.integrations.transformers import attach

REFUSED = {
    "auto_find_batch_size": (
        {"auto_find_batch_size": True},
        None,
        "restarts training from step 0 and changes the target batch; switch it off, autobatch replaces it",
    ),
    "DeepSpeed": (
        {},
        ("is_deepspeed_enabled", True),
        r"DeepSpeed owns the backward pass and counts its calls; use plan.settings\('deepspeed'\)",
    ),
    "LOMO": ({"optim": "lomo"}, None, "updates parameters inside the backward pass, which cannot be undone"),
    "AdaLOMO": ({"optim": "adalomo"}, None, "updates parameters inside the backward pass, which cannot be undone"),
    **{
        name: ({"optim": name}, None, rf"updates each layer inside the backward pass.*choose '{name[:-10]}'")
        for name in ("galore_adamw_layerwise", "galore_adafactor_layerwise", "apollo_adamw_layerwise")
    },
    "an optimizer that a layerwise one left": (
        {"given": {"optimizers": (LayerWiseDummyOptimizer(), None)}},
        None,
        "updates each layer inside the backward pass",
    ),
    "nn.DataParallel": ({}, ("args._n_gpu", 2), "nn.DataParallel over 2 GPUs divides the batch, too"),
    "FSDP": ({}, ("is_fsdp_enabled", True), "FSDP gathers parameters inside the passes"),
    **{
        f"{name} parallelism": (
            {},
            ("accelerator.state.parallelism_config", ParallelismConfig(**{f"{name}_size": 2})),
            "context, sequence and tensor parallelism divide a sample, not a batch",
        )
        for name in ("cp", "tp")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name, tmp_path, monkeypatch):
    """In one line that says what to do, and the Trainer is as before."""
    options, change, words = REFUSED[name]
    trainer = trainer_of(tmp_path, **options)
    if change is not None:
        *owners, attribute = change[0].split(".")
        monkeypatch.setattr(functools.reduce(getattr, owners, trainer), attribute, change[1])
    before = dict(vars(trainer))
    with pytest.raises(InvalidArgument, match=words) as raised:
        attach(trainer, 64)
    assert str(raised.value).startswith(f"{type(trainer).__name__}: ")
    assert "\n" not in str(raised.value)
    assert vars(trainer) == before
    assert trainer.args.per_device_train_batch_size == 32


def test_a_loss_for_each_dataset_is_refused_on_several_ranks(tmp_path, monkeypatch):
    """The ranks may be at different datasets in one step; on one rank each has its rule."""
    losses = {"one": "CosineSimilarityLoss", "other": "TripletLoss"}
    trainer = embedder_of_two(tmp_path, losses, "one")
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.args), "world_size", 2)
        with pytest.raises(
            InvalidArgument, match="it has a loss for each dataset, and each of 2 ranks may be at another"
        ):
            attach(trainer)
    assert attach(trainer).rule is None


@pytest.mark.parametrize(("arguments", "words"), REFUSED_OPTIONS)
def test_arguments_that_mean_nothing(arguments, words, tmp_path):
    """They are refused when ``attach`` is called, in one line, and the Trainer is as it was."""
    trainer = trainer_of(tmp_path)
    before, size = dict(vars(trainer)), trainer.args.per_device_train_batch_size
    with pytest.raises(InvalidArgument, match=words) as raised:
        attach(trainer, **arguments)
    assert "\n" not in str(raised.value)
    assert (vars(trainer), trainer.args.per_device_train_batch_size) == (before, size)


@pytest.mark.parametrize("wrong", ["max_microbatch", "weight", "target"])
def test_an_argument_that_is_not_there_is_named_with_those_that_are(wrong, tmp_path):
    """In one line, and the Trainer is as it was."""
    trainer = trainer_of(tmp_path)
    before = dict(vars(trainer))
    with pytest.raises(InvalidArgument, match=f"no argument {wrong}; it has target_batch, .*max_micro_batch") as raised:
        attach(trainer, **{wrong: 3})
    assert "\n" not in str(raised.value)
    assert "unknown" not in str(raised.value)
    assert vars(trainer) == before


@pytest.mark.parametrize(("target", "is_more"), [(96, False), (97, True), (256, True)])
def test_a_dataset_with_fewer_samples_than_the_target_is_named(target, is_more, tmp_path, caplog):
    """A step then sees fewer than asked for; both numbers are in the warning."""
    attach(trainer_of(tmp_path, data=Texts(96)), target)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == is_more
    assert all(f"target_batch={target}" in line and "96 samples" in line for line in said)


def test_a_dataset_without_samples_is_refused(tmp_path):
    """Before torch's sampler does, which does not name it."""
    trainer = trainer_of(tmp_path, data=Texts(0))
    with pytest.raises(InvalidArgument, match="Trainer: its train_dataset has no samples"):
        attach(trainer, 16)
    assert trainer.args.gradient_accumulation_steps == trainer_of(tmp_path).args.gradient_accumulation_steps


def test_a_stream_has_no_number_of_samples(tmp_path, caplog):
    """Nothing is said of it."""
    attach(trainer_of(tmp_path, data=Stream()), 256)
    assert not caplog.records


def test_only_trainers_once_each(tmp_path):
    """A model is no Trainer, and a second ``attach`` would divide what is divided."""
    with pytest.raises(InvalidArgument, match=r"trainer= is a Linear; pass a transformers\.Trainer"):
        attach(nn.Linear(1, 1))
    trainer = trainer_of(tmp_path)
    attach(trainer)
    with pytest.raises(InvalidArgument, match=r"attach\(\) was called before with this Trainer: .* make a new Trainer"):
        attach(trainer)


class TwoBackwards(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        half = len(inputs["labels"]) // 2 or 1
        for rows in (slice(None, half), slice(half, None)):
            loss = super().training_step(model, {name: value[rows] for name, value in inputs.items()})
        return loss


class OwnBackward(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("kind", "words"),
    [(TwoBackwards, r"called accelerator.backward\(\) 2 times"), (OwnBackward, "calls backward")],
)
def test_a_training_step_with_passes_of_its_own_is_refused(kind, words, tmp_path):
    """Which of them a retry would have to undo is not known."""
    with pytest.raises(InvalidArgument, match=words):
        train(lambda: trainer_of(tmp_path, bert, Classes(), kind=kind), attached={})


def largest_loss(outputs, labels, num_items_in_batch=None):
    """A step's loss is that of its worst sample."""
    losses = [
        mean_loss({"logits": outputs["logits"][row : row + 1]}, labels[row : row + 1]) for row in range(len(labels))
    ]
    return torch.stack(losses).amax() + 0  # the Trainer multiplies it in place


def mixtral():
    """A mixture of experts, whose router has a loss over all tokens of a micro-batch."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        max_position_embeddings=64,
    )
    return transformers.MixtralForCausalLM(config)


def test_a_router_loss_is_refused(tmp_path):
    """How evenly tokens are routed is a property of all of them."""
    with pytest.raises(InexactSplit, match="no way was found to split this loss exactly"):
        train(lambda: trainer_of(tmp_path, mixtral), attached={})


def test_a_loss_that_is_no_mean_is_refused_or_warned_of(tmp_path, caplog):
    """``check="warn"`` trains all the same and says so; the default raises before the first update."""

    def make():
        return trainer_of(tmp_path, gpt2, given={"compute_loss_func": largest_loss}, max_steps=1)

    with pytest.raises(InexactSplit, match="no way was found to split this loss exactly"):
        train(make, attached={})
    trained = train(make, attached={"check": "warn", "device": small_device()})
    assert trained.sizes == [(7, 7, 6, 6, 6)]
    assert any("no way was found to split this loss exactly" in record.message for record in caplog.records)
