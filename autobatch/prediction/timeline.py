"""Describes what a training step allocates and frees, in order, at any number of samples.

Two traces whose sizes are affine in the samples make one ``Timeline`` (``align``). Otherwise the timeline holds the
traces (``combine``), and quantities lie on lines between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field

from autobatch.prediction.cudnn import Convolution
from autobatch.records import Record

Phase = Literal["before", "forward", "loss", "backward", "optimizer"]
"""``"loss"``: forward and backward of the loss of ``WholeBatch``."""
Stream = Literal["compute", "all-gather", "reduce-scatter"]
"""The CUDA stream that allocates a block: no other stream reuses its memory."""
_STREAMS: tuple[Stream, ...] = ("compute", "all-gather", "reduce-scatter")
Kind = Literal[
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "activation",
    "representation",  # of all samples of a ``WholeBatch``
    "temporary",
    "input",
    "aux",
    "bucket",  # DDP and the Runner sum gradients over ranks in buckets
    "gathered parameter",  # whole, from the shards of all ranks
    "unsharded gradient",  # of a gathered parameter, before the reduce-scatter
    "all-gather",  # its buffer
    "reduce-scatter",  # its input
    "cuDNN workspace",  # 0 bytes here: the card decides
    "addends",  # not bytes, but the numbers that each result of a sum adds up; "partial sums" is next
    "partial sums",  # bytes of a sum's results: its buffer follows from both (``workspaces``)
    "cuBLAS workspace",  # 0 bytes here: a thread takes its handle, and the card decides
]
_NO_TENSORS = frozenset({"cuDNN workspace", "addends", "partial sums", "cuBLAS workspace"})
_Growth = tuple[Convolution, tuple[int, ...]]
"""A convolution at 0 samples, and what each sample adds to the sizes of its input."""


class Block(Record):
    """The properties of one allocation besides its size."""

    phase: Phase  # that allocates it
    kind: Kind  # "aux": a step returns it beside its loss, and it lives until all micro-batches ran
    module: str = ""  # the submodule that made it or owns it; "" outside of all
    stream: Stream = "compute"


class TracedStep(Record):
    """A step at one number of samples."""

    samples: int  # in each micro-batch
    order: tuple[int, ...]  # k + 1 allocates block k, -(k + 1) frees it
    sizes: tuple[int, ...]  # bytes of each block, before any rounding
    blocks: tuple[Block, ...]
    convolutions: dict[int, Convolution] = Field(default_factory=dict)  # by the block that is its workspace

    def peak(self) -> int:
        return most_alive(self.order, self.tensor_sizes())

    @cached_property
    def kernel_blocks(self) -> list[int]:
        return [index for index, block in enumerate(self.blocks) if block.kind in _NO_TENSORS]

    @cached_property
    def streams(self) -> list[int]:
        """Number of each block's stream; empty if all blocks share one."""
        numbers = [_STREAMS.index(block.stream) for block in self.blocks]
        return numbers if any(numbers) else []

    def tensor_sizes(self) -> list[int]:
        sizes = [*self.sizes]
        for index in self.kernel_blocks:
            sizes[index] = 0
        return sizes


def most_alive(order: Sequence[int], sizes: Sequence[int]) -> int:
    live = most = 0
    for entry in order:
        live += sizes[entry - 1] if entry > 0 else -sizes[-entry - 1]
        most = max(most, live)
    return most


class Timeline(Record):
    """The allocations of a step at any number of samples, in order."""

    order: tuple[int, ...]  # as TracedStep.order; of the last trace if interpolated
    fixed: tuple[int, ...]  # bytes of each block at 0 samples
    per_sample: tuple[int, ...]  # bytes that each sample adds to each block
    blocks: tuple[Block, ...]
    convolutions: dict[int, _Growth] = Field(default_factory=dict)  # by block
    traced: tuple[TracedStep, ...] = ()  # traces that ran different operators, by samples

    @property
    def interpolated(self) -> bool:
        """Whether the traces ran different operators, so that other sizes are estimates."""
        return bool(self.traced)

    @property
    def has_convolutions(self) -> bool:
        """Whether any operator may take a workspace of cuDNN."""
        return bool(self.convolutions) or any(step.convolutions for step in self.traced)

    def begins_with(self, traced: TracedStep) -> bool:
        """Whether the step at these samples begins with this trace, byte for byte; kinds of blocks may differ."""
        own = self.at(traced.samples)
        events, count = len(traced.order), len(traced.sizes)
        if any(own.convolutions.get(block) != run for block, run in traced.convolutions.items()):
            return False
        return (own.order[:events], own.sizes[:count]) == (traced.order, traced.sizes)

    def at(self, n: int) -> TracedStep:
        """The step at ``n`` samples; if interpolated, the next larger trace, or the largest."""
        if self.traced:
            return next((step for step in self.traced if step.samples >= n), self.traced[-1])
        sizes = tuple(fixed + slope * n for fixed, slope in zip(self.fixed, self.per_sample, strict=True))
        kinds, kind_of = self._kinds_of_convolutions
        grown = [_grow(run, slopes, n) for run, slopes in kinds]
        convolutions = {block: grown[kind] for block, kind in kind_of.items()}
        # What was checked when this was made is not checked again: of a ResNet-50 that took as long as all the rest.
        return TracedStep.model_construct(
            samples=n, order=self.order, sizes=sizes, blocks=self.blocks, convolutions=convolutions
        )

    @cached_property
    def _kinds_of_convolutions(self) -> tuple[list[_Growth], dict[int, int]]:
        """The different convolutions, and the number of each block's: a ResNet-50 has 632 of 69 kinds."""
        number: dict[_Growth, int] = {}
        kind_of = {block: number.setdefault(growth, len(number)) for block, growth in self.convolutions.items()}
        return [*number], kind_of

    def measure(self, n: int, quantity: Callable[[TracedStep], int]) -> int:
        """A quantity of the step at ``n`` samples, such as its peak.

        If interpolated, it lies on the line through the two nearest traces: above a convex quantity between them, and
        below it beyond them. Beyond the largest trace the line never falls.
        """
        if len(self.traced) < 2:
            return quantity(self.at(n))
        index = next((i for i, step in enumerate(self.traced) if step.samples >= n), len(self.traced) - 1)
        low, high = self.traced[max(index, 1) - 1], self.traced[max(index, 1)]
        below, above = quantity(low), quantity(high)
        line = below - (below - above) * (n - low.samples) // (high.samples - low.samples)
        return max(line, above) if n > high.samples else max(line, 0)


