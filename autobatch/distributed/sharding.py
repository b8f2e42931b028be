"""What ``fully_shard`` (FSDP2) does by itself: which models can be trained, and how a pass that broke off is cleared.

Covers the modules that gather and scatter, what of them cannot be supported, and the divisor of gradients. Does not
cover their collectives (``pass_record``) nor how ranks end a pass together (``lockstep``).
"""
# ruff: noqa: SLF001 - torch has no public name for what fully_shard was given

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autobatch.errors import InvalidArgument

__all__ = [
    "divisor_of",
    "gathered_tensors",
    "group_of",
    "is_sharded",
    "refuse_unsupported_sharding",
    "reset",
    "sharded_modules",
]

_NEEDED = ("reset_iter_state", "set_custom_all_gather", "set_custom_reduce_scatter")


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it, or on any module in it."""
    return isinstance(model, nn.Module) and any(map(_gathers, model.modules()))


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that gather and scatter by themselves."""
    return [module for module in model.modules() if _gathers(module)]


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """The ranks over which the parameters are sharded."""
    parameter: Any = next(parameter for parameter in model.parameters() if _is_dtensor(parameter))
    group: dist.ProcessGroup = parameter.device_mesh.get_group()
    return group


def divisor_of(model: nn.Module) -> float:
    """What torch divides the sum of the ranks' gradients by: their number, or ``set_gradient_divide_factor``'s."""
    own = _param_groups(model)[0].gradient_divide_factor
    return float(dist.get_world_size(group_of(model)) if own is None else own)


def reset(model: nn.Module) -> None:
    """Make the model as before a forward or backward pass that broke off; sharded gradients stay.

    ``reset_iter_state`` leaves gradients on the unsharded parameters (torch 2.13), which the next pass would add up
    with its own.
    """
    if model._get_fsdp_state()._is_root is None:  # type: ignore[operator]  # no pass has begun yet
        return
    model.reset_iter_state()  # type: ignore[operator]
    for group in _param_groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Into which parameters are gathered; their memory is freed between passes, so nothing may be put back there."""
    return [
        tensor
        for group in _param_groups(model)
        for parameter in group.fsdp_params
        for tensor in parameter.all_gather_outputs
    ]


def refuse_unsupported_sharding(model: nn.Module) -> None:
    """Refuse what cannot be ended on all ranks together.

    Raises:
        InvalidArgument: One line that says what to use instead.
    """
    if not _gathers(model):
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
    for group in _param_groups(model):
        _refuse_group(group)
    if len({group.gradient_divide_factor for group in _param_groups(model)}) > 1:
        raise InvalidArgument(
            "the modules divide gradients by different factors: call set_gradient_divide_factor() with the same on each"
        )


def _gathers(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it: then it was imported, which takes 0.6 s (2 cores)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def _refuse_parameter(name: str, parameter: Any) -> None:
    if not _is_dtensor(parameter):
        raise InvalidArgument(
            f"the parameter {name} is not sharded (ignored_params=), so nobody would sum its gradient over the ranks: "
            f"leave it out of ignored_params="
        )
    if parameter.device_mesh.ndim > 1:
        raise InvalidArgument(
            f"the parameter {name} is sharded over a mesh of {parameter.device_mesh.ndim} dimensions (HSDP or tensor "
            f"parallelism), which is not supported: call fully_shard() with a mesh of one"
        )


def _refuse_group(group: Any) -> None:
    if not group.reduce_grads:
        raise InvalidArgument(
            "gradients are not summed over the ranks: call model.set_requires_gradient_sync(True) before"
        )
    if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
        raise InvalidArgument("fully_shard(offload_policy=CPUOffloadPolicy()) is not supported: leave it out")
    if group._all_reduce_hook is not None:
        raise InvalidArgument("set_all_reduce_hook() is not supported: leave it out")


def _param_groups(model: nn.Module) -> list[Any]:
    return [group for module in sharded_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]


def _is_dtensor(parameter: torch.Tensor) -> bool:
    return type(parameter.data).__name__ == "DTensor"
