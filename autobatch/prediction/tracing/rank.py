"""Chooses what a rank does beside its micro-batches, by how the ranks share the model."""

from __future__ import annotations

from torch import nn

from autobatch.prediction.parallelism import Parallelism
from autobatch.prediction.tracing.fake_model import FakeModel
from autobatch.prediction.tracing.one_rank import OneRank
from autobatch.prediction.tracing.recording import Recorder
from autobatch.prediction.tracing.replicated import Replicated
from autobatch.prediction.tracing.sharded import FullySharded

__all__ = ["take_part"]


def take_part(parallelism: Parallelism | None, model: nn.Module, recorder: Recorder, fakes: FakeModel) -> OneRank:
    """The rank whose step is traced; ``model`` holds fake tensors now."""
    if parallelism is None:
        return OneRank()
    if parallelism.strategy == "ddp":
        return Replicated(model, recorder)
    return FullySharded(model, recorder, fakes.shards, parallelism.world_size)
