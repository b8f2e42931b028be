"""Every private name of ``fully_shard`` that is used here, and the releases of torch in which it was tried.

Nothing else reads them. In another release they may mean something else, so none is read there. A pass that fails on
one rank then ends the training on all (``passes.py``).
"""
# ruff: noqa: SLF001 - this is the place for them

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autobatch.undo.gradients import NARROW

TRIED_IN = ("2.13",)


def is_tried() -> bool:
    """Return whether this release of torch was tried with these names."""
    return find_release() in TRIED_IN


def find_release() -> str:
    """Return ``"2.13"`` for torch 2.13.1."""
    return ".".join(torch.__version__.split(".")[:2])


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on the model or on a module in it."""
    return isinstance(model, nn.Module) and any(map(gathers, model.modules()))


def gathers(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on the module: then torch has imported it, which takes 0.6 s."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules on which ``fully_shard`` was called."""
    return [module for module in model.modules() if gathers(module)]


def param_groups(model: nn.Module) -> list[Any]:
    """Return each ``FSDPParamGroup``: parameters that are gathered together, in the same order on each rank.

    Read of one: ``gradient_divide_factor``, ``offload_policy``, ``reduce_grads``, ``all_reduce_grads``,
    ``reshard_after_backward``, ``mp_policy``, ``mesh_info``, ``fsdp_params``.
    """
    groups = [group for module in sharded_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]
    return [*{id(group): group for group in groups}.values()]  # fully_shard([a, b]) makes one of two modules


def sums_are_narrow(group: Any) -> bool:
    """Return whether torch would add up a group's gradients of several micro-batches in 16 bits."""
    policy = group.mp_policy
    dtypes = {policy.reduce_dtype or policy.param_dtype or p.sharded_param.dtype for p in group.fsdp_params}
    return not dtypes.isdisjoint(NARROW)


def has_all_reduce_hook(group: Any) -> bool:
    return group._all_reduce_hook is not None


def collectives_of(group: Any) -> tuple[Any, Any]:
    """Return what gathers the parameters of a group, and what scatters its gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_collectives(group: Any, gather: Any, scatter: Any) -> None:
    """Set them, in place of those that ``set_custom_all_gather`` may have set: torch cannot read these."""
    group._all_gather_comm, group._reduce_scatter_comm = gather, scatter


def replicas_of(group: Any) -> Any | None:
    """Return the process group over which shards are replicated (HSDP), if they are."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def set_replicas(group: Any, replicas: Any) -> None:
    """Set it."""
    group.mesh_info.replicate_process_group = replicas


def has_run(model: nn.Module) -> bool:
    """Return whether a pass of the model has begun: until then there is nothing to clear."""
    return model._get_fsdp_state()._is_root is not None  # type: ignore[operator]


def ends_backward(model: nn.Module) -> bool:
    """Return whether the next backward pass is the last one (``set_is_last_backward``)."""
    return bool(model._get_fsdp_state()._state_ctx.is_last_backward)  # type: ignore[operator]


def unsharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return extra tensors that count as parameters in a graph: those that were gathered at least once."""
    return [p._unsharded_param for p in _fsdp_params(model) if hasattr(p, "_unsharded_param")]


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that take gathered parameters; torch frees their memory between passes."""
    return [tensor for p in _fsdp_params(model) for tensor in p.all_gather_outputs]


def has_local_gradients(model: nn.Module) -> bool:
    """Return whether a gathered parameter has a gradient that is not summed over the ranks."""
    return any(
        p.unsharded_accumulated_grad is not None
        or (hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None)
        for p in _fsdp_params(model)
    )


def drop_local_gradients(model: nn.Module) -> None:
    """Drop gradients that are not summed over the ranks; ``reset_iter_state`` leaves them (torch 2.13)."""
    for parameter in _fsdp_params(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _fsdp_params(model: nn.Module) -> Iterator[Any]:
    for group in param_groups(model) if is_tried() else ():
        yield from group.fsdp_params
