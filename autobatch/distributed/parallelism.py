"""Finds how a model is parallel: in ``DistributedDataParallel``, by ``fully_shard``, or not at all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch.distributed.data_parallel import module_of, refuse_tensor_parallelism, refuse_unsupported
from autobatch.distributed.ranks import Ranks, world_size
from autobatch.distributed.sharded import ClippedShardedStep, ShardedRanks, ShardedStep, is_sharded
from autobatch.distributed.shared_step import ConfirmedStep, SharedStep
from autobatch.errors import InvalidArgument


def find_ranks(model: nn.Module) -> Ranks | None:
    """Find the ranks over which the user's wrapped model is parallel; ``None`` if it trains on one."""
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        return Ranks(model, group) if dist.get_world_size(group) > 1 else None
    if is_sharded(model):  # on one rank, too: a pass that broke off has to be cleared
        return ShardedRanks(model)
    size = world_size()
    if size > 1:
        refuse_unsupported(model)
        refuse_tensor_parallelism(model)
        raise InvalidArgument(
            f"{size} ranks are running, and gradients of {type(model).__name__} are not summed over them: pass "
            f"torch.nn.parallel.DistributedDataParallel(model) or fully_shard(model), or plan on one rank and use "
            f"plan.settings()"
        )
    return None


def take_module(model: nn.Module, ranks: Ranks | None) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``; its passes do not communicate.

    On one rank, too: with ``static_graph=True`` the wrapper cannot run two forward passes in a row, and with
    ``gradient_as_bucket_view=True`` it moves gradients.
    """
    module = module_of(model)
    if ranks is not None:
        refuse_unsupported(model)
        if not isinstance(ranks, ShardedRanks):
            refuse_tensor_parallelism(module)
    return module


def begin_step(
    ranks: Ranks,
    name: str,
    optimizer: Any | None = None,
    *,
    max_grad_norm: float | None = None,
    is_confirmed: bool = False,
) -> SharedStep:
    """Make this rank's part of a step; ``is_confirmed``: all ranks confirm it after the sum."""
    if isinstance(ranks, ShardedRanks):
        # Only clipping comes between sum and update: sharded models take no scaler and no framework.
        if max_grad_norm is None:
            return ShardedStep(ranks, name, optimizer)
        return ClippedShardedStep(ranks, name, optimizer, max_grad_norm)
    return (ConfirmedStep if is_confirmed else SharedStep)(ranks, name, optimizer)
