"""Allocates what a rank of ``DistributedDataParallel`` holds beside a process of its own, which holds nothing more.

Covers the constructor (a broadcast of the model, then the reducer's buckets, which stay), and the Runner's own sum of
the gradients and copies of buffers, for which its very code runs; nothing is sent. Of torch 2.13: the reducer has one
bucket for each dtype, as large as all gradients in it, and builds smaller ones only in a forward pass of the wrapper,
which the Runner never calls. So ``gradient_as_bucket_view`` makes no difference to the Runner's memory. Does not cover
``find_unused_parameters``, which divides the buckets, nor what NCCL takes outside the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from autobatch.distributed.data_parallel import SharedBuffers
from autobatch.distributed.reduction import GradientSlot, Reduction, make_loss
from autobatch.prediction.tracing.fake_device import DEVICE
from autobatch.prediction.tracing.recording import Recorder
from autobatch.undo.gradients import Float32Sums

__all__ = ["OneRank", "Replicated"]

_BROADCAST_BYTES = 250 * 2**20
"""Of the model at once (``DistributedDataParallel.broadcast_bucket_size``)."""
_IN_FLIGHT = 3
"""Broadcasts at once: a third begins before the first is waited for (torch/csrc/distributed/c10d/comm.cpp)."""


class OneRank:
    """The only rank, which holds the whole model and sums over no others."""

    def part_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What of a parameter this rank holds, steps and has a gradient of: all of it."""
        return parameter

    def reduce(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Make each ``.grad`` what the optimizer steps with, after the last micro-batch."""
        sums.write()

    def share_buffers(self) -> None:
        """Take the first rank's buffers, before the optimizer steps."""


class _UnsentReduction(Reduction):
    """Does all but the collective."""

    def _sum_bucket(self, bucket: torch.Tensor) -> None:
        """Nothing is sent."""


class Replicated(OneRank):
    """A rank that has all of the model, made from a model on the fake device."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        """Allocate what the constructor of ``DistributedDataParallel`` does."""
        self._model, self._recorder = model, recorder
        self._reduction = _UnsentReduction(None, None)  # type: ignore[arg-type] # the channel says who is gone
        _broadcast([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = [
            torch.empty(sum(parameter.numel() for parameter in alike), dtype=alike[0].dtype, device=DEVICE)
            for alike in _group_by_dtype(trained)
        ]
        self._label(self._buckets)

    def reduce(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Sum gradients through buckets, as ``SharedStep.sum`` does."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        loss = make_loss(parameters)
        self._label(self._reduction.reserve([*trained, loss]))
        slots = [GradientSlot(parameter, sums.take()) for parameter in trained]
        there = [slot for slot in slots if slot.has_any()]
        self._reduction.sum([*there, GradientSlot(loss, {})])

    def share_buffers(self) -> None:
        """Copy the buffers, in which form they are sent."""
        SharedBuffers([*self._model.buffers()])

    def _label(self, buckets: Iterable[torch.Tensor]) -> None:
        for bucket in buckets:
            self._recorder.label(bucket, "bucket", "")


def _group_by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return [*groups.values()]


def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Allocate flat copies of the tensors, of which a few are there at once."""
    held: list[torch.Tensor] = []
    for alike in _group_by_dtype(tensors):
        count = 0
        for tensor in alike:
            count += tensor.numel()
            if count * tensor.element_size() >= _BROADCAST_BYTES or tensor is alike[-1]:
                held.append(torch.empty(count, dtype=tensor.dtype, device=DEVICE))
                del held[: 1 - _IN_FLIGHT]
                count = 0
