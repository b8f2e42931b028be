"""Synchronizes one step over the ranks if parameters are sharded: totals, loss, clipping and update."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from autobatch.distributed.channel import uninterrupted
from autobatch.distributed.sharded.passes import Passes
from autobatch.distributed.sharded.ranks import ShardedRanks
from autobatch.distributed.shared_step import ConfirmedStep, SharedStep
from autobatch.records import IN_EACH, SUMMINGS, Summing
from autobatch.torch_internals.storages import has_shards


class ShardedStep(SharedStep):
    """One step, on every rank, of a model with sharded parameters."""

    passes: Passes
    summing: Summing = IN_EACH  # what this rank has memory for

    def __init__(self, ranks: ShardedRanks, name: str, optimizer: Any | None = None) -> None:
        """Send nothing yet."""
        super().__init__(ranks, name, optimizer)
        self.passes, self._replicas = ranks.passes, ranks.replicas

    def begin(self) -> None:
        """Let all ranks end each pass together, until ``close``."""
        self.passes.begin(self._agreement)
        self._ranks.own_time.start()

    def close(self) -> None:
        """Let the model run passes outside a step again."""
        self.passes.leave()
        super().close()

    def fail(self, error: BaseException) -> None:
        """Send an error that ended this rank's step to the others, unless they know it."""
        if self.is_agreed:
            super().fail(error)
        self.passes.abandon(error)

    def agree_on_number(
        self, micro_batches: int, weights: Mapping[str, float], samples: int
    ) -> tuple[int, tuple[Mapping[str, float], int]]:
        """Return the most micro-batches that any rank has left, and the totals of each term and of the samples.

        Gradients are summed as rarely as every rank has memory for.
        """
        own = SUMMINGS.index(min(self.summing, self.passes.most, key=SUMMINGS.index))
        gathered, totals = self._exchange_totals(
            "micro-batches", weights, samples, micro_batches=micro_batches, summing=own
        )
        number = max(int(values["micro_batches"]) for values in gathered)
        self.passes.expect(number, SUMMINGS[min(int(values["summing"]) for values in gathered)])
        return number, totals

    def sum(
        self, parameters: Sequence[torch.Tensor], sums: MutableMapping[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        """Sum as ``SharedStep``, after undoing the factor of whole gradients.

        Losses were multiplied by the divisor, because torch divides sharded gradients by it in each pass.
        """
        with uninterrupted():
            for parameter in parameters:
                gradient = sums.get(parameter, parameter.grad)
                if gradient is not None and parameter.requires_grad and not has_shards(parameter):
                    gradient.div_(self.passes.divisor)
        return super().sum(parameters, sums)

    def _copy_buffers(self) -> None:
        """Each rank keeps its own buffers, as with ``fully_shard``."""


class ClippedShardedStep(ShardedStep, ConfirmedStep):
    """One step whose gradients are clipped to a norm over all ranks.

    Attributes:
        gradient_norm: Norm before clipping.
    """

    gradient_norm: torch.Tensor | None = None

    def __init__(self, ranks: ShardedRanks, name: str, optimizer: Any, max_grad_norm: float) -> None:
        """Send nothing yet."""
        super().__init__(ranks, name, optimizer)
        self._max_grad_norm = max_grad_norm

    def _confirm(self, **values: Any) -> list[dict[str, Any]]:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does; its collectives would wait for a rank that fails."""
        parts, whole = _split_gradients(self._optimizer)
        squares = {"square": _sum_squares(parts), "whole": _sum_squares(whole)}
        gathered = self._agreement.gather("clip", squares, **values)
        square = math.fsum(values["square"] for values in gathered) / self._replicas
        square += gathered[0]["whole"]  # the same on each rank
        norm = math.sqrt(square)
        factor = self._max_grad_norm / (norm + 1e-6)
        with uninterrupted():  # the other ranks make the update now
            self.gradient_norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
            if not factor >= 1:  # not "<", which is false for nan
                for gradient in (*parts, *whole):
                    gradient.mul_(factor)
        return gathered


def _split_gradients(optimizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's parts of the optimizer's sharded gradients, and its other gradients."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [gradient for gradient in gradients if gradient is not None]
    parts = [gradient.to_local() for gradient in gradients if has_shards(gradient)]
    return parts, [gradient for gradient in gradients if not has_shards(gradient)]


def _sum_squares(gradients: Sequence[torch.Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    return float(norms.double().square().sum())
