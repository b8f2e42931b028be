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
    for applies, reason in _reasons(trainer):
        if applies:
            raise InvalidArgument(f"{type(trainer).__name__}: {reason}")


def _reasons(trainer: Any) -> list[tuple[bool, str]]:
    arguments, accelerator = trainer.args, trainer.accelerator
    parallelism = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(parallelism, f"{name}_size", 1) or 1 for name in ("cp", "sp", "tp")}
    return [
        (
            arguments.auto_find_batch_size,
            "auto_find_batch_size=True restarts training from step 0 and changes the target batch; switch it off, "
            "autobatch does its work",
        ),
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed owns the backward pass and counts its calls; use plan.settings('deepspeed')",
        ),
        (
            "lomo" in str(arguments.optim).lower(),
            f"optim={show_value(str(getattr(arguments.optim, 'value', arguments.optim)))} (LOMO) updates parameters "
            f"inside the backward pass, which cannot be undone; choose another optimizer",
        ),
        (
            arguments.n_gpu > 1,
            f"nn.DataParallel over {arguments.n_gpu} GPUs divides the batch by itself; start with torchrun, or show "
            f"one GPU with CUDA_VISIBLE_DEVICES",
        ),
        (
            max(sizes.values()) > 1,
            "context, sequence and tensor parallelism divide a sample, not a batch; use DistributedDataParallel "
            "(torchrun)",
        ),
        (
            trainer.is_fsdp_enabled,
            "FSDP gathers parameters inside the passes, where ranks that run different micro-batches would wait for "
            "each other; use DistributedDataParallel (torchrun), or plan.settings('huggingface')",
        ),
        (
            any(base.__name__ in _GENERATING for base in type(trainer).__mro__),
            "it generates inside its step and splits its own batches; set per_device_train_batch_size and "
            "steps_per_generation there",
        ),
    ]
