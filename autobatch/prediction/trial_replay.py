"""Replays a trial of ``fit`` in the simulated allocator: a first step of two samples, caches released, then a step.

The allocator divides its segments differently where a process begins with the step: near the limit of a card of 2 GiB
that reserves up to 6 % less or 2.5 % more than the trial. A replay is within 1.7 % below and 3 % above (ten models,
torch 2.13 on the stand-in card of tests/card). Covers timelines
whose traces aligned. Does not cover how trials are run (``fitting.probe``). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autobatch.planning.evidence import FIRST_SIZE
from autobatch.prediction.allocator import simulate
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.step_parts import StepParts, find_parts, without_second_micro_batch
from autobatch.prediction.timeline import Block

__all__ = ["TrialReplay"]


class ForwardBytes(NamedTuple):
    """What a forward pass leaves in blocks: its input and output, what backward needs, and a workspace of cuBLAS."""

    left: int
    in_tensors: int  # of them, without the workspace


@dataclass(frozen=True)
class TrialReplay:
    """Trials of one estimated step, whose timeline is not interpolated."""

    estimate: Estimate

    def reserved(self, n: int) -> int:
        """Most bytes that the allocator takes during a trial of ``n`` samples."""
        _, sizes = self.estimate.with_workspaces(self.estimate.timeline.at(n))
        for block in self._made_first:
            sizes[block] = self._first_sizes[block]
        expandable = self.estimate.expandable_segments
        return simulate(self._order, sizes, expandable_segments=expandable, released_at=self._second_step).reserved

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes in blocks before the first step."""
        return self._bytes_before(self._parts.forwards[0])

    @cached_property
    def forward(self) -> ForwardBytes:
        """What the first forward pass leaves."""
        position = self._parts.first_backward
        kinds = [block.kind for block in self._blocks]
        begun = [entry for entry in self._order[:position] if 0 < entry <= len(kinds)]
        handles = sum(kinds[entry - 1] == "cuBLAS workspace" for entry in begun)
        left = self._bytes_before(position) - self.resident_bytes
        return ForwardBytes(left, left - handles * self.estimate.workspace_bytes)

    @cached_property
    def _first_step(self) -> tuple[list[int], list[int]]:
        return self.estimate.with_workspaces(self.estimate.timeline.at(FIRST_SIZE))

    @property
    def _first_sizes(self) -> list[int]:
        return self._first_step[1]

    @property
    def _blocks(self) -> Sequence[Block]:
        return self.estimate.timeline.blocks

    @cached_property
    def _order(self) -> list[int]:
        """Of a step of one micro-batch and one of two."""
        return without_second_micro_batch(self._first_step[0], self._blocks, steps=1)

    @cached_property
    def _parts(self) -> StepParts:
        """Of two steps of two micro-batches; up to the second of them, of the trial as well."""
        return find_parts(self._first_step[0], self._blocks)

    @cached_property
    def _second_step(self) -> int:
        """Where it begins in the trial's order."""
        return self._order.index(self._first_step[0][self._parts.second_step])

    @cached_property
    def _made_first(self) -> Sequence[int]:
        """Blocks that are made before the second step."""
        return [entry - 1 for entry in self._order[: self._second_step] if entry > 0]

    def _bytes_before(self, position: int) -> int:
        return simulate(self._order[:position], self._first_sizes).allocated_at_end
