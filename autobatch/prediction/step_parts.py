"""Finds the parts of a traced step: forward passes, backward passes, the optimizer's updates.

Covers two steps of two micro-batches, as every timeline has them, and the same with one micro-batch each. Does not
cover what an allocator makes of them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autobatch.prediction.timeline import Block, Timeline

__all__ = ["StepParts", "find_parts", "has_parts", "without_second_micro_batch"]

_FORWARDS = 4


class StepParts(NamedTuple):
    """Where in the order each part begins; one that allocates nothing begins where the next does."""

    forwards: tuple[int, int, int, int]  # of two micro-batches in the first step, and of two in the second
    first_backward: int
    updates: tuple[int, int]  # of the optimizer

    @property
    def second_step(self) -> int:
        """Where the first step is over."""
        return self.forwards[2]


def find_parts(order: Sequence[int], blocks: Sequence[Block]) -> StepParts:
    """By the first allocation of each part.

    Args:
        order: As ``TracedStep.order``; entries of further blocks, such as workspaces, are passed over.
        blocks: Of the step.

    Raises:
        ValueError: There are not four forward passes.
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
    if len(forwards) != _FORWARDS:
        raise ValueError(f"two steps of two micro-batches have {_FORWARDS} forward passes, not {len(forwards)}")
    first, second, third, fourth = forwards
    ends = updates.get(2, third), updates.get(_FORWARDS, len(order))
    return StepParts((first, second, third, fourth), backward, ends)


def has_parts(timeline: Timeline) -> bool:
    """Whether the parts of its steps can be distinguished: a pass that allocates nothing is not seen."""
    try:
        find_parts(timeline.order, timeline.blocks)
    except ValueError:
        return False
    return True


def without_second_micro_batch(order: Sequence[int], blocks: Sequence[Block], steps: int = 2) -> list[int]:
    """The order of steps of one micro-batch each: what the second makes and drops again is left out.

    Gradients stay, and so do the float32 sums of gradients in less precision, which a step of one micro-batch does not
    make: there it says too much.

    Args:
        order: As for ``find_parts``, which raises for the same.
        blocks: Of the step.
        steps: Of how many steps, from the first, the second micro-batch is left out.
    """
    parts = find_parts(order, blocks)
    freed, dropped = {-entry for entry in order if entry < 0}, set()
    for step in range(steps):
        made = freed.intersection(order[parts.forwards[2 * step + 1] : parts.updates[step]])
        dropped |= {entry for entry in made if entry > len(blocks) or blocks[entry - 1].kind != "gradient"}
    return [entry for entry in order if abs(entry) not in dropped]
