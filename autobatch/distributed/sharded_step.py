"""Synchronizes one step over the ranks if parameters are sharded: totals, loss, clipping and update."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from autobatch.distributed.lockstep import Lockstep
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.reduction import LossSlot
from autobatch.distributed.sharding import has_shards
from autobatch.distributed.shared_step import SharedStep, describe_slots, find_wanted, make_slots
from autobatch.undo.gradients import gradient_dtype
from autobatch.undo.interrupts import deferred_interrupts

__all__ = ["ShardedStep", "begin_step"]


class ShardedStep(SharedStep):
    """One step, on every rank, of a model whose parameters are sharded.

    Attributes:
        lockstep: Its passes.
        gradient_norm: Over all ranks, before clipping; ``None`` without clipping.
    """

    lockstep: Lockstep
    gradient_norm: torch.Tensor | None = None

    def __init__(
        self, ranks: Ranks, step: int, action: str, optimizer: Any | None = None, max_grad_norm: float | None = None
    ) -> None:
        """Nothing is said before ``open``.

        Args:
            ranks: Whose model is sharded.
            step: Of the Runner.
            action: ``"step"`` or ``"accumulate"``.
            optimizer: Whose step is the update, and whose parameters' gradients are clipped.
            max_grad_norm: To this norm, over all ranks.
        """
        super().__init__(ranks, step, action, optimizer)
        assert ranks.lockstep is not None  # noqa: S101 - narrows for mypy
        self.lockstep, self._max_grad_norm = ranks.lockstep, max_grad_norm

    def begin(self) -> None:
        """From here on each pass is ended together, until ``close``."""
        self.lockstep.begin(self._agreement)

    def close(self) -> None:
        """The model's passes are its own again."""
        self.lockstep.leave()
        super().close()

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error that ended this rank's step, unless they know."""
        self.lockstep.abandon(error)

    def agree_on(self, micro_batches: int) -> int:
        """The most micro-batches that any rank has still to run."""
        said = self._agreement.meet("micro-batches", count=micro_batches)
        return max(int(one["count"]) for one in said)

    def _describe(self, earlier: Sequence[torch.Tensor | None]) -> str:
        """Each rank has its own part of a sharded gradient, so of that only whether it is there can be compared."""
        there = [gradient for gradient in earlier if gradient is not None]
        if not there:
            return ""
        whole = super()._describe([gradient for gradient in there if not has_shards(gradient)])
        return "".join("01"[gradient is not None] for gradient in earlier) + whole

    @torch.no_grad()
    def combine(
        self,
        parameters: Sequence[torch.Tensor],
        sums: MutableMapping[torch.Tensor, torch.Tensor],
        loss: torch.Tensor | None,
        *,
        counted: float,
        unit: float | None,
    ) -> torch.Tensor | None:
        """Make the loss that of all ranks, and correct gradients where the totals were not known before.

        Arguments, result and errors are those of ``SharedStep.combine``; sharded gradients were summed in the backward
        passes, and those of parameters that only the optimizer holds are summed here.
        """
        self._ranks.own_time.stop()
        device = next(parameter.device for parameter in parameters)
        reduction = self._ranks.reduction
        whole = [parameter for parameter in parameters if parameter.requires_grad and not has_shards(parameter)]
        slots = make_slots(whole, sums)
        _multiply(whole, sums, 1 / self.lockstep.divisor)  # by which losses were multiplied, against torch's mean
        reduction.reserve(whole, device)
        results = {dtype: torch.empty((), dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
        with deferred_interrupts():
            said = self._agreement.meet(
                "ready",
                gradients=describe_slots(slots),
                trains="".join("01"[parameter.requires_grad] for parameter in parameters if not has_shards(parameter)),
                counted=None if unit is None else counted,
                unit=unit,
                runs=loss is not None,
                wide=loss is not None and loss.dtype is torch.float64,
            )
            stated = self._read_counts(said)
            if not stated:
                self._agreement.end()
                return None
            # Also on a rank in whose samples nothing counts: it has its part of the others' gradients.
            unit = next(one["unit"] for one in said if one["runs"])
            factor = 1.0 if unit is None else unit / math.fsum(one or 0.0 for one in stated)
            last = LossSlot(loss, results[torch.float64 if any(one["wide"] for one in said) else torch.float32])
            reduction.sum([*find_wanted(slots, said), last], factor)
        _correct([parameter for parameter in parameters if has_shards(parameter)], sums, factor)
        return last.result

    def agree_on_update(self) -> None:
        """Clip, then wait until no rank has anything left that could fail before the optimizer's step.

        Buffers stay each rank's own, as with ``fully_shard``.
        """
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)
        with deferred_interrupts():
            self._meet_to_update()

    def _clip(self, most: float) -> None:
        """As ``torch.nn.utils.clip_grad_norm_``, whose collectives would wait for a rank that fails."""
        parts, whole = _split_gradients(self._optimizer)
        said = self._agreement.meet("clip", square=_sum_squares(parts), whole=_sum_squares(whole))
        norm = math.sqrt(math.fsum(one["square"] for one in said) + said[0]["whole"])  # which is the same on each rank
        self.gradient_norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
        factor = most / (norm + 1e-6)
        if not factor >= 1:  # not "<": of a norm that is nan the factor is, too
            for gradient in (*parts, *whole):
                gradient.mul_(factor)


def begin_step(ranks: Ranks, step: int, action: str, optimizer: Any | None, max_grad_norm: float | None) -> SharedStep:
    """This rank's part of a step."""
    if ranks.lockstep is not None:
        return ShardedStep(ranks, step, action, optimizer, max_grad_norm)
    return SharedStep(ranks, step, action, optimizer)


def _correct(
    parameters: Sequence[torch.Tensor], sums: MutableMapping[torch.Tensor, torch.Tensor], factor: float
) -> None:
    """Multiply every gradient, sums in float32 before they are rounded."""
    summed = set(sums)
    while sums:
        parameter, total = sums.popitem()
        parameter.grad = (total if factor == 1 else total.mul_(factor)).to(gradient_dtype(parameter))
    if factor != 1:
        for parameter in parameters:
            if parameter.grad is not None and parameter not in summed:
                parameter.grad.mul_(factor)


def _multiply(parameters: Sequence[torch.Tensor], sums: Mapping[torch.Tensor, torch.Tensor], factor: float) -> None:
    """Multiply gradients, or their sums in float32."""
    for parameter in parameters:
        gradient = sums.get(parameter, parameter.grad)
        if gradient is not None:
            gradient.mul_(factor)


def _split_gradients(optimizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the gradients that the optimizer uses, this rank's part of those that are sharded; and the others."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [gradient for gradient in gradients if gradient is not None]
    parts = [gradient.to_local() for gradient in gradients if has_shards(gradient)]
    return parts, [gradient for gradient in gradients if not has_shards(gradient)]


def _sum_squares(gradients: Sequence[torch.Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    return float(norms.double().square().sum())
