"""Describes what a training step allocates and frees, in order, at any number of samples.

Covers the record of one traced step, the alignment of two into sizes that are affine in the samples, and what is done
where they do not align. Does not cover tracing (``tracing.trace``) nor what an allocator makes of it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

from pydantic import Field

from autobatch.prediction.cudnn.convolution import Convolution
from autobatch.records import Record

__all__ = [
    "Block",
    "Kind",
    "Phase",
    "Stream",
    "Timeline",
    "TracedStep",
    "align",
    "combine",
    "continue_as",
    "most_alive",
]

Phase = Literal["before", "forward", "backward", "optimizer"]
Stream = Literal["compute", "all-gather", "reduce-scatter"]
"""On which stream of CUDA's a block is allocated: memory that is freed on one is not used again by another."""
_STREAMS: tuple[Stream, ...] = ("compute", "all-gather", "reduce-scatter")
Kind = Literal[
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "activation",
    "temporary",
    "input",
    "aux",
    "bucket",  # in which DDP or the Runner sums gradients over ranks
    "gathered parameter",  # a whole one, of shards of all ranks
    "unsharded gradient",  # of a whole one, before it is reduced
    "all-gather",  # its buffer
    "reduce-scatter",  # its input
    "cuDNN workspace",  # without bytes: what cuDNN takes for a convolution is the card's
    "addends",  # no bytes, but how many numbers each result of a sum adds up; "partial sums" is next
    "partial sums",  # bytes of a sum's results: the buffer that it takes follows from both (``kernel_blocks``)
    "cuBLAS workspace",  # without bytes: where a thread takes its handle, whose workspace is the card's
]
_NO_TENSORS = frozenset({"cuDNN workspace", "addends", "partial sums", "cuBLAS workspace"})
_MADE_ONCE = frozenset({"parameter", "buffer", "optimizer state", "bucket", "cuBLAS workspace"})
"""In the first optimizer step, for all that follow."""
_AROUND = frozenset({"before", "optimizer"})
_Growth = tuple[Convolution, tuple[int, ...]]
"""A convolution at 0 samples, and what a sample adds to the sizes of its input."""


class Block(Record):
    """What is known of one allocation besides its size."""

    phase: Phase  # in which it was made
    kind: Kind  # "aux" is what a step returns beside its loss, held until all its micro-batches ran
    module: str = ""  # the submodule that made it, or whose parameter it belongs to; "" outside of all
    stream: Stream = "compute"


class TracedStep(Record):
    """A step at one number of samples."""

    samples: int  # in each micro-batch
    order: tuple[int, ...]  # k + 1 where block k is allocated, -(k + 1) where it is freed
    sizes: tuple[int, ...]  # bytes of each block as they were asked for, before any rounding
    blocks: tuple[Block, ...]
    convolutions: dict[int, Convolution] = Field(default_factory=dict)  # by the block that is its workspace

    def peak(self) -> int:
        """The most bytes of tensors alive at once, unrounded."""
        return most_alive(self.order, self.tensor_sizes())

    @cached_property
    def kernel_blocks(self) -> list[int]:
        """Which blocks are no tensors, but stand for a kernel's own memory."""
        return [index for index, block in enumerate(self.blocks) if block.kind in _NO_TENSORS]

    @cached_property
    def streams(self) -> list[int]:
        """The number of the stream on which each block is allocated; empty where that is one for all."""
        numbers = [_STREAMS.index(block.stream) for block in self.blocks]
        return numbers if any(numbers) else []

    def tensor_sizes(self) -> list[int]:
        """Bytes of each block that is a tensor, 0 for those that stand for a kernel's own memory."""
        sizes = [*self.sizes]
        for index in self.kernel_blocks:
            sizes[index] = 0
        return sizes


def most_alive(order: Sequence[int], sizes: Sequence[int]) -> int:
    """The largest sum of the sizes of blocks that are allocated at once; ``order`` as in ``TracedStep``."""
    live = most = 0
    for entry in order:
        live += sizes[entry - 1] if entry > 0 else -sizes[-entry - 1]
        most = max(most, live)
    return most


