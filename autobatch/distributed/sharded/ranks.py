"""Defines the ranks over which ``fully_shard`` has divided a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharded.internals import is_tried, sharded_modules
from autobatch.distributed.sharded.lockstep import Lockstep
from autobatch.distributed.sharded.model import count_replicas, divisor_of, group_of, refuse_unsupported_sharding
from autobatch.distributed.sharded.passes import Passes, warn_of_release


class ShardedRanks(Ranks):
    """The ranks over which a model is sharded, and this one among them.

    Attributes:
        passes: The model's passes, which all ranks end together.
        replicas: Number of ranks that have each shard.
    """

    def __init__(self, model: nn.Module) -> None:
        """Collective the first time that a process group is used."""
        refuse_unsupported_sharding(model)
        super().__init__(model, group_of(model))
        self.replicas = count_replicas(model)
        self.passes: Passes = Lockstep(model, self.channel) if is_tried() else _make_passes(model, self.channel)


def _make_passes(model: nn.Module, channel: Any) -> Passes:
    """Return passes of a release in which the model's settings cannot be read: set them."""
    warn_of_release()
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(divisor_of(model))
    return Passes(model, channel)
