"""Joins what ``training_step`` returns beside its losses into what it would have returned for the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autobatch.batch.tree import is_array
from autobatch.integrations.lightning.logs import Key, Rule, combine

__all__ = ["RETURNED", "is_equal", "is_number", "join_outputs"]

RETURNED = 0
"""Second half of the ``Key`` of a number that ``training_step`` returned; numbers that it logs count from 1."""


def join_outputs(
    outputs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    weights: Sequence[float],
    rules: Mapping[Key, Rule],
) -> dict[str, Any]:
    """Join the outputs of micro-batches for ``on_train_batch_end``.

    Args:
        outputs: Without the loss.
        sizes: Samples of each.
        weights: What each counts for in a mean.
        rules: How numbers are put together, where that was found.
    """
    names = [name for name in outputs[0] if all(name in output for output in outputs)] if outputs else []
    return {
        name: _join([output[name] for output in outputs], sizes, weights, rules.get((name, RETURNED))) for name in names
    }


def is_number(value: Any) -> bool:
    """Return whether it is one number: a float, an int, or a tensor of one without dimensions."""
    if isinstance(value, torch.Tensor):
        return not value.dim() and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, float | int) and not isinstance(value, bool)


def _join(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], rule: Rule | None) -> Any:
    """Join rows end to end and numbers by their rule; what is equal in all micro-batches stays as it is."""
    first = values[0]
    if len(values) == 1:
        return first
    if all(map(is_number, values)):
        return _join_numbers(values, weights, rule)
    if all(_count_rows(value) == size for value, size in zip(values, sizes, strict=True)):
        return _join_rows(values)
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _join([value[key] for value in values], sizes, weights, None) for key in first}
    if all(type(value) is tuple and len(value) == len(first) for value in values):
        return tuple(_join(parts, sizes, weights, None) for parts in zip(*values, strict=True))
    return first if all(is_equal(first, value) for value in values[1:]) else [*values]


def _join_numbers(values: Sequence[Any], weights: Sequence[float], rule: Rule | None) -> Any:
    first, way = values[0], "mean" if rule is None else rule.way
    if way != "sum" and all(is_equal(first, value) for value in values[1:]):
        return first
    is_float = first.is_floating_point() if isinstance(first, torch.Tensor) else isinstance(first, float)
    if way == "mean" and not is_float:
        return [*values]
    joined = combine(way, values, weights)
    if not isinstance(first, torch.Tensor):
        return type(first)(joined)
    return joined.to(first.dtype) if is_float else joined.round().to(first.dtype)


def _count_rows(value: Any) -> int | None:
    """Return how many rows it has; ``None`` where it has none."""
    if isinstance(value, torch.Tensor) or is_array(value):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _join_rows(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat([*values])
    if is_array(values[0]):
        return sys.modules["numpy"].concatenate(values)
    return [row for value in values for row in value]


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are of one kind and the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if is_array(one):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # objects that compare the arrays in them value by value
        return False
