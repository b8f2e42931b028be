"""Estimates the peak memory of a traced step on one card, at any number of samples, and what the peak is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, cast

from autobatch.prediction.allocator import MIB_UNITS, UNIT, AllocatorPeak, simulate
from autobatch.prediction.cards import Gpu
from autobatch.prediction.timeline import (
    Block,
    Timeline,
    TracedStep,
    find_parts,
    most_alive,
    without_second_micro_batch,
)
from autobatch.prediction.workspaces import HANDLE, Workspaces, find_kernel_blocks, unseen_handles

_TRACED_MICRO_BATCHES = 2
_NO_WORKSPACES = Workspaces("unknown", 0)
_ROUNDS = 4  # of questions to cuDNN: the second mostly repeats the first
_MOST_STEPS = 32  # most searches look at fewer sizes; each takes some 0.3 MB for a ResNet-50
_Known = dict[tuple[Any, ...], Any]  # results by their names and what they depend on


@dataclass(frozen=True)
class Estimate:
    """One timeline on cards of one kind; results are remembered.

    If the timeline is interpolated every quantity is: on the line through the two nearest traces.
    """

    timeline: Timeline
    workspace_bytes: int = 0  # of one cuBLAS handle
    expandable_segments: bool = False
    # Samples of an optimizer step; 0: two micro-batches a step. Every micro-batch leaves what it returns beside its
    # loss ("aux"), and a trace has two micro-batches. If one micro-batch is the whole target, there is no second.
    target: int = 0
    whole: TracedStep | None = None  # a step of ``WholeBatch`` at the target, which runs in one pass: another program
    resident_threads: int = 0  # threads that the card runs at once, which share a sum; 0: sums take no buffers
    workspaces: Workspaces = _NO_WORKSPACES  # of cuDNN on the card
    _own: _Known = field(default_factory=dict)
    # The same on some thirty cards: steps, bytes of tensors, and simulations if kernels take equal workspaces.
    _shared: _Known = field(default_factory=dict)

    def on_card(self, gpu: Gpu, workspaces: Workspaces | None = None) -> Estimate:
        """The same step on another card; by default cuDNN's workspaces are its answers, if it can be asked."""
        return replace(
            self,
            workspace_bytes=gpu.cublas_workspace_bytes,
            resident_threads=gpu.resident_threads,
            workspaces=workspaces or Workspaces.of_card(gpu.architecture, gpu.multiprocessors),
            _own={},
        )

    def settle(self, judge: Callable[[Estimate], Collection[int]]) -> Estimate:
        """Ask cuDNN about the sizes that ``judge`` returns, until the answers lead to no other sizes."""
        estimate = self
        for _ in range(_ROUNDS):
            sizes = judge(estimate)
            steps = estimate.timeline.traced or [estimate.step(n) for n in sizes]
            runs = {run for step in steps for run in step.convolutions.values()} if sizes else set()
            if estimate.workspaces.has_asked(runs):
                break
            answered = estimate.workspaces.ask(runs)
            estimate = replace(estimate, workspaces=answered, _own={})
        return estimate

    def changed(self, **changes: Any) -> Estimate:
        return replace(self, _own={}, _shared={}, **changes)

    def step(self, n: int) -> TracedStep:
        """The step at ``n`` samples, of one micro-batch if that is the whole target."""
        steps: dict[int, TracedStep] = self._shared.setdefault(("steps",), {})
        if n not in steps:
            if len(steps) >= _MOST_STEPS:
                steps.clear()
            step = self.whole if self._runs_whole(n) and self.whole else self.timeline.at(n)
            is_alone = 0 < self.target <= n and not self.timeline.interpolated
            if is_alone and not self.whole and (parts := find_parts(step.order, step.blocks)) is not None:
                order = tuple(without_second_micro_batch(step.order, step.blocks, parts))
                step = step.model_copy(update={"order": order})
            steps[n] = step
        return steps[n]

    def ends_in_loss(self, n: int) -> bool:
        """Return whether most memory is taken in the loss of a ``WholeBatch``, which no micro-batch size lowers."""
        step = self.step(n)
        order, _ = self.with_workspaces(step)
        reached = order[: (self._peak(step).peak_position or 0) + 1]
        made = next((entry for entry in reversed(reached) if 0 < entry <= len(step.blocks)), 0)
        return made > 0 and step.blocks[made - 1].phase == "loss"

    @property
    def largest_traced(self) -> int | None:
        """The largest traced size if interpolated, since memory may grow with the square beyond it; else ``None``."""
        return self.timeline.traced[-1].samples if self.timeline.interpolated else None

    def tensor_bytes(self, n: int) -> int:
        """Most bytes in tensors alone at once, unrounded, of two micro-batches."""
        return self._measure("tensors", n, TracedStep.peak, self._shared)

    def allocated(self, n: int) -> int:
        """Most bytes at once in tensors, buffers and workspaces, with ``n`` samples in a micro-batch."""
        return self._allocated_by_two(n) + self.aux_bytes(n)

    def reserved(self, n: int) -> int:
        """Most bytes that the allocator takes from the driver, if it never has to give any back."""
        held = self._measure("reserved", n, lambda step: self._peak(step).reserved)
        held = max(held, self._allocated_by_two(n))  # lines may cross beyond the last trace
        return held + self._untraced_bytes(n)

    def aux_bytes(self, n: int) -> int:
        return self._times_untraced("aux", n, lambda size: -(-size // UNIT) * UNIT)

    def fits_within(self, n: int, limit_bytes: int) -> bool:
        least = 0 if self.timeline.interpolated else self.tensor_bytes(n) + self._untraced_bytes(n)
        return least <= limit_bytes and self.reserved(n) <= limit_bytes  # the first needs no simulation

    def runs_within(self, n: int, limit_bytes: int) -> bool:
        """Whether ``n`` samples run in so much memory if the allocator gives unused memory back."""
        if self.fits_within(n, limit_bytes):
            return True
        capacity = limit_bytes - self._untraced_bytes(n)
        if self.timeline.interpolated or self._allocated_by_two(n) > capacity:
            return False
        return not self._simulate(self.step(n), capacity).out_of_memory

    def by_kind(self, n: int) -> tuple[Counter[str], int]:
        """Bytes at the peak by kind of block, and what the allocator holds beside them; they sum to ``reserved(n)``."""
        kinds = self._sum_alive(n, lambda block: block.kind)
        kinds[HANDLE] += unseen_handles(self.step(n)) * self.workspace_bytes
        kinds["cuDNN workspace"] += self._loose_bytes(n)
        kinds["aux"] += self.aux_bytes(n)
        kinds += Counter()  # drops kinds without bytes
        held = self.reserved(n) - kinds.total()
        kinds[kinds.most_common(1)[0][0]] += min(held, 0)  # lines may cross beyond the last trace
        return kinds, max(held, 0)

    def by_module(self, n: int) -> Counter[str]:
        return self._sum_alive(n, lambda block: block.module)

    def _runs_whole(self, n: int) -> bool:
        return self.whole is not None and 0 < self.target <= n

    def _allocated_by_two(self, n: int) -> int:
        return self._measure("allocated", n, lambda step: self._peak(step).allocated)

    def _untraced_bytes(self, n: int) -> int:
        return self._loose_bytes(n) + self._times_untraced("aux in segments", n, _round_in_segments)

    def _loose_bytes(self, n: int) -> int:
        # By the rule all workspaces have few sizes, so each reuses another's memory too well.
        if self.workspaces.version or not self.timeline.has_convolutions:
            return 0

        def measure(step: TracedStep) -> int:
            workspaces = (size for index, size in self._kernel_blocks(step) if index in step.convolutions)
            return max(workspaces, default=0) // 2

        return self._measure("loose", n, measure)

    def _times_untraced(self, name: str, n: int, round_up: Callable[[int], int]) -> int:
        if self.target <= _TRACED_MICRO_BATCHES * n:
            return 0

        def measure(step: TracedStep) -> int:
            blocks = zip(step.sizes, step.blocks, strict=True)
            returned = [round_up(size) if block.kind == "aux" else 0 for size, block in blocks]
            return most_alive(step.order, returned) // _TRACED_MICRO_BATCHES

        return (-(-self.target // n) - _TRACED_MICRO_BATCHES) * self._measure(name, n, measure, self._shared)

    def _sum_alive(self, n: int, key: Callable[[Block], str]) -> Counter[str]:
        if not self.timeline.interpolated or self._runs_whole(n):
            return +self._alive_in(self.step(n), key)
        sums = {step.samples: self._alive_in(step, key) for step in self.timeline.traced}

        def interpolate(name: str) -> int:
            return self.timeline.measure(n, lambda at: sums[at.samples][name])

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

    def _measure(self, name: str, n: int, quantity: Callable[[TracedStep], int], known: _Known | None = None) -> int:
        known = self._own if known is None else known
        if (name, n) not in known:
            is_exact = not self.timeline.interpolated or self._runs_whole(n)
            known[name, n] = quantity(self.step(n)) if is_exact else self.timeline.measure(n, quantity)
        return cast("int", known[name, n])

    def _peak(self, step: TracedStep) -> AllocatorPeak:
        # In the allocator's units: equal numbers of them make equal simulations.
        of_the_card = [-(-size // UNIT) for _, size in self._kernel_blocks(step)]
        key = ("peak", step.samples, self.workspace_bytes, *of_the_card)
        if key not in self._shared:
            self._shared[key] = self._simulate(step)
        return cast("AllocatorPeak", self._shared[key])

    def _simulate(self, step: TracedStep, capacity: int | None = None) -> AllocatorPeak:
        order, sizes = self.with_workspaces(step)
        streams = [*step.streams, *[0] * unseen_handles(step)] if step.streams else []
        expandable = self.expandable_segments
        return simulate(order, sizes, capacity=capacity, expandable_segments=expandable, streams=streams)

    def with_workspaces(self, step: TracedStep) -> tuple[list[int], list[int]]:
        """The step's order, and the bytes of its blocks and workspaces on this card."""
        sizes = step.tensor_sizes()
        for index, byte_count in self._kernel_blocks(step):
            sizes[index] = byte_count
        first, unseen = len(sizes) + 1, unseen_handles(step)
        return [*range(first, first + unseen), *step.order], [*sizes, *[self.workspace_bytes] * unseen]

    def _kernel_blocks(self, step: TracedStep) -> list[tuple[int, int]]:
        key = ("kernels", step.samples)
        if key not in self._own:
            self._own[key] = [*find_kernel_blocks(step, self.workspaces, self.workspace_bytes, self.resident_threads)]
        return cast("list[tuple[int, int]]", self._own[key])


def _round_in_segments(size: int) -> int:
    # From 10 MiB on a block has a segment alone; smaller ones share segments.
    unit = UNIT if size < 10 * MIB_UNITS * UNIT else 2 * MIB_UNITS * UNIT
    return -(-size // unit) * unit
