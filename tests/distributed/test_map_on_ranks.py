"""``map`` on several ranks: each runs pieces of its own, so a model whose forward passes communicate is refused."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.errors import InvalidArgument

INPUTS = torch.arange(160.0).view(40, 4)


def make_net():
    """With buffers, which DistributedDataParallel sends around in training."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def map_all():
    """Far more pieces on the second rank than on the first."""
    net, pieces = make_net(), {"max_piece": 40 if dist.get_rank() == 0 else 3}
    found = autobatch.map(DistributedDataParallel(net), INPUTS, **pieces)
    return torch.allclose(found, net.eval()(INPUTS).detach(), atol=1e-5)


def refuse_sharded():
    """In the model itself, and in what a function reaches."""
    sharded, found = shard(make_net()), []
    for fn in (sharded, lambda inputs: sharded(2 * inputs)):
        with pytest.raises(InvalidArgument) as caught:
            autobatch.map(fn, INPUTS)
        found.append(str(caught.value))
    return found


@cache
def answers(function):
    return values_of(run_ranks(function))


def test_each_rank_runs_pieces_of_its_own():
    """Nobody waits for a piece of another one."""
    assert answers(map_all) == [True, True]


@needs_sharding
def test_sharded_parameters_are_refused_on_each_rank():
    """Before anything runs: a rank with more pieces would wait without end."""
    text = (
        "map() cannot run FSDPSequential, whose parameters are sharded: ranks gather them together in each forward pass"
    )
    for found in answers(refuse_sharded):
        assert len(found) == 2
        assert all(one.startswith(text) for one in found)
