"""Trains models whose parameters fully_shard has divided: every rank runs the same passes in lockstep.

This is the door: nothing else in the package is imported from outside.
"""

from autobatch.distributed.sharded.internals import gathered_tensors, is_sharded, is_tried, unsharded_parameters
from autobatch.distributed.sharded.lockstep import DIFFERS, ONE_SAMPLE, PassDiffers, PassDropped
from autobatch.distributed.sharded.model import divisor_of, keeping_parameters
from autobatch.distributed.sharded.passes import Passes
from autobatch.distributed.sharded.ranks import ShardedRanks
from autobatch.distributed.sharded.step import ClippedShardedStep, ShardedStep
from autobatch.distributed.sharded.zero_backward import (
    ModelOutput,
    collect_outputs,
    edges_of,
    find_reached,
    run_zero_backward,
)

__all__ = [
    "DIFFERS",
    "ONE_SAMPLE",
    "ClippedShardedStep",
    "ModelOutput",
    "PassDiffers",
    "PassDropped",
    "Passes",
    "ShardedRanks",
    "ShardedStep",
    "collect_outputs",
    "divisor_of",
    "edges_of",
    "find_reached",
    "gathered_tensors",
    "is_sharded",
    "is_tried",
    "keeping_parameters",
    "run_zero_backward",
    "unsharded_parameters",
]
