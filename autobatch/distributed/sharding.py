"""Finds what ``fully_shard`` (FSDP2) gathers and scatters, and cleans up after a pass that broke off."""
# ruff: noqa: SLF001 - torch has no public name for what fully_shard was given

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "divisor_of",
    "gathered_tensors",
    "gathers",
    "group_of",
    "has_shards",
    "is_sharded",
    "param_groups",
    "reset",
    "sharded_modules",
    "unsharded_parameters",
]


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it, or on any module in it."""
    return isinstance(model, nn.Module) and any(map(gathers, model.modules()))


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that gather and scatter by themselves."""
    return [module for module in model.modules() if gathers(module)]


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """The ranks over which the parameters are sharded."""
    parameter: Any = next(parameter for parameter in model.parameters() if has_shards(parameter))
    group: dist.ProcessGroup = parameter.device_mesh.get_group()
    return group


def divisor_of(model: nn.Module) -> float:
    """What torch divides the sum of the ranks' gradients by: their number, or ``set_gradient_divide_factor``'s."""
    own = param_groups(model)[0].gradient_divide_factor
    return float(dist.get_world_size(group_of(model)) if own is None else own)


def reset(model: nn.Module) -> None:
    """Make the model as before a forward or backward pass that broke off; sharded gradients stay.

    ``reset_iter_state`` leaves gradients on the unsharded parameters (torch 2.13), which the next pass would add up
    with its own.
    """
    if model._get_fsdp_state()._is_root is None:  # type: ignore[operator]  # no pass has begun yet
        return
    model.reset_iter_state()  # type: ignore[operator]
    for group in param_groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def unsharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """What stands for the model's parameters in a graph, where they have been gathered once."""
    return [
        parameter._unsharded_param
        for group in param_groups(model)
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Into which parameters are gathered; their memory is freed between passes, so nothing may be put back there."""
    return [
        tensor
        for group in param_groups(model)
        for parameter in group.fsdp_params
        for tensor in parameter.all_gather_outputs
    ]


def gathers(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it: then it was imported, which takes 0.6 s (2 cores)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def param_groups(model: nn.Module) -> list[Any]:
    """What gathers and scatters its parameters together (``FSDPParamGroup``), in the same order on each rank."""
    groups = (group for module in sharded_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups)
    return [*{id(group): group for group in groups}.values()]  # fully_shard([a, b]) makes one of two modules


def has_shards(parameter: torch.Tensor) -> bool:
    """Whether this is a parameter, or its gradient, of which each rank has a part."""
    return type(parameter.data).__name__ == "DTensor"
