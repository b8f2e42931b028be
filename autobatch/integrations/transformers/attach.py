"""Attaches autobatch to a Hugging Face ``Trainer``: checks it, merges its batch, and replaces three attributes.

Covers what is done before ``train()``, and Trainers that are refused there: what they and their arguments show. What is
done in it: ``training``, ``evaluation``, ``trainer_state``. Losses that compare samples show there (``rule_search``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from autobatch._arguments import check_target
from autobatch._formatting import name_type, show_value
from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.fitting.options import IntegrationOptions, Options, names_of, refuse_unknown
from autobatch.integrations.transformers.evaluation import EvaluationStep
from autobatch.integrations.transformers.samples import SampleKeeper
from autobatch.integrations.transformers.trainer_state import AutobatchState
from autobatch.integrations.transformers.training import TrainingStep

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attach"]

_log = logging.getLogger("autobatch")


def attach(
    trainer: Any,
    target_batch: int | None = None,
    **options: Unpack[IntegrationOptions],
) -> TrainingStep:
    """Let a Trainer's optimizer steps see ``target_batch`` samples, in micro-batches that fit.

    Call it before ``trainer.train()``. On the first batch it is found out what the loss is a mean over, and ``fit``
    finds the size on the Trainer's own step. A step that runs out of memory goes on with less, as in ``Runner``.
    ``per_device_train_batch_size`` becomes this rank's share of the target and ``gradient_accumulation_steps`` 1, so
    the Trainer counts steps, epochs and learning rates as it would for the whole batch.

    Args:
        trainer: A ``transformers.Trainer`` or a subclass. Its ``training_step`` and ``prediction_step`` still run, once
            a micro-batch.
        target_batch: Samples one optimizer step should see, over all ranks; default: what the Trainer's arguments make,
            size x accumulation x ranks.
        **options: ``budget``, ``headroom``, ``max_micro_batch``, ``objective``, ``accumulate_in_float32``, ``reuse``
            and ``progress`` as in ``fit``; ``hooks`` as in ``Runner``; and these:
            ``check``: what to do if the loss cannot be split exactly. ``"raise"`` is the default, ``"warn"`` logs a
            warning. ``None`` compares no gradients: the values of a few losses show what the loss is a mean over.
            ``device``: the device's memory; default: where the model is.
            ``keep``: objects that a step or an evaluation changes, as in ``Runner``. Numbers and small containers in
            the Trainer's own attributes, such as TRL's metrics, are kept already.

    Returns:
        What runs the steps: its ``plan``, ``runner``, ``rule`` and last ``result``, after the first batch.

    Raises:
        InvalidArgument: The Trainer cannot be supported, and what to do instead; or an argument cannot mean anything.
        InexactSplit: Its loss is known to compare samples, and ``check="raise"``.

    ``train()`` then raises what ``fit``, ``verify`` and ``Runner`` raise; ``InexactSplit`` for a loss that compares
    samples, such as a contrastive one.
    """
    refuse_unknown("attach()", options, ["target_batch", *names_of(IntegrationOptions)])
    if not isinstance(trainer, Trainer):
        raise InvalidArgument(f"trainer= is {name_type(trainer)}; pass a transformers.Trainer")
    if isinstance(vars(trainer).get("training_step"), TrainingStep):
        raise InvalidArgument(
            f"attach() was called before with this {type(trainer).__name__}: call it once; for other arguments, as "
            f"after an error that names one, make a new Trainer"
        )
    _refuse_unsupported(trainer)
    target = find_target(trainer, target_batch)
    checked = Options.read(options, target=target)
    _check_loss(trainer, checked.fit["check"])
    _warn_of_few_samples(trainer, target)
    merge_batch(trainer, target)
    collate = trainer.data_collator
    step = TrainingStep(trainer, collate, checked)
    trainer.prediction_step = EvaluationStep(trainer, collate, step.device, step.budget, checked.keep)
    trainer.training_step = step
    trainer.data_collator = SampleKeeper(collate)
    trainer.add_callback(AutobatchState(step.state))
    return step


def find_target(trainer: Any, target_batch: Any | None) -> int:
    """The samples of a step over all ranks: the user's own, or what the Trainer's arguments make."""
    arguments = trainer.args
    made = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return check_target(made if target_batch is None else target_batch)


def merge_batch(trainer: Any, target: int) -> None:
    """Make one batch of the loader this rank's share of the target; accumulation is then autobatch's.

    Raises:
        InvalidArgument: The ranks cannot have equal shares of it.
    """
    arguments = trainer.args
    ranks = arguments.world_size
    share, rest = divmod(target, ranks)
    if rest:
        raise InvalidArgument(
            f"target_batch={target} over {ranks} ranks: the Trainer gives each rank equally many samples; pass a "
            f"multiple of {ranks}"
        )
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = share, 1
    trainer._train_batch_size = arguments.train_batch_size  # noqa: SLF001 - what the loader is made with, and nothing public sets it


_GENERATING = frozenset(
    ("GRPOTrainer", "RLOOTrainer", "GKDTrainer", "DistillationTrainer", "PPOTrainer", "OnlineDPOTrainer", "XPOTrainer")
)
"""TRL's Trainers whose ``training_step`` generates samples and divides them by itself."""


