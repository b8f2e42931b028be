"""Peak memory of a traced step on one card, at any number of samples.

Covers what the allocator makes of the timeline, with cuBLAS's workspaces in it, what cuDNN takes on top, and what the
peak is made of. Does not cover what a process takes outside the allocator (``gpu_table``). Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from autobatch.prediction.allocator.simulation import AllocatorPeak, Thresholds, find_thresholds, simulate
from autobatch.prediction.timeline import Replay, Timeline

__all__ = ["COPIES", "Estimate", "Share"]

COPIES = 2.4
"""How often the largest convolution's input and output are held beside the tensors (``workspaces``). Fitted to
published peaks of half of 130 timm models on a 40 GB card and scored on the other half (``make accuracy``): the median
error went from 3.2 % to 1.7 %, and what was under-estimated at a margin of 10 % from 8.8 % to 4.1 % of the cells."""

_HANDLES = 2
"""cuBLAS keeps a workspace a handle, and a handle a thread: the caller's, and autograd's for the backward pass."""


@dataclass(frozen=True)
class Share:
    """Bytes alive at the peak, by what they are for.

    Attributes:
        by_kind: By kind of block, the largest first.
        by_module: By qualified name of the module that made them or owns them, the largest first.
    """

    by_kind: tuple[tuple[str, int], ...]
    by_module: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Estimate:
    """One timeline on cards with one size of cuBLAS workspace; what was asked once is remembered.

    Attributes:
        timeline: What the step allocates and frees.
        workspace_bytes: Of one cuBLAS handle.
        expandable_segments: Whether the allocator's option of that name is on.
    """

    timeline: Timeline
    workspace_bytes: int
    expandable_segments: bool = False
    _peaks: dict[int, AllocatorPeak] = field(default_factory=dict)

    def changed(self, **changes: Any) -> Estimate:
        """The same with other attributes; nothing that was asked of this one is remembered."""
        return replace(self, _peaks={}, **changes)

    def allocated(self, n: int) -> int:
        """Most bytes in tensors and workspaces at once with ``n`` samples in a micro-batch."""
        return self._measure(n, "allocated")

    def reserved(self, n: int) -> int:
        """Most bytes that the allocator takes from the driver, if it never has to give any back."""
        return self._measure(n, "reserved") + self.convolution_bytes(n)

    def convolution_bytes(self, n: int) -> int:
        """What cuDNN takes for the convolution that needs most."""
        replay = self.timeline.at(n)
        copied = (size for size, block in zip(replay.sizes, replay.blocks, strict=True) if block.kind == "workspace")
        return round(COPIES * max(copied, default=0))

    def thresholds(self, n: int) -> Thresholds:
        """How much memory ``n`` samples need to run undisturbed, to run at all, and at the very least."""
        order, sizes = self._with_workspaces(self.timeline.at(n))
        found = find_thresholds(order, sizes, expandable_segments=self.expandable_segments)
        more = self.convolution_bytes(n)
        return Thresholds(comfortable=found.comfortable + more, tight=found.tight + more, floor=found.floor + more)

    def share(self, n: int) -> Share:
        """What the peak in tensors is made of."""
        replay = self.timeline.at(n)
        order, sizes = self._with_workspaces(replay)
        position = self._simulate(replay).peak_position or 0
        alive: set[int] = set()
        for entry in order[: position + 1]:
            (alive.add if entry > 0 else alive.discard)(abs(entry) - 1)
        by_kind: Counter[str] = Counter()
        by_module: Counter[str] = Counter()
        for block in alive:
            if block < len(replay.blocks):
                by_kind[replay.blocks[block].kind] += sizes[block]
                by_module[replay.blocks[block].module] += sizes[block]
            else:
                by_kind["cuBLAS workspace"] += sizes[block]
        by_kind["cuDNN workspace"] = self.convolution_bytes(n)
        by_kind += Counter()  # drops what has none
        return Share(tuple(by_kind.most_common()), tuple(by_module.most_common()))

    def _measure(self, n: int, quantity: str) -> int:
        def read(replay: Replay) -> int:
            return int(getattr(self._simulate(replay), quantity))

        if self.timeline.interpolated:
            return self.timeline.measure(n, read)
        if n not in self._peaks:
            self._peaks[n] = self._simulate(self.timeline.at(n))
        return int(getattr(self._peaks[n], quantity))

    def _simulate(self, replay: Replay) -> AllocatorPeak:
        return simulate(*self._with_workspaces(replay), expandable_segments=self.expandable_segments)

    def _with_workspaces(self, replay: Replay) -> tuple[list[int], list[int]]:
        first = len(replay.sizes) + 1
        tensors = [
            0 if block.kind == "workspace" else size for size, block in zip(replay.sizes, replay.blocks, strict=True)
        ]
        return [*range(first, first + _HANDLES), *replay.order], [*tensors, *[self.workspace_bytes] * _HANDLES]
