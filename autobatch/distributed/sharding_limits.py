"""Refuses models and settings of ``fully_shard`` whose passes the ranks could not end together."""
# ruff: noqa: SLF001 - torch has no public name for what fully_shard was given

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autobatch.distributed.sharding import gathers, group_of, has_shards, param_groups
from autobatch.errors import InvalidArgument

__all__ = ["refuse_changed_settings", "refuse_unsupported_sharding"]

_NEEDED = ("reset_iter_state", "set_custom_all_gather", "set_custom_reduce_scatter")


def refuse_unsupported_sharding(model: nn.Module) -> None:
    """Refuse what cannot be ended on all ranks together.

    Raises:
        InvalidArgument: One line that says what to use instead.
    """
    if not gathers(model):
        raise InvalidArgument(
            f"fully_shard was called on modules inside {type(model).__name__} and not on the whole model: call "
            f"fully_shard(model) last"
        )
    if not all(hasattr(model, name) for name in _NEEDED):
        raise InvalidArgument(
            f"fully_shard needs torch 2.13 or later here, and this is {torch.__version__}: use DistributedDataParallel"
        )
    for name, parameter in model.named_parameters():
        _refuse_parameter(name, parameter)
    _refuse_other_ranks(model)
    groups = param_groups(model)
    for group in groups:
        _refuse_settings(group)
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise InvalidArgument("fully_shard(offload_policy=CPUOffloadPolicy()) is not supported: leave it out")
    if len({group.gradient_divide_factor for group in groups}) > 1:
        raise InvalidArgument(
            "the modules divide gradients by different factors: call set_gradient_divide_factor() with the same on each"
        )


def refuse_changed_settings(model: nn.Module, groups: Sequence[Any], factor: float | None) -> None:
    """Refuse what was set since the Runner was made, or gradients that wait to be summed; asked before each step.

    Args:
        model: Sharded.
        groups: Its ``param_groups``.
        factor: ``gradient_divide_factor`` when the Runner was made.

    Raises:
        InvalidArgument: A setting would make gradients wrong or other ranks wait, or an earlier backward pass has left
            gradients that were not summed over the ranks.
    """
    for group in groups:
        _refuse_settings(group)
        if group.gradient_divide_factor != factor:
            raise InvalidArgument(
                "set_gradient_divide_factor() was called after Runner() was made: call it before, with the same on "
                "each module"
            )
        if any(map(_waits_for_sum, group.fsdp_params)):
            raise InvalidArgument(
                "there are gradients of an earlier backward pass that were not summed over the ranks "
                "(set_requires_gradient_sync(False)): leave accumulating to the Runner, or call "
                "model.reset_iter_state() to drop them"
            )
    if not model._get_fsdp_state()._state_ctx.is_last_backward:  # type: ignore[operator]
        raise InvalidArgument(
            "backward passes are not finished (set_is_last_backward(False)): call model.set_is_last_backward(True) "
            "before"
        )


def _refuse_parameter(name: str, parameter: Any) -> None:
    if not has_shards(parameter):
        raise InvalidArgument(
            f"the parameter {name} is not sharded (ignored_params=), so nobody would sum its gradient over the ranks: "
            f"leave it out of ignored_params="
        )
    if parameter.device_mesh.ndim > 1:
        raise InvalidArgument(
            f"the parameter {name} is sharded over a mesh of {parameter.device_mesh.ndim} dimensions (HSDP or tensor "
            f"parallelism), which is not supported: call fully_shard() with a mesh of one"
        )


def _refuse_other_ranks(model: nn.Module) -> None:
    """Ranks that are not in a module's mesh would not take part in its passes, nor in its gradients."""
    of_model = dist.get_process_group_ranks(group_of(model))
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    for name, parameter in parameters:
        ranks = dist.get_process_group_ranks(parameter.device_mesh.get_group())
        if ranks != of_model:
            raise InvalidArgument(
                f"the parameter {name} is sharded over the ranks {ranks}, and {parameters[0][0]} over {of_model}: call "
                f"fully_shard() with the same mesh on each module"
            )


def _refuse_settings(group: Any) -> None:
    if not group.reduce_grads:
        raise InvalidArgument(
            "gradients are not summed over the ranks: call model.set_requires_gradient_sync(True) before"
        )
    if group._all_reduce_hook is not None:
        raise InvalidArgument("set_all_reduce_hook() is not supported: leave it out")
    if not group.reshard_after_backward:
        raise InvalidArgument("set_reshard_after_backward(False) is not supported: leave it out")


def _waits_for_sum(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None