def align(first: TracedStep, second: TracedStep) -> Timeline | None:
    """Make one timeline whose sizes are affine in the samples; ``None`` if the traces ran different operators."""
    distance = second.samples - first.samples
    if distance == 0 or first.order != second.order or first.blocks != second.blocks:
        return None
    growth = [after - before for before, after in zip(first.sizes, second.sizes, strict=True)]
    per_sample = tuple(bytes_more // distance for bytes_more in growth)
    fixed = tuple(size - slope * first.samples for size, slope in zip(first.sizes, per_sample, strict=True))
    at_one = [size + slope for size, slope in zip(fixed, per_sample, strict=True)]
    convolutions = _align_convolutions(first, second)
    if convolutions is None or any(more % distance for more in growth) or any(size < 0 for size in at_one):
        return None
    return Timeline(
        order=first.order, fixed=fixed, per_sample=per_sample, blocks=first.blocks, convolutions=convolutions
    )


def _align_convolutions(first: TracedStep, second: TracedStep) -> dict[int, _Growth] | None:
    """The convolutions by block; ``None`` if their sizes are not affine in the samples."""
    distance, aligned = second.samples - first.samples, {}
    if first.convolutions.keys() != second.convolutions.keys():
        return None
    for block, run in first.convolutions.items():
        growth = [after - before for before, after in zip(run.inputs, second.convolutions[block].inputs, strict=True)]
        slopes = tuple(more // distance for more in growth)
        at_zero = _grow(run, slopes, -first.samples)
        if (
            any(more % distance for more in growth)
            or _grow(at_zero, slopes, second.samples) != second.convolutions[block]
        ):
            return None
        aligned[block] = at_zero, slopes
    return aligned


def _grow(run: Convolution, slopes: Sequence[int], samples: int) -> Convolution:
    sizes = zip(run.inputs, slopes, strict=True)
    return run._replace(inputs=tuple(size + slope * samples for size, slope in sizes))


def combine(traced: Sequence[TracedStep]) -> Timeline:
    """Make an interpolated timeline from traces that do not align."""
    steps = tuple(sorted(traced, key=lambda step: step.samples))
    last = steps[-1]
    none = (0,) * len(last.sizes)
    return Timeline(order=last.order, fixed=last.sizes, per_sample=none, blocks=last.blocks, traced=steps)


class StepParts(NamedTuple):
    """The entries of the order at which the parts of two steps of two micro-batches begin."""

    forwards: tuple[int, int, int, int]  # two micro-batches in the first step, two in the second
    first_backward: int
    updates: tuple[int, int]  # of the optimizer


def find_parts(order: Sequence[int], blocks: Sequence[Block]) -> StepParts | None:
    """Find each part by its first allocation; ``None`` if a forward pass allocates nothing, and so is not seen.

    The order may have entries of further blocks, such as workspaces.
    """
    forwards: list[int] = []
    updates: dict[int, int] = {}  # by the number of forward passes before
    backward, phase = 0, "before"
    for position, entry in enumerate(order):
        if not 0 < entry <= len(blocks):
            continue
        now = blocks[entry - 1].phase
        if now == "forward" != phase:
            forwards.append(position)
        elif now == "backward":
            backward = backward or position
        elif now == "optimizer":
            updates.setdefault(len(forwards), position)
        phase = now
    if len(forwards) != 4:
        return None
    first, second, third, fourth = forwards
    ends = updates.get(2, third), updates.get(4, len(order))
    return StepParts((first, second, third, fourth), backward, ends)


def without_second_micro_batch(
    order: Sequence[int], blocks: Sequence[Block], parts: StepParts, steps: int = 2
) -> list[int]:
    """Leave out what the second micro-batch of the first ``steps`` steps makes and drops again.

    Gradients stay, and so do the float32 sums of gradients in less precision, which one micro-batch does not need.
    """
    freed, dropped = {-entry for entry in order if entry < 0}, set()
    for step in range(steps):
        made = freed.intersection(order[parts.forwards[2 * step + 1] : parts.updates[step]])
        dropped |= {entry for entry in made if entry > len(blocks) or blocks[entry - 1].kind != "gradient"}
    return [entry for entry in order if abs(entry) not in dropped]