class Timeline(Record):
    """What a step allocates and frees, at any number of samples."""

    order: tuple[int, ...]  # as TracedStep.order; of the last trace where interpolated
    fixed: tuple[int, ...]  # bytes of each block at 0 samples
    per_sample: tuple[int, ...]  # bytes that each sample adds to each block
    blocks: tuple[Block, ...]
    convolutions: dict[int, _Growth] = Field(default_factory=dict)  # by block
    traced: tuple[TracedStep, ...] = ()  # where the traces ran different operators, these, by their samples

    @property
    def interpolated(self) -> bool:
        """Whether the traces ran different operators, so that sizes in between are estimates."""
        return bool(self.traced)

    @property
    def has_convolutions(self) -> bool:
        """Whether any operator is a call of cuDNN that may take a workspace."""
        return bool(self.convolutions) or any(step.convolutions for step in self.traced)

    def begins_with(self, traced: TracedStep) -> bool:
        """Whether the step at that number of samples begins with this very trace, which may be of fewer steps.

        Byte for byte and in the same order; what blocks are for is often known only after a later step.
        """
        own = self.at(traced.samples)
        events, count = len(traced.order), len(traced.sizes)
        if any(own.convolutions.get(block) != run for block, run in traced.convolutions.items()):
            return False
        return (own.order[:events], own.sizes[:count]) == (traced.order, traced.sizes)

    def at(self, n: int) -> TracedStep:
        """The step at ``n`` samples: exact where the traces aligned, else the next larger one that was traced.

        Beyond the largest trace that one. ``measure`` interpolates between them.
        """
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
        """Each that is different once, and by block which of them it is: a ResNet-50 has 632, of 69 kinds."""
        number: dict[_Growth, int] = {}
        kind_of = {block: number.setdefault(growth, len(number)) for block, growth in self.convolutions.items()}
        return [*number], kind_of

    def measure(self, n: int, quantity: Callable[[TracedStep], int]) -> int:
        """A quantity of the step at ``n`` samples, such as its peak or what an allocator would reserve for it.

        Exact where the traces aligned. Else on the line through the nearest two traced sizes, which lies above a convex
        quantity between them, and below it beyond them. A line that falls is not followed beyond the largest size.
        """
        if len(self.traced) < 2:
            return quantity(self.at(n))
        index = next((i for i, step in enumerate(self.traced) if step.samples >= n), len(self.traced) - 1)
        low, high = self.traced[max(index, 1) - 1], self.traced[max(index, 1)]
        below, above = quantity(low), quantity(high)
        line = below - (below - above) * (n - low.samples) // (high.samples - low.samples)
        # More samples never need less than those that were traced, and none is less than nothing.
        return max(line, above) if n > high.samples else max(line, 0)


def align(first: TracedStep, second: TracedStep) -> Timeline | None:
    """Both traces as one timeline with sizes affine in the samples; ``None`` where they ran different operators.

    A block's bytes are affine in the samples where they are a product of dimensions, of which one is the samples'. One
    sample is another program, since views of size 1 skip copies, so it is never traced.
    """
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


def continue_as(whole: TracedStep, beginning: TracedStep) -> TracedStep | None:
    """The trace of a first optimizer step, at other samples than ``whole``, continued as ``whole`` goes on.

    The micro-batches of the second step make the blocks that those of the first made, so their sizes are known for the
    other samples too. What is made around micro-batches is the same at both where nothing else outlives the first step
    than what does not depend on the samples.

    Returns:
        ``None`` where the traces begin differently, or where the second step is not such a repetition.
    """
    if not _begins_alike(whole, beginning) or _outlives(whole, beginning):
        return None
    count = len(beginning.sizes)
    earlier, later = _repeated_blocks(whole, 0, count), _repeated_blocks(whole, count, len(whole.sizes))
    if (
        any(block.kind in _MADE_ONCE for block in whole.blocks[count:])
        or [whole.sizes[index] for index in earlier] != [whole.sizes[index] for index in later]
        or [whole.blocks[index] for index in earlier] != [whole.blocks[index] for index in later]
    ):
        return None
    source = dict(zip(later, earlier, strict=True))
    if any(run != whole.convolutions.get(source.get(block, block)) for block, run in whole.convolutions.items()):
        return None
    rest = range(count, len(whole.sizes))
    more = [beginning.sizes[source[index]] if index in source else whole.sizes[index] for index in rest]
    return TracedStep.model_construct(  # all of it comes from checked traces
        samples=beginning.samples,
        order=whole.order,
        sizes=(*beginning.sizes, *more),
        blocks=whole.blocks,
        convolutions={block: beginning.convolutions[source.get(block, block)] for block in whole.convolutions},
    )


def _begins_alike(whole: TracedStep, beginning: TracedStep) -> bool:
    """Whether one runs the operators with which the other begins; what blocks are for is often known only later."""
    count = len(beginning.sizes)
    pairs = zip(whole.blocks, beginning.blocks, strict=False)
    return (
        whole.order[: len(beginning.order)] == beginning.order
        and all((one.phase, one.stream) == (other.phase, other.stream) for one, other in pairs)
        and {block for block in whole.convolutions if block < count} == beginning.convolutions.keys()
    )


def _outlives(whole: TracedStep, beginning: TracedStep) -> bool:
    """Whether anything outlives the first step, beside what it returns, that depends on the samples."""
    freed = {-entry - 1 for entry in beginning.order if entry < 0}
    alive = (index for index in range(len(beginning.sizes)) if index not in freed)
    return any(whole.sizes[index] != beginning.sizes[index] and whole.blocks[index].kind != "aux" for index in alive)


def _repeated_blocks(step: TracedStep, start: int, stop: int) -> list[int]:
    """Those among blocks ``start`` to ``stop`` (exclusive) that each optimizer step makes in its micro-batches."""
    blocks = enumerate(step.blocks[start:stop], start)
    return [index for index, block in blocks if block.phase not in _AROUND and block.kind not in _MADE_ONCE]


def _align_convolutions(first: TracedStep, second: TracedStep) -> dict[int, _Growth] | None:
    """Of each block; ``None`` where they are not affine."""
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
    """A timeline from traces that do not align, of at least one size; it is ``interpolated``."""
    steps = tuple(sorted(traced, key=lambda step: step.samples))
    last = steps[-1]
    none = (0,) * len(last.sizes)
    return Timeline(order=last.order, fixed=last.sizes, per_sample=none, blocks=last.blocks, traced=steps)
