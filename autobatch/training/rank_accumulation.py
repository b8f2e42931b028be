"""Accumulates the gradient of a whole batch on one of several ranks, up to the sum.

1. ``attempt`` runs the micro-batches. It holds the last backward pass back where gradients can be summed in it.
2. ``agree`` lets all ranks make the step, or none.
3. ``run_held`` runs the backward pass that was held back.
4. ``confirm_sum`` lets all ranks keep the gradients that were summed in that pass, or begin again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.distributed.shared_step import SharedStep
from autobatch.torch_internals.storages import has_shards
from autobatch.training.accumulation import Accumulation
from autobatch.training.accumulation_state import AccumulationState, HeldPass, Shortage
from autobatch.undo.gradients import gradient_dtype
from autobatch.undo.undo import Undo


@dataclass
class RankAccumulation(Accumulation):
    """Accumulates on one rank what ``DistributedDataParallel`` sums over all; a training on one rank uses it, too."""

    def _end_micro_batch(self, part: torch.Tensor | None, samples: Any, progress: AccumulationState) -> None:
        if progress.shared is not None and part is not None:
            progress.may_hold = self._may_hold(progress)
            # In watched steps it is not known yet what a pass does.
            is_known = not self._is_watched and progress.shared.can_overlap(self.workload.parameters())
            if progress.may_hold and is_known:
                progress.held = HeldPass(part, samples)
                return
        super()._end_micro_batch(part, samples, progress)

    def _may_hold(self, progress: AccumulationState) -> bool:
        """Return whether this backward pass may wait until the ranks agree, so that they sum gradients meanwhile.

        If one rank's may not, all sum after it, and none holds its pass back in the next step.
        """
        return (
            len(progress.aux) == len(progress.micro_batches) - 1
            and not self._has_sparse
            and not self._sums.hooks  # sums in float32 are rounded after the last pass
            and not progress.had_gradients  # parameters that have only an earlier gradient are filled with zeros
            and self.backward is None  # the user's own may run anything; sharded gradients are summed in it
        )

    def run_held(
        self, progress: AccumulationState, undo: Undo, block: AbstractContextManager[None] | None = None
    ) -> Shortage | None:
        """Run the backward pass that ``attempt`` held back, if any, inside the block."""
        return self._find_shortage(self._run_held, progress, undo, block or nullcontext())

    def _run_held(self, progress: AccumulationState) -> None:
        held, progress.held = progress.held, None
        if held is not None:
            with self.device.micro_batch(progress.micro_batches[-1].size) or nullcontext():
                super()._end_micro_batch(*held, progress)

    def fill(self, undo: Undo) -> None:
        """Give zeros to parameters that have only an earlier gradient: their update needs state and room, too."""
        for parameter, gradient in zip(undo.gradients.parameters, undo.gradients.gradients, strict=True):
            has_none = parameter.grad is None and parameter not in self._sums.by_parameter
            if gradient is not None and has_none and parameter.requires_grad and not has_shards(parameter):
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def agree(self, progress: AccumulationState, undo: Undo, shared: SharedStep, did: Mapping[str, int]) -> bool:
        """Let all ranks agree that they make the step; see ``SharedStep.agree``."""
        if self._stated.is_due:
            self._check_counts(progress, is_shared=True)
        loss = progress.loss
        counted, unit = loss.divisor()
        return shared.agree(
            self.workload.parameters(),
            self._sums.by_parameter,
            dict(zip(undo.gradients.parameters, undo.gradients.gradients, strict=True)),
            loss.value,
            counted=counted,
            unit=unit,
            states=loss.unit is not None,
            holds=progress.held is not None,
            may_hold=progress.may_hold,
            did={**progress.describe(), **did},
        )

    def confirm_sum(
        self,
        progress: AccumulationState,
        undo: Undo,
        shared: SharedStep,
        did: Mapping[str, int],
        shortage: Shortage | None,
    ) -> Shortage | None:
        """Let all ranks keep the gradients that were summed in ``run_held``, or begin again; return why."""
        if shared.confirm_sum({**progress.describe(), **did}, is_done=shortage is None):
            return None
        reason = "a rank ran out of memory, or had other gradients than were expected"
        undo.refuse_lost(reason)
        if shortage is None:
            progress.restart()
        return shortage or Shortage(failed_size=0, reason=reason)
