"""Reads models that ``fully_shard`` (FSDP2) has divided, refuses unsupported ones, and clears passes that broke off."""
# ruff: noqa: SLF001 - torch has no public name for the state and the options of fully_shard

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autobatch.errors import InvalidArgument

_NEEDED = ("reset_iter_state", "set_custom_all_gather", "set_custom_reduce_scatter")


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on the model or on a module in it."""
    return isinstance(model, nn.Module) and any(map(_gathers, model.modules()))


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules on which ``fully_shard`` was called."""
    return [module for module in model.modules() if _gathers(module)]


def _gathers(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on the module: then torch has imported it, which takes 0.6 s."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def has_shards(parameter: torch.Tensor) -> bool:
    """Return whether each rank has only a part of this parameter or gradient."""
    return type(parameter.data).__name__ == "DTensor"


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """Return the ranks over which the parameters are sharded."""
    parameter: Any = next(parameter for parameter in model.parameters() if has_shards(parameter))
    group: dist.ProcessGroup = parameter.device_mesh.get_group()
    return group


def param_groups(model: nn.Module) -> list[Any]:
    """Return each ``FSDPParamGroup``: parameters that are gathered together, in the same order on each rank."""
    groups = [group for module in sharded_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]
    return [*{id(group): group for group in groups}.values()]  # fully_shard([a, b]) makes one of two modules


def divisor_of(model: nn.Module) -> float:
    """Return the number by which torch divides the sum of the ranks' gradients."""
    divisor = param_groups(model)[0].gradient_divide_factor
    return float(dist.get_world_size(group_of(model)) if divisor is None else divisor)


def unsharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return extra tensors that count as parameters in a graph: those that were gathered at least once."""
    return [p._unsharded_param for p in _fsdp_params(model) if hasattr(p, "_unsharded_param")]


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that take gathered parameters; torch frees their memory between passes."""
    return [tensor for p in _fsdp_params(model) for tensor in p.all_gather_outputs]


def _fsdp_params(model: nn.Module) -> list[Any]:
    return [parameter for group in param_groups(model) for parameter in group.fsdp_params]


def reset(model: nn.Module) -> None:
    """Clear a forward or backward pass that broke off; sharded gradients stay.

    ``reset_iter_state`` leaves gradients on the unsharded parameters (torch 2.13); the next pass would add to them.
    """
    if model._get_fsdp_state()._is_root is None:  # type: ignore[operator]  # no pass has begun yet
        return
    model.reset_iter_state()  # type: ignore[operator]
    for parameter in _fsdp_params(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def refuse_unsupported_sharding(model: nn.Module) -> None:
    """Refuse a model whose passes cannot end on all ranks together."""
    if not _gathers(model):
        raise InvalidArgument(
            f"fully_shard was called on modules inside {type(model).__name__} and not on the whole model: call "
            f"fully_shard(model) last"
        )
    if not all(hasattr(model, name) for name in _NEEDED):
        raise InvalidArgument(
            f"fully_shard needs torch 2.13 or later here, and this is {torch.__version__}: use DistributedDataParallel"
        )
    _refuse_parameters(dict(model.named_parameters()))
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
    """Refuse settings that changed since the Runner was made, and gradients that are not summed yet.

    ``factor`` is the ``gradient_divide_factor`` at that time.
    """
    for group in groups:
        _refuse_settings(group)
        if group.gradient_divide_factor != factor:
            raise InvalidArgument(
                "set_gradient_divide_factor() was called after Runner() was made: call it before, with the same on "
                "each module"
            )
        if any(map(_has_local_gradient, group.fsdp_params)):
            raise InvalidArgument(
                "an earlier backward pass left gradients that are not summed over the ranks "
                "(set_requires_gradient_sync(False)): let the Runner accumulate, or call model.reset_iter_state() to "
                "drop them"
            )
    if not model._get_fsdp_state()._state_ctx.is_last_backward:  # type: ignore[operator]
        raise InvalidArgument(
            "backward passes are not finished (set_is_last_backward(False)): call model.set_is_last_backward(True) "
            "before"
        )


def _refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that are not sharded, or not over one mesh: other ranks would take no part in the passes."""
    first = ""
    for name, parameter in parameters.items():
        if not has_shards(parameter):
            raise InvalidArgument(
                f"the parameter {name} is not sharded (ignored_params=), so its gradient is not summed over the ranks: "
                f"do not ignore it"
            )
        if parameter.device_mesh.ndim > 1:
            raise InvalidArgument(
                f"the parameter {name} is sharded over a mesh of {parameter.device_mesh.ndim} dimensions (HSDP or "
                f"tensor parallelism), which is not supported: call fully_shard() with a mesh of one dimension"
            )
        first = first or name
        ranks, others = (dist.get_process_group_ranks(parameters[one].device_mesh.get_group()) for one in (name, first))
        if ranks != others:
            raise InvalidArgument(
                f"the parameter {name} is sharded over the ranks {ranks}, and {first} over {others}: call "
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


def _has_local_gradient(parameter: Any) -> bool:
    """Return whether a gathered parameter has a gradient that is not summed over the ranks."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)
