"""Attaches autobatch to a Hugging Face ``Trainer``: checks it, merges its batch, and replaces three attributes."""

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
from autobatch.integrations.transformers.cuts import SampleKeeper
from autobatch.integrations.transformers.evaluation import EvaluationStep
from autobatch.integrations.transformers.training import AutobatchState, TrainingStep
from autobatch.step.workload import Weigh

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("autobatch")


def attach(
    trainer: Any, target_batch: int | None = None, *, weigh: Weigh | None = None, **options: Unpack[IntegrationOptions]
) -> TrainingStep:
    """Let a Trainer's optimizer steps see ``target_batch`` samples, in micro-batches that fit.

    Call it before ``trainer.train()``. The first batch shows whether the loss was divided by ``num_items_in_batch`` or
    is a mean over samples, and ``fit`` finds the size with the Trainer's own step. A step that runs out of memory is
    undone and runs again in smaller micro-batches. ``per_device_train_batch_size`` becomes this rank's share of the
    target and ``gradient_accumulation_steps`` becomes 1. So the Trainer counts steps, epochs and learning rates as for
    the whole batch.

    Args:
        trainer: A ``transformers.Trainer`` or a subclass. Its ``training_step`` and ``prediction_step`` still run, once
            a micro-batch.
        target_batch: Samples of one optimizer step, over all ranks. Default: what the Trainer's arguments make, size x
            accumulation x ranks.
        weigh: ``weigh(inputs) -> number``: what the loss is a mean over, if it is neither of the two above, such as a
            mean over labels that ignores ``num_items_in_batch``.
        **options: ``budget``, ``headroom``, ``max_micro_batch``, ``objective``, ``accumulate_in_float32``, ``reuse``,
            ``progress`` and ``strategies`` as in ``fit``; ``hooks`` as in ``Runner``; and these:
            ``check``: what to do if the loss cannot be split exactly. ``"raise"`` is the default, ``"warn"`` logs a
            warning. ``None`` compares no gradients; the values of a few losses still show how the loss is read.
            ``device``: the device's memory; default: that of the model.
            ``keep``: objects that a step or an evaluation changes, as in ``Runner``. Numbers and small containers in
            the Trainer's own attributes, such as TRL's metrics, are kept already.

    Returns:
        The object that runs the steps. After the first batch it has ``plan``, ``runner``, ``rule`` and ``result``.

    Raises:
        InvalidArgument: The Trainer is not supported; the message says what to do instead. Or an argument is not valid.
        InexactSplit: Its loss is known to compare samples, and ``check="raise"``.

    The losses of sentence-transformers that compare samples, such as MultipleNegativesRankingLoss, run as a
    ``WholeBatch``. On several ranks each compares its own samples, or those of all with ``gather_across_devices=True``,
    as in the library. ``train()`` raises what ``fit``, ``verify`` and ``Runner`` raise; ``InexactSplit`` for a loss
    that has none of these readings, or that compares samples in another way.
    """
    refuse_unknown("attach()", options, ["target_batch", "weigh", *names_of(IntegrationOptions)])
    if not isinstance(trainer, Trainer):
        raise InvalidArgument(f"trainer= is {name_type(trainer)}; pass a transformers.Trainer")
    name = type(trainer).__name__
    if isinstance(vars(trainer).get("training_step"), TrainingStep):
        raise InvalidArgument(
            f"attach() was called before with this {name}: call it once; for other arguments, as after an error that "
            f"names one, make a new Trainer"
        )
    reason = _find_reason(trainer) or _find_parallelism(trainer)
    if reason:
        raise InvalidArgument(f"{name}: {reason}")
    arguments = trainer.args
    ranks = arguments.world_size
    made = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks
    target = check_target(made if target_batch is None else target_batch)
    checked = Options.read(options, target=target, weigh=weigh)
    _refuse_comparing(trainer, checked.fit["check"])
    share, rest = divmod(target, ranks)
    if rest:
        raise InvalidArgument(
            f"target_batch={target} over {ranks} ranks: the Trainer gives each rank equally many samples; pass a "
            f"multiple of {ranks}"
        )
    _check_samples(trainer, target)
    # One batch of the loader becomes this rank's share of the target.
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = share, 1
    trainer._train_batch_size = arguments.train_batch_size  # noqa: SLF001 - what the loader is made with, and nothing public sets it
    collate = trainer.data_collator
    step = TrainingStep(trainer, collate, checked)
    trainer.prediction_step = EvaluationStep(trainer, collate, step, checked)
    trainer.training_step = step
    trainer.data_collator = SampleKeeper(collate)
    trainer.add_callback(AutobatchState(step.state))
    return step


# TRL's Trainers whose ``training_step`` generates samples and splits them.
_GENERATING = frozenset(
    ("GRPOTrainer", "RLOOTrainer", "GKDTrainer", "DistillationTrainer", "PPOTrainer", "OnlineDPOTrainer", "XPOTrainer")
)
# Loss types of TRL's Trainers that sort samples, or take a mean over them inside the loss; and what to do instead.
_COMPARING: Mapping[str, tuple[frozenset[str], str]] = {
    "DPOTrainer": (
        frozenset(("aot", "aot_pair", "aot_unpaired")),
        "choose one that looks at each pair alone, such as 'sigmoid' or 'apo_zero'",
    ),
    "KTOTrainer": (frozenset(("kto",)), "choose loss_type='apo_zero_unpaired', which looks at each sample alone"),
}


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


def _refuse_comparing(trainer: Any, check: Literal["warn", "raise"] | None) -> None:
    """Raise or warn if a loss is known to compare samples.

    The first comparison cannot show it: policy and reference are still equal, so what is compared is 0.
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


def _check_samples(trainer: Any, target: int) -> None:
    """Warn if the dataset has fewer samples than a step should see; refuse one without samples."""
    try:
        data = trainer.train_dataset
        samples = sum(map(len, data.values())) if isinstance(data, Mapping) else len(data)  # of several datasets
    except TypeError:  # a stream, or none yet
        return
    if not samples:
        raise InvalidArgument(f"{type(trainer).__name__}: its train_dataset has no samples; pass one that has some")
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
