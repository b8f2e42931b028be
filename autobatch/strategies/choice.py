"""Decides which blocks to recompute or offload, and in which way, without torch.

1. A measurement has the runs of all blocks in order (``BlockRun``), and what the rest of the step holds at most.
2. ``predict_peak`` says what a choice (``Ways``) would hold at once. It is the largest of the moments at which memory
   may peak: the backward pass of each block, and that of the part after the last one.
3. ``choices`` yields all choices, the cheapest first. Blocks that are alike count as one kind. The earliest of a kind
   hold the least, since the last block's recomputation falls on the peak itself.

A prediction is only a filter: the first choice whose trial fits is taken.

Invariants, asserted by the tests:

- Among choices that fit, the cheapest one is taken, unless there are too many kinds of blocks.
- Nothing is predicted to fit that a trial has not run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations_with_replacement, product
from statistics import median

from autobatch._bounds import SHORTEST, Bytes, Count, Seconds, Text
from autobatch.records import Record, Way

TOO_LOW = 1.035
"""How much a measured peak may be below its prediction: up to 3.3 % in all 256 choices of 8 blocks of four widths."""

_MOST_CHOICES = 20_000
"""Most choices that are compared, each by its prediction; 7 kinds of 3 blocks have fewer."""

_WIDER = 1.3
"""Blocks whose costs and bytes differ by up to this factor, or a power of it, count as one kind if there are more."""

_WIDEST = 100.0
"""Beyond this factor, blocks of a kind also change their way some at a time."""

Ways = Mapping[str, Way]
"""Way of each chosen block; all others run plainly."""


def whole(blocks: Iterable[str]) -> dict[str, Way]:
    """Return the choice in which these blocks are recomputed whole."""
    return dict.fromkeys(blocks, "checkpoint")


class WayRun(Record):
    """One way of a block in which its training is the same.

    Attributes:
        kept_bytes: Bytes of ``BlockRun.saved_bytes`` that it keeps.
        again_bytes: Most bytes at once in its forward and backward pass.
        seconds: Time that it takes beyond the plain way.
    """

    kept_bytes: Bytes
    again_bytes: Bytes
    seconds: Seconds


class BlockRun(Record):
    """One call of a block in the forward pass of a step.

    Attributes:
        block: Name of the block.
        kind: Class of the block.
        saved_bytes: Bytes that its backward pass needs, beside its inputs and the parameters.
        input_bytes: Bytes of inputs that no earlier block had.
        keeps_input: Whether its backward pass needs them.
        fed_by: Block whose saved bytes include these inputs; empty if none does.
        again_bytes: Most bytes at once in its forward and backward pass in the plain way.
        again_seconds: Time of its recomputation; of its forward pass if it cannot be recomputed.
        flops: Operations of its forward pass.
        ways: Ways in which it may run.
    """

    block: Text
    kind: Text
    saved_bytes: Bytes
    input_bytes: Bytes
    keeps_input: bool
    fed_by: Text = ""
    again_bytes: Bytes
    again_seconds: Seconds
    flops: Count
    ways: dict[Way, WayRun]

    def cost(self, way: Way) -> float:
        """Return the operations of one more forward pass, or the part of them that takes as long as this way does.

        Bytes decide between blocks without a matrix product.
        """
        part = 1.0 if way == "checkpoint" else self.ways[way].seconds / max(self.again_seconds, SHORTEST)
        return (self.flops + 1e-6 * self.saved_bytes) * part

    def holds_input(self, way: Way | None) -> bool:
        """Return whether it holds its inputs; a recomputation begins with them."""
        return self.keeps_input or way not in (None, "offload")

    @property
    def numbers(self) -> tuple[object, ...]:
        """What calls of one kind of block share."""
        return self.kind, self.flops, self.saved_bytes, self.input_bytes, self.keeps_input


def even_out(runs: Sequence[BlockRun]) -> list[BlockRun]:
    """Return the runs with the median times of their kind: single ones differ by a third on a busy machine."""
    times: dict[object, list[float]] = {}
    for run in runs:
        times.setdefault(run.numbers, []).append(run.again_seconds)
        for way, one in run.ways.items():
            times.setdefault((way, run.numbers), []).append(one.seconds)
    return [
        run.model_copy(
            update={
                "again_seconds": median(times[run.numbers]),
                "ways": {
                    way: one.model_copy(update={"seconds": median(times[way, run.numbers])})
                    for way, one in run.ways.items()
                },
            }
        )
        for run in runs
    ]


def predict_peak(runs: Sequence[BlockRun], chosen: Ways, head_bytes: int) -> int:
    """Return the most bytes at once if the chosen blocks run in these ways.

    ``head_bytes`` is the most that runs after the last block. The bytes of everything else are left out.
    """
    held = peak = 0
    for run in runs:
        way = chosen.get(run.block)
        if run.holds_input(way) and (not run.fed_by or run.fed_by in chosen):
            held += run.input_bytes
        kept = run.saved_bytes if way is None else run.ways[way].kept_bytes
        held += kept
        peak = max(peak, held + (run if way is None else run.ways[way]).again_bytes - kept)
    return max(peak, held + head_bytes)


def useful_ways(runs: Sequence[BlockRun], allowed: Collection[Way]) -> dict[str, list[Way]]:
    """Return ways of blocks that hold less than the plain one, the least first; each is cheaper than the one before.

    Blocks come in the order of their first call; those without such a way are left out.
    """
    found: dict[str, list[Way]] = {}
    for block, own in _by_block(runs).items():
        saved: dict[Way, int] = {}
        for way in allowed:
            if all(way in run.ways for run in own):
                begun = [run for run in own if run.holds_input(way) and not run.keeps_input]
                inputs = sum(run.input_bytes for run in begun if not run.fed_by)
                saved[way] = sum(run.saved_bytes - run.ways[way].kept_bytes for run in own) - inputs
        cheapest = math.inf
        for way in sorted(saved, key=lambda way: -saved[way]):
            cost = sum(run.cost(way) for run in own)
            if saved[way] > 0 and cost < cheapest:
                found.setdefault(block, []).append(way)
                cheapest = cost
    return found


def cost_of(runs: Sequence[BlockRun], chosen: Ways) -> float:
    return sum(run.cost(chosen[run.block]) for run in runs if run.block in chosen)


def again_seconds(runs: Sequence[BlockRun], chosen: Ways) -> float:
    """Return the time that these ways add to a step; blocks were measured one after the other."""
    return sum(run.ways[chosen[run.block]].seconds for run in runs if run.block in chosen)


def choices(runs: Sequence[BlockRun], allowed: Collection[Way]) -> Iterator[dict[str, Way]]:
    """Yield choices of one useful block or more in allowed ways, the cheapest first."""
    useful, width, step = useful_ways(runs, allowed), 1.0, 1
    kinds = _kinds(runs, useful, width)
    while math.prod(_count(kind, useful[kind[0]], step) for kind in kinds) > _MOST_CHOICES:
        width *= _WIDER
        step += width > _WIDEST
        kinds = _kinds(runs, useful, width)
    own = _by_block(runs)
    divisions = []
    for kind in kinds:
        ways = useful[kind[0]]
        sums = [[0.0, *accumulate(sum(run.cost(way) for run in own[block]) for block in kind)] for way in ways]
        # The first so many blocks of a kind in its first way, those up to the next bound in the second one.
        divisions.append(
            [
                (
                    sum(costs[end] - costs[begin] for costs, begin, end in zip(sums, (0, *ends), ends, strict=False)),
                    ends,
                )
                for ends in combinations_with_replacement(_places(kind, step), len(ways))
            ]
        )
    for taken in sorted(product(*divisions), key=lambda taken: sum(cost for cost, _ in taken)):
        chosen = {
            block: way
            for kind, (_, ends) in zip(kinds, taken, strict=True)
            for way, begin, end in zip(useful[kind[0]], (0, *ends), ends, strict=False)
            for block in kind[begin:end]
        }
        if chosen:
            yield {block: chosen[block] for block in useful if block in chosen}


def _places(kind: Sequence[str], step: int) -> list[int]:
    """Return the numbers of first blocks of a kind after which the way may change."""
    return [*range(0, len(kind), step), len(kind)]


def _count(kind: Sequence[str], ways: Sequence[Way], step: int) -> int:
    """Return the number of ways to divide a kind among ways."""
    return math.comb(len(_places(kind, step)) - 1 + len(ways), len(ways))


def _by_block(runs: Sequence[BlockRun]) -> dict[str, list[BlockRun]]:
    found: dict[str, list[BlockRun]] = {}
    for run in runs:
        found.setdefault(run.block, []).append(run)
    return found


def _kinds(runs: Sequence[BlockRun], useful: Mapping[str, Sequence[Way]], width: float) -> list[list[str]]:
    """Group blocks that are alike; a ``width`` above 1 also groups those whose numbers differ by up to this factor."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for block, own in _by_block(runs).items():
        if block not in useful:
            continue
        key: tuple[object, ...] = tuple(run.numbers for run in own)
        if width > 1:
            first = useful[block][0]
            cost, saved = sum(run.cost(first) for run in own), sum(run.saved_bytes for run in own)
            key = tuple(round(math.log(number + 1) / math.log(width)) for number in (cost, saved))
        kinds.setdefault((*useful[block], key), []).append(block)
    return [*kinds.values()]