_COMPARING: Mapping[str, tuple[frozenset[str], str]] = {
    "DPOTrainer": (
        frozenset(("aot", "aot_pair", "aot_unpaired")),
        "choose one that looks at each pair alone, such as 'sigmoid' or 'apo_zero'",
    ),
    "KTOTrainer": (frozenset(("kto",)), "choose loss_type='apo_zero_unpaired', which looks at each sample alone"),
}
"""Loss types of TRL's Trainers that sort samples, or take a mean over them inside the loss; and what to do instead."""


def _refuse_unsupported(trainer: Any) -> None:
    """Raise InvalidArgument for a Trainer whose steps cannot be run in micro-batches of any size."""
    reason = _find_reason(trainer) or _find_parallelism(trainer)
    if reason:
        raise InvalidArgument(f"{type(trainer).__name__}: {reason}")


def _find_reason(trainer: Any) -> str:
    arguments = trainer.args
    if arguments.auto_find_batch_size:
        return (
            "auto_find_batch_size=True restarts training from step 0 and changes the target batch; switch it off, "
            "autobatch replaces it"
        )
    name = str(getattr(arguments.optim, "value", arguments.optim))
    own = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate may have wrapped it
    if "lomo" in name:
        return (
            f"optim={show_value(name)} (LOMO) updates parameters inside the backward pass, which cannot be undone; "
            f"choose another optimizer"
        )
    if name.endswith("layerwise") or isinstance(own, LayerWiseDummyOptimizer):
        return (
            f"optim={show_value(name)} updates each layer inside the backward pass, once a micro-batch, which cannot "
            f"be undone; choose {show_value(name.removesuffix('_layerwise'))}, or another optimizer"
        )
    if any(base.__name__ in _GENERATING for base in type(trainer).__mro__):
        return (
            "it generates inside its step and splits its own batches; set per_device_train_batch_size and "
            "steps_per_generation there"
        )
    return ""


def _check_loss(trainer: Any, check: Literal["warn", "raise"] | None) -> None:
    """Raise or warn where a loss is known to compare samples.

    At first no comparison shows it: policy and reference are equal, so that what is compared is 0 for each sample.
    """
    chosen = getattr(trainer.args, "loss_type", None)
    chosen = {chosen} if isinstance(chosen, str) else {*chosen} if isinstance(chosen, list | tuple) else set()
    for base in type(trainer).__mro__:
        compared, advice = _COMPARING.get(base.__name__, (frozenset(), ""))
        if found := sorted(compared & chosen):
            refusal = (
                f"{type(trainer).__name__}: loss_type={show_value(found[0])} compares the samples of a micro-batch"
            )
            if check == "raise":
                raise InexactSplit(f"{refusal}, so no split of it is exact; {advice}; check='warn' trains anyway")
            if check == "warn":
                _log.warning("%s, so no split of it is exact; %s", refusal, advice)


def _warn_of_few_samples(trainer: Any, target: int) -> None:
    """Warn where the dataset has fewer samples than a step should see."""
    try:
        data = trainer.train_dataset
        samples = sum(map(len, data.values())) if isinstance(data, Mapping) else len(data)  # of several datasets
    except TypeError:  # a stream, or none yet
        return
    if samples < target:
        _log.warning(
            "%s: target_batch=%d is more than the %d samples of the dataset: each step sees these %d; pass at most %d",
            type(trainer).__name__,
            target,
            samples,
            samples,
            samples,
        )


def _find_parallelism(trainer: Any) -> str:
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed owns the backward pass and counts its calls; use plan.settings('deepspeed')"
    if trainer.is_fsdp_enabled:
        return (
            "FSDP gathers parameters inside the passes, where ranks that run different micro-batches would wait for "
            "each other; use DistributedDataParallel (torchrun), or plan.settings('huggingface')"
        )
    if trainer.args.world_size > 1 and isinstance(getattr(trainer, "loss", None), dict):
        return (
            f"it has a loss for each dataset, and each of {trainer.args.world_size} ranks may be at another: train on "
            f"one rank, or with one loss"
        )
    if trainer.args.n_gpu > 1:
        return (
            f"nn.DataParallel over {trainer.args.n_gpu} GPUs divides the batch, too; start with torchrun, or show "
            f"one GPU with CUDA_VISIBLE_DEVICES"
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if any((getattr(parallelism, f"{name}_size", 1) or 1) > 1 for name in ("cp", "sp", "tp")):
        return (
            "context, sequence and tensor parallelism divide a sample, not a batch; use DistributedDataParallel "
            "(torchrun)"
        )
    return ""
