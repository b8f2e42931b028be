"""Estimates the peak memory of a traced step on one card, at any number of samples.

Covers what the allocator makes of the timeline, with the workspaces of cuBLAS and cuDNN in it, and what the peak is
made of. Does not cover what a process takes outside the allocator (``cards``). Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from autobatch.prediction.allocator import AllocatorPeak, find_least_capacity, simulate
from autobatch.prediction.block_pool import MIB_UNITS, UNIT
from autobatch.prediction.cards import Gpu
from autobatch.prediction.cudnn.convolution import Convolution
from autobatch.prediction.cudnn.workspaces import Workspaces
from autobatch.prediction.estimate_cache import CardCache, Measured, SharedCache
from autobatch.prediction.kernel_blocks import HANDLE, find_kernel_blocks, unseen_handles
from autobatch.prediction.step_parts import has_parts, without_second_micro_batch
from autobatch.prediction.timeline import Block, Timeline, TracedStep, most_alive

__all__ = ["Estimate"]

_TRACED_MICRO_BATCHES = 2

_NO_WORKSPACES = Workspaces("unknown", 0)
_ROUNDS = 4
"""Of questions to cuDNN: the second mostly says what the first did."""


@dataclass(frozen=True)
class Estimate:
    """One timeline on cards of one kind; what was asked once is remembered.

    Where the timeline is interpolated every quantity is: on the line through what the nearest two traced sizes need.
    """

    timeline: Timeline
    workspace_bytes: int = 0  # of one cuBLAS handle
    expandable_segments: bool = False
    # Samples of an optimizer step. Each of its micro-batches leaves what it returns beside its loss ("aux"), of which a
    # trace holds that of two; and where all samples are in one micro-batch, there is no second. 0: each step has two.
    target: int = 0
    resident_threads: int = 0  # that the card runs at once: how many share a sum; 0: sums take no buffers
    workspaces: Workspaces = _NO_WORKSPACES  # of cuDNN on the card
    _own: CardCache = field(default_factory=CardCache)
    _shared: SharedCache = field(default_factory=SharedCache)

    def on_card(self, gpu: Gpu, workspaces: Workspaces | None = None) -> Estimate:
        """The same on another card. Many take as much as others do, so what was simulated for one serves them.

        Args:
            gpu: The card.
            workspaces: What cuDNN takes there; default: by its answers, where it can be asked.
        """
        return replace(
            self,
            workspace_bytes=gpu.cublas_workspace_bytes,
            resident_threads=gpu.resident_threads,
            workspaces=workspaces or Workspaces.of_card(gpu.architecture, gpu.multiprocessors),
            _own=CardCache(),
        )

    def settle(self, judge: Callable[[Estimate], Iterable[int]]) -> Estimate:
        """Ask cuDNN about the sizes that are judged, until the answers lead to no other sizes.

        Workspaces are not affine in the samples, and too many to ask about all: 13 ms each.

        Args:
            judge: The sizes that an estimate leads to.
        """
        estimate = self
        for _ in range(_ROUNDS):
            runs = {run for n in judge(estimate) for run in estimate._convolutions_at(n)}
            if estimate.workspaces.has_asked(runs):
                break
            answered = estimate.workspaces.ask(runs)
            estimate = replace(estimate, workspaces=answered, _own=CardCache())
        return estimate

    def _convolutions_at(self, n: int) -> set[Convolution]:
        steps = self.timeline.traced or (self.step(n),)
        return {run for step in steps for run in step.convolutions.values()}

    def changed(self, **changes: Any) -> Estimate:
        """The same with other attributes; nothing that was asked of this one is remembered."""
        return replace(self, _own=CardCache(), _shared=SharedCache(), **changes)

    def step(self, n: int) -> TracedStep:
        """The step at ``n`` samples, of one micro-batch where that is the whole target; the latest are remembered."""
        return self._shared.step(n, self._make_step)

    def _make_step(self, n: int) -> TracedStep:
        step = self.timeline.at(n)
        if self.timeline.interpolated or not 0 < self.target <= n or not has_parts(self.timeline):
            return step
        return step.model_copy(update={"order": tuple(without_second_micro_batch(step.order, step.blocks))})

    @property
    def largest_traced(self) -> int | None:
        """The most samples of which anything is known; ``None`` where that is any number.

        Where the timeline is interpolated, a line beyond its largest trace says nothing: a step that compares all
        samples with all grows with the square.
        """
        return self.timeline.traced[-1].samples if self.timeline.interpolated else None

    def tensor_bytes(self, n: int) -> int:
        """Most bytes in tensors alone at once, as they were asked for: blocks may be larger by up to 1 MiB each.

        Of two micro-batches: without what further ones return beside their losses.
        """
        return self._count("tensors", n, TracedStep.peak)

    def allocated(self, n: int) -> int:
        """Most bytes at once in tensors, sums' buffers and cuBLAS's workspaces, with ``n`` samples in a micro-batch."""
        return self._allocated_by_two(n) + self.aux_bytes(n)

    def reserved(self, n: int) -> int:
        """Most bytes that the allocator takes from the driver, if it never has to give any back."""
        held = self._measure("reserved", n, lambda step: self._peak(step).reserved)
        held = max(held, self._allocated_by_two(n))  # lines may cross beyond the last trace
        return held + self._untraced_bytes(n)

    def aux_bytes(self, n: int) -> int:
        """Tensors that micro-batches return beside their losses, of all but the two that are traced."""
        return self._times_untraced("aux", n, lambda size: -(-size // UNIT) * UNIT)

    def least_capacity(self, n: int) -> int:
        """In how many bytes ``n`` samples run, the caches going back to the driver where they must."""

        def measure(step: TracedStep) -> int:
            expandable, streams = self.expandable_segments, _streams_of(step)
            return find_least_capacity(*self.with_workspaces(step), expandable_segments=expandable, streams=streams)

        return self._measure("least capacity", n, measure) + self._untraced_bytes(n)

    def fits_within(self, n: int, limit_bytes: int) -> bool:
        """Whether ``n`` samples reserve no more than that; where tensors alone exceed it, nothing is simulated."""
        least = 0 if self.timeline.interpolated else self.tensor_bytes(n) + self._untraced_bytes(n)
        if least > limit_bytes:
            return False
        return self.reserved(n) <= limit_bytes

    def runs_within(self, n: int, limit_bytes: int) -> bool:
        """Whether ``n`` samples run in so much memory, the caches going back to the driver where they must."""
        if self.fits_within(n, limit_bytes):
            return True
        if self.timeline.interpolated:
            return self.least_capacity(n) <= limit_bytes
        capacity = limit_bytes - self._untraced_bytes(n)
        if self._allocated_by_two(n) > capacity:
            return False
        return not self._simulate(self.step(n), capacity).out_of_memory

    def by_kind(self, n: int) -> tuple[Counter[str], int]:
        """What the peak is made of, to the byte: both together sum to ``reserved(n)``.

        Returns:
            Bytes of tensors by kind of block, and of buffers and workspaces at that moment; and what the allocator
            holds beside all kinds: sizes rounded up, and what other moments of the step need.
        """
        kinds = self._sum_alive(n, lambda block: block.kind)
        kinds[HANDLE] += unseen_handles(self.step(n)) * self.workspace_bytes
        kinds["cuDNN workspace"] += self._loose_bytes(n)
        kinds["aux"] += self.aux_bytes(n)
        kinds += Counter()  # drops what has none
        held = self.reserved(n) - kinds.total()
        kinds[kinds.most_common(1)[0][0]] += min(held, 0)  # lines may cross beyond the last trace
        return kinds, max(held, 0)

    def by_module(self, n: int) -> Counter[str]:
        """Bytes of tensors at the peak by qualified name of the module that made them or owns them."""
        return self._sum_alive(n, lambda block: block.module)

    def _allocated_by_two(self, n: int) -> int:
        return self._measure("allocated", n, lambda step: self._peak(step).allocated)

    def _untraced_bytes(self, n: int) -> int:
        """What the allocator holds beside what was traced."""
        return self._loose_bytes(n) + self._times_untraced("aux in segments", n, _round_in_segments)

    def _loose_bytes(self, n: int) -> int:
        """Half of the largest workspace where a rule says them: of one size each they fit each other too well."""
        if self.workspaces.version or not self.timeline.has_convolutions:
            return 0

        def measure(step: TracedStep) -> int:
            workspaces = (size for index, size in self._kernel_blocks(step) if index in step.convolutions)
            return max(workspaces, default=0) // 2

        return self._measure("loose", n, measure)

    def _times_untraced(self, name: str, n: int, round_up: Callable[[int], int]) -> int:
        """Bytes of what micro-batches return beside their losses, in all but those that were traced."""
        if self.target <= _TRACED_MICRO_BATCHES * n:
            return 0

        def measure(step: TracedStep) -> int:
            return most_alive(step.order, [*map(round_up, _sizes_of("aux", step))]) // _TRACED_MICRO_BATCHES

        return (-(-self.target // n) - _TRACED_MICRO_BATCHES) * self._count(name, n, measure)

    def _sum_alive(self, n: int, key: Callable[[Block], str]) -> Counter[str]:
        """Bytes of the tensors that are alive at the peak, by a key of their blocks."""
        if not self.timeline.interpolated:
            return +self._alive_in(self.step(n), key)
        sums = {step.samples: self._alive_in(step, key) for step in self.timeline.traced}

        def interpolate(name: str) -> int:
            return self.timeline.measure(n, lambda step: sums[step.samples][name])

        return +Counter({name: interpolate(name) for counted in sums.values() for name in counted})

    def _alive_in(self, step: TracedStep, key: Callable[[Block], str]) -> Counter[str]:
        order, sizes = self.with_workspaces(step)
        alive: set[int] = set()
        for entry in order[: (self._peak(step).peak_position or 0) + 1]:
            (alive.add if entry > 0 else alive.discard)(abs(entry) - 1)
        sums: Counter[str] = Counter()
        for block in sorted(alive):
            if block < len(step.blocks):
                sums[key(step.blocks[block])] += sizes[block]
        return sums

    def _measure(self, name: str, n: int, quantity: Callable[[TracedStep], int]) -> int:
        """A quantity that is of this card."""
        return self._remember(self._own.measured, name, n, quantity)

    def _count(self, name: str, n: int, quantity: Callable[[TracedStep], int]) -> int:
        """A quantity that is the same on every card."""
        return self._remember(self._shared.measured, name, n, quantity)

    def _remember(self, known: Measured, name: str, n: int, quantity: Callable[[TracedStep], int]) -> int:
        if (name, n) not in known:
            is_exact = not self.timeline.interpolated
            known[name, n] = quantity(self.step(n)) if is_exact else self.timeline.measure(n, quantity)
        return known[name, n]

    def _peak(self, step: TracedStep) -> AllocatorPeak:
        peaks = self._own.peaks
        if step.samples not in peaks:
            peaks[step.samples] = self._simulate_once(step)
        return peaks[step.samples]

    def _simulate_once(self, step: TracedStep) -> AllocatorPeak:
        # In the allocator's units: what is the same in them is the same to it.
        of_the_card = [-(-size // UNIT) for _, size in self._kernel_blocks(step)]
        key = (step.samples, self.workspace_bytes, *of_the_card)
        simulated = self._shared.simulated
        if key not in simulated:
            simulated[key] = self._simulate(step)
        return simulated[key]

    def _simulate(self, step: TracedStep, capacity: int | None = None) -> AllocatorPeak:
        order, sizes = self.with_workspaces(step)
        expandable, streams = self.expandable_segments, _streams_of(step)
        return simulate(order, sizes, capacity=capacity, expandable_segments=expandable, streams=streams)

    def with_workspaces(self, step: TracedStep) -> tuple[list[int], list[int]]:
        """The step's order and its blocks' bytes on this card, workspaces among them."""
        sizes = step.tensor_sizes()
        for index, byte_count in self._kernel_blocks(step):
            sizes[index] = byte_count
        first, unseen = len(sizes) + 1, unseen_handles(step)
        return [*range(first, first + unseen), *step.order], [*sizes, *[self.workspace_bytes] * unseen]

    def _kernel_blocks(self, step: TracedStep) -> list[tuple[int, int]]:
        """Which blocks are a kernel's own memory, and bytes of each on this card."""
        known = self._own.kernels
        if step.samples not in known:
            known[step.samples] = [
                *find_kernel_blocks(step, self.workspaces, self.workspace_bytes, self.resident_threads)
            ]
        return known[step.samples]


def _streams_of(step: TracedStep) -> list[int]:
    """Of each block of ``Estimate.with_workspaces``."""
    return [*step.streams, *[0] * unseen_handles(step)] if step.streams else []


def _sizes_of(kind: str, step: TracedStep) -> list[int]:
    """Bytes of each block of that kind, none of the others."""
    return [size if block.kind == kind else 0 for size, block in zip(step.sizes, step.blocks, strict=True)]


def _round_in_segments(size: int) -> int:
    """As the allocator asks the driver for it: from 10 MiB on a segment of its own, below a part of one with others."""
    unit = UNIT if size < 10 * MIB_UNITS * UNIT else 2 * MIB_UNITS * UNIT
    return -(-size // unit) * unit
