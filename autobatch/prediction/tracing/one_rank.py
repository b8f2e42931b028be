"""Defines what a rank does beside the micro-batches of a step; alone, it does nothing.

Covers the only rank of a process that trains by itself, from which the others derive (``replicated``, ``sharded``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autobatch.state.gradients import Float32Sums

__all__ = ["OneRank"]


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
