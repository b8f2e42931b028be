"""Decides which blocks to recompute, without torch.

1. A measurement has the runs of all blocks in order (``BlockRun``), and what the rest of the step holds at most.
2. ``predict_peak`` says what a choice of blocks would hold at once. It is the largest of the moments at which memory
   may peak: the backward pass of each block, and that of the part after the last one.
3. ``choices`` yields all choices, those with the least recomputation first. Blocks that are alike count as one kind.
   The earliest of a kind are recomputed, since the last block's recomputation falls on the peak itself.

A prediction is only a filter: the first choice whose trial fits is taken.

Invariants, asserted by the tests:

- Among choices that fit, the one with the least recomputation is taken, unless there are too many kinds of blocks.
- Nothing is predicted to fit that a trial has not run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from statistics import median

from autobatch._bounds import Bytes, Count, Seconds, Text
from autobatch.records import Record

TOO_LOW = 1.035
"""How much a measured peak may be below its prediction: up to 3.3 % in all 256 choices of 8 blocks of four widths."""

_MOST_CHOICES = 20_000
"""Most choices that are compared, each by its prediction; 7 kinds of 3 blocks have fewer."""

_WIDER = 1.3
"""Blocks whose costs and bytes differ by up to this factor, or a power of it, count as one kind if there are more."""


class BlockRun(Record):
    """One call of a block in the forward pass of a step.

    Attributes:
        block: Name of the block.
        kind: Class of the block.
        saved_bytes: Bytes that its backward pass needs, beside its inputs and the parameters.
        input_bytes: Bytes of inputs that no earlier block had.
        keeps_input: Whether its backward pass needs them.
        fed_by: Block whose saved bytes include these inputs; empty if none does.
        again_bytes: Most bytes at once while it is recomputed and runs backward.
        flops: Operations of its forward pass.
        seconds: Time that its recomputation takes.
    """

    block: Text
    kind: Text
    saved_bytes: Bytes
    input_bytes: Bytes
    keeps_input: bool
    fed_by: Text = ""
    again_bytes: Bytes
    flops: Count
    seconds: Seconds

    @property
    def cost(self) -> float:
        """Cost of one more forward pass; bytes decide between blocks without a matrix product."""
        return self.flops + 1e-6 * self.saved_bytes


def predict_peak(runs: Sequence[BlockRun], chosen: Collection[str], head_bytes: int) -> int:
    """Return the most bytes at once if the chosen blocks are recomputed.

    ``head_bytes`` is the most that runs after the last block. The bytes of everything else are left out.
    """
    held = peak = 0
    for run in runs:
        is_chosen = run.block in chosen
        if (is_chosen or run.keeps_input) and (not run.fed_by or run.fed_by in chosen):
            held += run.input_bytes
        if not is_chosen:
            held += run.saved_bytes
        peak = max(peak, held + run.again_bytes - (0 if is_chosen else run.saved_bytes))
    return max(peak, held + head_bytes)


def useful_blocks(runs: Sequence[BlockRun]) -> list[str]:
    """Return the blocks that hold less if they are recomputed, in the order of their first call."""
    saved: dict[str, int] = {}
    for run in runs:
        more = 0 if run.keeps_input or run.fed_by else run.input_bytes
        saved[run.block] = saved.get(run.block, 0) + run.saved_bytes - more
    return [block for block, saving in saved.items() if saving > 0]


def cost_of(runs: Sequence[BlockRun], chosen: Collection[str]) -> float:
    return sum(run.cost for run in runs if run.block in chosen)


def again_seconds(runs: Sequence[BlockRun], chosen: Collection[str]) -> float:
    """Return the time that recomputing these blocks takes. Equal calls count as their median."""
    equal: dict[tuple[object, ...], list[float]] = {}
    for run in runs:
        equal.setdefault(_describe(run), []).append(run.seconds)
    return sum(median(equal[_describe(run)]) for run in runs if run.block in chosen)


def choices(runs: Sequence[BlockRun]) -> Iterator[tuple[str, ...]]:
    """Yield choices of one useful block or more, those with the least recomputation first."""
    useful, width = useful_blocks(runs), 1.0
    kinds = _kinds(runs, useful, width)
    while math.prod(len(kind) + 1 for kind in kinds) > _MOST_CHOICES:
        width *= _WIDER
        kinds = _kinds(runs, useful, width)
    costs = [[0.0, *_add_up(cost_of(runs, [block]) for block in kind)] for kind in kinds]
    counts = list(product(*(range(len(kind) + 1) for kind in kinds)))
    counts.sort(key=lambda taken: sum(cost[count] for cost, count in zip(costs, taken, strict=True)))
    for taken in counts:
        chosen = {block for kind, count in zip(kinds, taken, strict=True) for block in kind[:count]}
        if chosen:
            yield tuple(block for block in useful if block in chosen)


def _add_up(costs: Iterator[float]) -> Iterator[float]:
    total = 0.0
    for cost in costs:
        yield (total := total + cost)


def _describe(run: BlockRun) -> tuple[object, ...]:
    """Return what equal calls have in common."""
    return run.kind, run.flops, run.saved_bytes, run.input_bytes, run.keeps_input


def _kinds(runs: Sequence[BlockRun], blocks: Sequence[str], width: float) -> list[list[str]]:
    """Group blocks that are alike; a ``width`` above 1 also groups those whose numbers differ by up to this factor."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for block in blocks:
        own = [run for run in runs if run.block == block]
        key: tuple[object, ...] = tuple(map(_describe, own))
        if width > 1:
            cost, saved = sum(run.cost for run in own), sum(run.saved_bytes for run in own)
            key = tuple(round(math.log(number + 1) / math.log(width)) for number in (cost, saved))
        kinds.setdefault(key, []).append(block)
    return [*kinds.values()]
