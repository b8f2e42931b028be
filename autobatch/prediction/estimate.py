"""Peak memory of a traced step on one card, at any number of samples.

Covers what the allocator makes of the timeline, with cuBLAS's workspaces in it, what cuDNN takes on top, and what the
peak is made of. Does not cover what a process takes outside the allocator (``gpu_table``). Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autobatch.prediction.allocator.simulation import AllocatorPeak, Thresholds, find_thresholds, simulate
from autobatch.prediction.timeline import Block, Replay, Timeline

__all__ = ["COPIES", "Estimate", "Share"]

COPIES = 2.4
"""How often the largest convolution's input and output are held beside the tensors (``workspaces``). A fit to published
peaks of half of 130 timm models on a 40 GB card gives 2.25 (``make accuracy``); 2.4 was chosen above it, so that fewer
predictions are too low. On the other half the median error went from 3.2 % without it to 1.5 %, and what was
under-estimated at a margin of 10 % from 7.2 % to 2.5 % of the cells."""

_HANDLES = 2
"""cuBLAS keeps a workspace a handle, and a handle a thread: the caller's, and autograd's for the backward pass."""

_HELD_BY_A_TRACE = 2
"""Micro-batches of a traced step, of which each leaves something beside its loss."""
_SEGMENT, _LARGEST_SHARED = 2 * 2**20, 10 * 2**20
"""From 10 MiB on a request gets a segment of its own, in multiples of 2 MiB; below, 512 bytes of one with others."""
_UNIT = 512

_Identity = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """What a peak is made of, in bytes.

    Attributes:
        by_kind: Tensors by kind of block, and the workspaces, the largest first.
        by_module: Tensors by qualified name of the module that made them or owns them, the largest first.
        held_bytes: What the allocator holds beside all kinds: sizes rounded up, and what other moments need.
    """

    by_kind: tuple[tuple[str, int], ...]
    by_module: tuple[tuple[str, int], ...]
    held_bytes: int


@dataclass(frozen=True)
class Estimate:
    """One timeline on cards with one size of cuBLAS workspace; what was asked once is remembered.

    Where the timeline is interpolated every quantity is: on the line through what the nearest two traced sizes need.

    Attributes:
        timeline: What the step allocates and frees.
        workspace_bytes: Of one cuBLAS handle.
        expandable_segments: Whether the allocator's option of that name is on.
        target: Samples of an optimizer step. Each of its micro-batches leaves what stands beside its loss, ``aux``, and
            a trace holds that of two; 0: no step has more than two.
    """

    timeline: Timeline
    workspace_bytes: int
    expandable_segments: bool = False
    target: int = 0
    _seen: dict[tuple[str, int], int] = field(default_factory=dict)
    _peaks: dict[_Identity, AllocatorPeak] = field(default_factory=dict)

    def changed(self, **changes: Any) -> Estimate:
        """The same with other attributes; nothing that was asked of this one is remembered."""
        return replace(self, _seen={}, _peaks={}, **changes)

    @property
    def largest_traced(self) -> int | None:
        """The most samples of which anything is known; ``None`` where that is any number.

        Where the timeline is interpolated, a line beyond its largest trace says nothing: a step that compares all
        samples with all grows with the square.
        """
        return self.timeline.traced[-1].samples if self.timeline.interpolated else None

    def tensor_bytes(self, n: int) -> int:
        """Most bytes in tensors alone at once, as they were asked for: blocks may be larger by up to 1 MiB each.

        Of two micro-batches: without what further ones leave beside their losses.
        """
        return self._measure("tensors", n, _peak_of_tensors)

    def allocated(self, n: int) -> int:
        """Most bytes in tensors and cuBLAS's workspaces at once with ``n`` samples in a micro-batch."""
        return self._allocated_by_two(n) + self.kept_bytes(n)

    def reserved(self, n: int) -> int:
        """Most bytes that the allocator takes from the driver, if it never has to give any back."""
        held = self._measure("reserved", n, lambda replay: self._peak(replay).reserved)
        held = max(held, self._allocated_by_two(n))  # lines may cross beyond the last trace
        return held + self._beside(n)

    def convolution_bytes(self, n: int) -> int:
        """What cuDNN takes for the convolution that needs most."""
        return round(COPIES * self._measure("copied", n, _most_copied))

    def kept_bytes(self, n: int) -> int:
        """What stands beside the losses of all micro-batches of a step but two, in tensors."""
        return self._times_untraced("kept", n, lambda size: -(-size // _UNIT) * _UNIT)

    def _times_untraced(self, name: str, n: int, round_up: Callable[[int], int]) -> int:
        if self.target <= _HELD_BY_A_TRACE * n:
            return 0
        each = self._measure(name, n, lambda replay: _kept_by_each(replay, round_up))
        return (-(-self.target // n) - _HELD_BY_A_TRACE) * each

    def thresholds(self, n: int) -> Thresholds:
        """How much memory ``n`` samples need to run undisturbed, to run at all, and at the very least."""
        more = self._beside(n)

        def need(quantity: str) -> int:
            return more + self._measure(quantity, n, lambda replay: int(getattr(self._threshold(replay), quantity)))

        return Thresholds(comfortable=need("comfortable"), tight=need("tight"), floor=need("floor"))

    def fits_within(self, n: int, limit_bytes: int) -> bool:
        """Whether ``n`` samples reserve no more than that; where tensors alone exceed it, nothing is simulated."""
        if not self.timeline.interpolated:
            least = self.tensor_bytes(n) + _HANDLES * self.workspace_bytes + self._beside(n)
            if least > limit_bytes:
                return False
        return self.reserved(n) <= limit_bytes

    def runs_within(self, n: int, limit_bytes: int) -> bool:
        """Whether ``n`` samples run in so much memory, the allocator giving back what is cached where it must."""
        if self.fits_within(n, limit_bytes):
            return True
        if self.timeline.interpolated:
            return self.thresholds(n).tight <= limit_bytes
        capacity = limit_bytes - self._beside(n)
        if self._allocated_by_two(n) > capacity:
            return False
        order, sizes = self._with_workspaces(self.timeline.at(n))
        expandable = self.expandable_segments
        return not simulate(order, sizes, capacity=capacity, expandable_segments=expandable).out_of_memory

    def share(self, n: int) -> Share:
        """What the peak is made of, to the byte: kinds and ``held_bytes`` sum to ``reserved(n)``."""
        by_kind = self._sum_alive(n, lambda block: block.kind)
        by_kind["cuBLAS workspace"] = _HANDLES * self.workspace_bytes
        by_kind["cuDNN workspace"] = self.convolution_bytes(n)
        by_kind["aux"] += self.kept_bytes(n)
        by_kind += Counter()  # drops what has none
        held = self.reserved(n) - by_kind.total()
        by_kind[by_kind.most_common(1)[0][0]] += min(held, 0)  # lines may cross beyond the last trace
        by_module = self._sum_alive(n, lambda block: block.module)
        return Share(tuple(by_kind.most_common()), tuple(by_module.most_common()), max(held, 0))

    def _allocated_by_two(self, n: int) -> int:
        return self._measure("allocated", n, lambda replay: self._peak(replay).allocated)

    def _beside(self, n: int) -> int:
        """What the allocator holds beside what was traced."""
        return self.convolution_bytes(n) + self._times_untraced("kept in segments", n, _round)

    def _sum_alive(self, n: int, key: Callable[[Block], str]) -> Counter[str]:
        """Bytes of the tensors that are alive at the peak, by a key of their blocks."""
        if not self.timeline.interpolated:
            return self._alive_in(self.timeline.at(n), key)
        replays = [self.timeline.at(step.samples) for step in self.timeline.traced]
        sums = {_identify(replay): self._alive_in(replay, key) for replay in replays}
        names = dict.fromkeys(name for counted in sums.values() for name in counted)

        def interpolate(name: str) -> int:
            return self.timeline.measure(n, lambda replay: sums[_identify(replay)][name])

        return +Counter({name: interpolate(name) for name in names})

    def _alive_in(self, replay: Replay, key: Callable[[Block], str]) -> Counter[str]:
        order, sizes = self._with_workspaces(replay)
        position = self._peak(replay).peak_position or 0
        alive: set[int] = set()
        for entry in order[: position + 1]:
            (alive.add if entry > 0 else alive.discard)(abs(entry) - 1)
        sums: Counter[str] = Counter()
        for block in sorted(alive):
            if block < len(replay.blocks):
                sums[key(replay.blocks[block])] += sizes[block]
        return +sums

    def _measure(self, name: str, n: int, quantity: Callable[[Replay], int]) -> int:
        if (name, n) not in self._seen:
            self._seen[name, n] = self.timeline.measure(n, quantity)
        return self._seen[name, n]

    def _peak(self, replay: Replay) -> AllocatorPeak:
        known = _identify(replay)
        if known not in self._peaks:
            order, sizes = self._with_workspaces(replay)
            self._peaks[known] = simulate(order, sizes, expandable_segments=self.expandable_segments)
        return self._peaks[known]

    def _threshold(self, replay: Replay) -> Thresholds:
        return find_thresholds(*self._with_workspaces(replay), expandable_segments=self.expandable_segments)

    def _with_workspaces(self, replay: Replay) -> tuple[list[int], list[int]]:
        first = len(replay.sizes) + 1
        sizes = [*_of_tensors(replay), *[self.workspace_bytes] * _HANDLES]
        return [*range(first, first + _HANDLES), *replay.order], sizes


def _identify(replay: Replay) -> _Identity:
    return replay.order, replay.sizes  # without the blocks, of which records the hash would take long


def _of_tensors(replay: Replay) -> list[int]:
    """Bytes of each block, none where it stands for cuDNN's workspaces."""
    blocks = zip(replay.sizes, replay.blocks, strict=True)
    return [0 if block.kind == "workspace" else size for size, block in blocks]


def _peak_of_tensors(replay: Replay) -> int:
    return replay.model_copy(update={"sizes": tuple(_of_tensors(replay))}).peak()


def _most_copied(replay: Replay) -> int:
    blocks = zip(replay.sizes, replay.blocks, strict=True)
    return max((size for size, block in blocks if block.kind == "workspace"), default=0)


def _kept_by_each(replay: Replay, round_up: Callable[[int], int]) -> int:
    blocks = zip(replay.sizes, replay.blocks, strict=True)
    sizes = tuple(round_up(size) if block.kind == "aux" else 0 for size, block in blocks)
    return replay.model_copy(update={"sizes": sizes}).peak() // _HELD_BY_A_TRACE


def _round(size: int) -> int:
    unit = _UNIT if size < _LARGEST_SHARED else _SEGMENT
    return -(-size // unit) * unit
