"""The same plan in other frameworks' words.

Covers the frameworks that own the training loop and take one fixed size: Hugging Face, Lightning, accelerate,
DeepSpeed. Such a loop cannot run ragged micro-batches, so the size is the largest exact divisor of the share. Does not
cover running there.
"""

from __future__ import annotations

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.planner import divide_evenly

__all__ = ["FRAMEWORKS", "settings_for"]

FRAMEWORKS = ("huggingface", "lightning", "accelerate", "deepspeed")


def settings_for(plan: PlanRecord, framework: str) -> dict[str, int]:
    """The plan as keyword arguments of another framework.

    Args:
        plan: Its largest micro-batch bounds the size.
        framework: One of ``FRAMEWORKS``.

    Returns:
        Names as in that framework's own configuration. Size x accumulation x world size is the target exactly.

    Raises:
        InvalidArgument: The framework is not known, the target cannot be shared equally by the ranks, or a rank's share
            not divided into equal micro-batches that the model can run.
    """
    if not isinstance(framework, str) or framework not in FRAMEWORKS:
        raise InvalidArgument(
            f"settings({show_value(framework)}): not known; one of {', '.join(map(repr, FRAMEWORKS))}"
        )
    if plan.target_batch % plan.world_size:
        raise InvalidArgument(
            f"settings({framework!r}): a target batch of {plan.target_batch} cannot be shared equally by "
            f"{plan.world_size} ranks; take a multiple of {plan.world_size}"
        )
    share, smallest = plan.target_batch // plan.world_size, plan.smallest_micro_batch
    try:
        size, steps = divide_evenly(share, plan.micro_batch_size, smallest)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"settings({framework!r}): {error}, and the model cannot run micro-batches of fewer than {smallest}: take "
            f"another target_batch, such as {share + 1} a rank"
        ) from None
    if framework == "huggingface":
        return {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    if framework == "lightning":
        return {"batch_size": size, "accumulate_grad_batches": steps}
    if framework == "accelerate":
        return {"batch_size": size, "gradient_accumulation_steps": steps}
    return {
        "train_batch_size": plan.target_batch,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": steps,
    }
