"""Refuses a total that a step returns beside its own parts, since all terms are added up and trained on.

1. Each term's graph is followed from its end, through nodes that only add, scale or convert what they get.
2. If that leads to another term, the one is made of the other, which would count twice.
3. A compiled model is one node of all terms, which says nothing. There the value decides: the sum of all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from autobatch.errors import InvalidArgument
from autobatch.step.losses import losses_of

_LINEAR = {"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Sum", "Mean", "Stack", "Cat", "Select", "Squeeze", "Unsqueeze"}
_LINEAR |= {"View", "Reshape", "Expand", "Clone", "ToCopy"}
"""Names of such nodes, as in ``AddBackward0``."""

_Edge = tuple[Any, int]
"""A node of a graph, and which of its results."""


def refuse_totals(returned: Any) -> None:
    """Raise InvalidArgument if a term of a step's loss is made of others."""
    losses = {name: loss for name, loss in losses_of(returned).items() if loss.grad_fn is not None}
    if len(losses) < 2:
        return
    for name, loss in losses.items():
        others = {other: losses[other] for other in losses if other != name}
        reached = set(_follow((loss.grad_fn, loss.output_nr)))
        parts = [other for other, part in others.items() if (part.grad_fn, part.output_nr) in reached]
        if not parts and _is_sum(loss, [*others.values()]):
            parts = [*others]
        if parts:
            listed = ", ".join(map(repr, parts))
            shown = ", ".join(f"{part!r}: ..." for part in parts[:2]) + (", ..." if parts[2:] else "")
            raise InvalidArgument(
                f"the step returned the term {name!r}, which is made of {listed} beside it: all terms are added up, so "
                f"these would count twice; return the total alone with its parts beside it, as (loss, {{{shown}}}), or "
                f"the parts without their total"
            )


def _follow(end: _Edge) -> Iterator[_Edge]:
    waiting, seen = [end], set[_Edge]()
    while waiting:
        edge = waiting.pop()
        if edge[0] is not None and edge not in seen:
            seen.add(edge)
            yield edge
            if type(edge[0]).__name__.partition("Backward")[0] in _LINEAR:
                waiting += edge[0].next_functions


def _is_sum(total: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Return whether a term has the value of two or more others from the same node, none of them 0."""
    losses = [total, *others]
    is_readable = all(type(one) is torch.Tensor and one.dtype in (torch.float32, torch.float64) for one in losses)
    if len(others) < 2 or not is_readable or any(one.grad_fn is not total.grad_fn for one in others):
        return False
    value, *parts = [float(one.detach()) for one in losses if one.numel() == 1]
    return len(parts) == len(others) and all(parts) and math.isclose(value, math.fsum(parts), rel_tol=1e-6)
