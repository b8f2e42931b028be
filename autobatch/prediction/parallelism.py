"""Reads how many ranks a predicted step runs on, and how they share the model."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch._arguments import check_choice
from autobatch._bounds import LONGEST_LIST
from autobatch._formatting import show_value
from autobatch.distributed.data_parallel import module_of
from autobatch.errors import InvalidArgument
from autobatch.prediction.prediction import Strategy

STRATEGIES = ("ddp", "fsdp2")
_DEFAULT: Strategy = "ddp"


class Parallelism(NamedTuple):
    """Data parallelism: each rank runs samples of its own."""

    strategy: Strategy
    world_size: int


def read_parallelism(
    model: nn.Module, world_size: Any | None, data_parallel: Any | None
) -> tuple[nn.Module, Parallelism | None]:
    """Read the arguments of ``predict``: the model that one rank runs, and how ranks share it (``None``: one process).

    Raises:
        InvalidArgument: An argument is wrong, or the model is sharded already.
    """
    inner = module_of(model)
    if data_parallel is not None:
        check_choice("data_parallel", data_parallel, STRATEGIES)
    if world_size is None and isinstance(model, DistributedDataParallel):
        return inner, Parallelism(data_parallel or _DEFAULT, dist.get_world_size(model.process_group))
    given: Any = 1 if world_size is None else world_size
    is_count = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not is_count or not 1 <= (ranks := int(given)) <= LONGEST_LIST:
        raise InvalidArgument(
            f"world_size={show_value(given)} must be an int from 1 to {LONGEST_LIST}: it counts ranks"
        )
    if ranks == 1 and data_parallel is not None:
        raise InvalidArgument(
            f"data_parallel={data_parallel!r} is of several ranks: pass world_size=2 or more, or leave it out"
        )
    for name, parameter in inner.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise InvalidArgument(
                f"the parameter {name} is sharded (DTensor): predict with the model as it is before fully_shard(), and "
                f"with world_size= and data_parallel='fsdp2'"
            )
    return inner, Parallelism(data_parallel or _DEFAULT, ranks) if ranks > 1 else None


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module) -> list[nn.Module]:
    """Find the modules that one would call ``fully_shard`` with, before the model.

    They are children of a container (``ModuleList``, ``ModuleDict``, ``Sequential``) that are of one class and have
    modules themselves: a single layer is not a unit. Units do not nest.
    """
    children = [*model.children()]
    blocks = [child for child in children if [*child.children()]] if isinstance(model, _CONTAINERS) else []
    kinds = [type(block) for block in blocks]
    units = [block for block in blocks if kinds.count(type(block)) > 1 and next(block.parameters(), None) is not None]
    others = [child for child in children if not any(child is unit for unit in units)]
    return units + [unit for child in others for unit in find_units(child)]
