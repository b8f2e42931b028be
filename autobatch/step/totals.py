"""Refuses a total that a step returns beside its own parts, since all terms are added up and trained on.

1. Each term's graph is followed from its end, through nodes that only add, scale or convert what they get.
2. If that leads to another term, the one is made of the other, which would count twice.

A compiled step is one node, which shows nothing. The first steps that are watched run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autobatch.errors import InvalidArgument
from autobatch.step.losses import losses_of

_SCALING = {"Mul", "Div"}  # of one operand with a graph; a product of two is a loss of its own
_LINEAR = {"Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", "Squeeze", "Unsqueeze"}
_LINEAR |= {"View", "Reshape", "Expand", "Clone", "ToCopy"}
"""Names of such nodes, as in ``AddBackward0``; a user's own ``Function`` has no number behind its name."""

_Edge = tuple[Any, int]
"""A node of a graph, and which of its results."""


def refuse_totals(returned: Any) -> None:
    """Raise InvalidArgument if a term of a step's loss is made of others."""
    losses = {name: loss for name, loss in losses_of(returned).items() if loss.grad_fn is not None}
    if len(losses) < 2:
        return
    for name, loss in losses.items():
        reached = set(_follow((loss.grad_fn, loss.output_nr)))
        parts = [other for other, part in losses.items() if other != name and (part.grad_fn, part.output_nr) in reached]
        if parts:
            listed = ", ".join(map(repr, parts))
            shown = ", ".join(f"{part!r}: ..." for part in parts[:2]) + (", ..." if parts[2:] else "")
            raise InvalidArgument(
                f"the step returned the term {name!r}, which is made of {listed} beside it: all terms are added up, so "
                f"these would count twice; return the total alone with its parts beside it, as (loss, {{{shown}}}), or "
                f"the parts without their total; where it is meant so, return their sum as one loss"
            )


def _follow(end: _Edge) -> Iterator[_Edge]:
    waiting, seen = [end], set[_Edge]()
    while waiting:
        edge = waiting.pop()
        if edge not in seen:
            seen.add(edge)
            yield edge
            operands = [other for other in edge[0].next_functions if other[0] is not None]
            name, _, number = type(edge[0]).__name__.partition("Backward")
            if number and (name in _LINEAR or (name in _SCALING and len(operands) == 1)):
                waiting += operands
