"""Reads models that ``fully_shard`` (FSDP2) has divided, refuses unsupported ones, and clears passes that broke off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.distributed.sharded.internals import (
    drop_local_gradients,
    ends_backward,
    gathers,
    has_all_reduce_hook,
    has_local_gradients,
    has_run,
    is_tried,
    param_groups,
)
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import has_shards

_NEEDED = ("reset_iter_state", "set_custom_all_gather", "set_custom_reduce_scatter")


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks over which the parameters are sharded, those of all replicas; ``None``: all there are."""
    mesh = _mesh_of(model)
    group: dist.ProcessGroup | None = mesh.get_group() if mesh.ndim == 1 else None
    return group


def count_replicas(model: nn.Module) -> int:
    """Return the number of ranks that have each shard: more than one with a mesh of two dimensions (HSDP)."""
    mesh = _mesh_of(model)
    return 1 if mesh.ndim == 1 else int(mesh.size(0))


def _mesh_of(model: nn.Module) -> Any:
    parameter: Any = next(parameter for parameter in model.parameters() if has_shards(parameter))
    return parameter.device_mesh


def divisor_of(model: nn.Module) -> float:
    """Return the number by which torch divides the sum of the ranks' gradients."""
    divisor = param_groups(model)[0].gradient_divide_factor if is_tried() else None
    return float(_mesh_of(model).size() if divisor is None else divisor)


@contextmanager
def keeping_parameters(model: nn.Module) -> Iterator[None]:
    """Block that leaves modules the parameters that they have now, gathered or in shards."""
    tables = [module._parameters for module in model.modules() if module._parameters]  # noqa: SLF001 - no public way
    held = [table.copy() for table in tables]
    yield
    for table, parameters in zip(tables, held, strict=True):
        table.update(parameters)


def reset(model: nn.Module) -> None:
    """Clear a forward or backward pass that broke off; sharded gradients stay."""
    if has_run(model):
        model.reset_iter_state()  # type: ignore[operator]
        drop_local_gradients(model)


def refuse_unsupported_sharding(model: nn.Module) -> None:
    """Refuse a model whose passes cannot end on all ranks together."""
    if not gathers(model):
        raise InvalidArgument(
            f"fully_shard was called on modules inside {type(model).__name__} and not on the whole model: call "
            f"fully_shard(model) last"
        )
    if not all(hasattr(model, name) for name in _NEEDED):
        raise InvalidArgument(
            f"fully_shard needs torch 2.13 or later here, and this is {torch.__version__}: use DistributedDataParallel"
        )
    _refuse_parameters(dict(model.named_parameters()))
    groups = param_groups(model) if is_tried() else []
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
    if has_local_gradients(model):
        raise InvalidArgument(
            "an earlier backward pass left gradients that are not summed over the ranks "
            "(set_requires_gradient_sync(False)): let the Runner accumulate, or call model.reset_iter_state() to "
            "drop them"
        )
    if not ends_backward(model):
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
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim > 2 or not all(placement.is_replicate() for placement in placements[:-1]):
            raise InvalidArgument(
                f"the parameter {name} is sharded over {mesh.ndim} dimensions of a mesh (tensor parallelism), which is "
                f"not supported: call fully_shard() with a mesh of one dimension, or of two (replicate, shard)"
            )
        if mesh.ndim == 2 and mesh.size() != dist.get_world_size():
            raise InvalidArgument(
                f"the parameter {name} is on a mesh of {mesh.size()} of {dist.get_world_size()} ranks and two "
                f"dimensions: call fully_shard() with a mesh of all ranks, or of one dimension"
            )
        first = first or name
        ranks, others = (parameters[one].device_mesh.mesh.tolist() for one in (name, first))
        if ranks != others:
            raise InvalidArgument(
                f"the parameter {name} is sharded over the ranks {ranks}, and {first} over {others}: call "
                f"fully_shard() with the same mesh on each module"
            )


def _refuse_settings(group: Any) -> None:
    if not (group.reduce_grads and group.all_reduce_grads):
        raise InvalidArgument(
            "gradients are not summed over the ranks: call model.set_requires_gradient_sync(True) before"
        )
    if has_all_reduce_hook(group):
        raise InvalidArgument("set_all_reduce_hook() is not supported: leave it out")
    if not group.reshard_after_backward:
        raise InvalidArgument("set_reshard_after_backward(False) is not supported: leave it out")
