"""Translates a plan into the settings of frameworks that own the training loop.

Covers Hugging Face, Lightning, accelerate and DeepSpeed. Their loops take one fixed size and cannot run ragged
micro-batches, so the size is the largest exact divisor of the share. Does not cover running there.
"""

from __future__ import annotations

import math

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.planning.plan_record import PlanRecord

__all__ = ["divide_evenly", "settings_for"]

_NAMES = {
    "huggingface": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "lightning": ("batch_size", "accumulate_grad_batches"),
    "accelerate": ("batch_size", "gradient_accumulation_steps"),
    "deepspeed": ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
}
"""What each framework calls the micro-batch size and the accumulation steps."""


def settings_for(plan: PlanRecord, framework: str) -> dict[str, int]:
    """The plan by the framework's own names; size x accumulation x world size is the target exactly.

    Raises:
        InvalidArgument: The framework is not known, the target cannot be shared equally by the ranks, or a rank's share
            not divided into equal micro-batches that the model can run.
    """
    if not isinstance(framework, str) or framework not in _NAMES:
        raise InvalidArgument(f"settings({show_value(framework)}): not known; one of {', '.join(map(repr, _NAMES))}")
    if plan.target_batch % plan.world_size:
        raise InvalidArgument(
            f"settings({framework!r}): a target batch of {plan.target_batch} cannot be shared equally by "
            f"{plan.world_size} ranks; take a multiple of {plan.world_size}"
        )
    share, smallest = plan.target_batch // plan.world_size, plan.smallest_micro_batch
    size, steps = divide_evenly(share, plan.micro_batch_size)
    if size < smallest:
        raise InvalidArgument(
            f"settings({framework!r}): {share} samples have no divisor from {smallest} to {plan.micro_batch_size}, and "
            f"the model cannot run micro-batches of fewer than {smallest}: take another target_batch, such as "
            f"{share + 1} a rank"
        )
    settings = dict(zip(_NAMES[framework], (size, steps), strict=True))
    return {"train_batch_size": plan.target_batch, **settings} if framework == "deepspeed" else settings


def divide_evenly(total: int, largest: int) -> tuple[int, int]:
    """``(size, steps)`` with ``size * steps == total`` exactly and ``size`` as large as ``largest`` allows.

    A prime ``total`` above ``largest`` leaves ``(1, total)``. Both are at least 1.
    """
    small = (divisor for divisor in range(1, math.isqrt(total) + 1) if total % divisor == 0)
    size = max(part for divisor in small for part in (divisor, total // divisor) if part <= largest)
    return size, total // size
