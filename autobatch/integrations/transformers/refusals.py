"""Refuses Trainers whose steps cannot be divided exactly, each with a sentence that says what to do.

Covers what the Trainer and its arguments show before training. Does not cover losses that compare samples, which show
only when a batch is compared with its parts (``loss_rule``).
"""

from __future__ import annotations

from typing import Any

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument

__all__ = ["refuse_unsupported"]

_GENERATING = frozenset(
    ("GRPOTrainer", "RLOOTrainer", "GKDTrainer", "DistillationTrainer", "PPOTrainer", "OnlineDPOTrainer", "XPOTrainer")
)
"""TRL's Trainers whose ``training_step`` generates samples and divides them by itself."""


def refuse_unsupported(trainer: Any) -> None:
    """Raise InvalidArgument for a Trainer whose steps cannot be run in micro-batches of any size."""
    reason = _find_reason(trainer) or _find_parallelism(trainer)
    if reason:
        raise InvalidArgument(f"{type(trainer).__name__}: {reason}")


def _find_reason(trainer: Any) -> str:
    arguments = trainer.args
    if arguments.auto_find_batch_size:
        return (
            "auto_find_batch_size=True restarts training from step 0 and changes the target batch; switch it off, "
            "autobatch does its work"
        )
    if "lomo" in str(arguments.optim).lower():
        return (
            f"optim={show_value(str(getattr(arguments.optim, 'value', arguments.optim)))} (LOMO) updates parameters "
            f"inside the backward pass, which cannot be undone; choose another optimizer"
        )
    if any(base.__name__ in _GENERATING for base in type(trainer).__mro__):
        return (
            "it generates inside its step and splits its own batches; set per_device_train_batch_size and "
            "steps_per_generation there"
        )
    return ""


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
            f"nn.DataParallel over {trainer.args.n_gpu} GPUs divides the batch by itself; start with torchrun, or show "
            f"one GPU with CUDA_VISIBLE_DEVICES"
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if any((getattr(parallelism, f"{name}_size", 1) or 1) > 1 for name in ("cp", "sp", "tp")):
        return (
            "context, sequence and tensor parallelism divide a sample, not a batch; use DistributedDataParallel "
            "(torchrun)"
        )
    return ""
