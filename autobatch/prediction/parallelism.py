"""Reads on how many ranks a predicted step will run, and how these share the model.

Covers the arguments, the module inside ``DistributedDataParallel``, and which modules are worth a unit of their own, to
shard or to checkpoint. Does not cover what a rank allocates (``tracing.replicated``, ``tracing.sharded``).
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch._arguments import check_choice
from autobatch._bounds import LONGEST_LIST
from autobatch._formatting import show_value
from autobatch.distributed.data_parallel import module_of
from autobatch.errors import InvalidArgument
from autobatch.prediction.record import Strategy

__all__ = ["STRATEGIES", "Parallelism", "find_units", "read_parallelism"]

STRATEGIES = ("ddp", "fsdp2")
_DEFAULT: Strategy = "ddp"


class Parallelism(NamedTuple):
    """Data parallelism: each rank runs samples of its own."""

    strategy: Strategy
    world_size: int


def read_parallelism(
    model: nn.Module, world_size: Any | None, data_parallel: Any | None
) -> tuple[nn.Module, Parallelism | None]:
    """The model that one rank runs, and how many ranks share it; ``None``: one process has all.

    Args:
        model: As the user gave it; ``DistributedDataParallel`` is taken off, and says how many ranks there are.
        world_size: Ranks; default: those of the wrapper, else one.
        data_parallel: ``"ddp"`` or ``"fsdp2"``; default: ``"ddp"`` where there are several ranks.

    Raises:
        InvalidArgument: They cannot mean anything, or the model is sharded already.
    """
    inner = module_of(model)
    if data_parallel is not None:
        check_choice("data_parallel", data_parallel, STRATEGIES)
    if world_size is None and isinstance(model, DistributedDataParallel):
        return inner, Parallelism(data_parallel or _DEFAULT, dist.get_world_size(model.process_group))
    ranks = 1 if world_size is None else _check_ranks(world_size)
    if ranks == 1 and data_parallel is not None:
        raise InvalidArgument(
            f"data_parallel={data_parallel!r} is of several ranks: pass world_size=2 or more, or leave it out"
        )
    _refuse_sharded(inner)
    return inner, Parallelism(data_parallel or _DEFAULT, ranks) if ranks > 1 else None


def _check_ranks(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= int(value) <= LONGEST_LIST:
        raise InvalidArgument(
            f"world_size={show_value(value)} must be an int from 1 to {LONGEST_LIST}: it counts ranks"
        )
    return int(value)


def _refuse_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise InvalidArgument(
                f"the parameter {name} is sharded (DTensor): predict with the model as it is before fully_shard(), and "
                f"with world_size= and data_parallel='fsdp2'"
            )


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The modules that one would call ``fully_shard`` with, one by one, before the model itself.

    Those are the children of a container (``ModuleList``, ``ModuleDict``, ``Sequential``) that are of one class and
    have modules of their own: single layers are no units. Nothing inside a unit is another one.
    """
    return [*_find(model)]


def _find(module: nn.Module) -> Iterator[nn.Module]:
    children = [*module.children()]
    blocks = [child for child in children if [*child.children()]] if isinstance(module, _CONTAINERS) else []
    kinds = [type(block) for block in blocks]
    units = [block for block in blocks if kinds.count(type(block)) > 1 and next(block.parameters(), None) is not None]
    yield from units
    chosen = set(map(id, units))
    for child in children:
        if id(child) not in chosen:
            yield from _find(child)
