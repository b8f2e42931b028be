"""Joins what micro-batches returned into what ``training_step`` would have returned for the whole batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch

from autobatch.batch.tree import is_array

Way = Literal["mean", "sum", "max", "min"]


def combine(way: Way, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return one value for those of several micro-batches: tensors of one element, or numbers."""
    if not any(isinstance(value, torch.Tensor) for value in values):
        return float(combine(way, [torch.tensor(value, dtype=torch.float64) for value in values], weights))
    tensors = [torch.as_tensor(value).reshape(()) for value in values]
    # Lightning stores what is narrower in torch's default dtype.
    wide = [one if one.dtype == torch.float64 else one.to(torch.get_default_dtype()) for one in tensors]
    if way == "sum":
        return sum(wide)
    if way == "mean":
        total = math.fsum(weights)
        shares = [weight / total if total else 1 / len(weights) for weight in weights]
        # 0 x nan is nan: a mean over nothing does not count.
        return sum(value * share for value, share in zip(wide, shares, strict=True) if share)
    return torch.stack(wide).max() if way == "max" else torch.stack(wide).min()


def join_outputs(outputs: Sequence[dict[str, Any]], sizes: Sequence[int], weights: Sequence[float]) -> dict[str, Any]:
    """Join the outputs of micro-batches of these sizes, without their losses, for ``on_train_batch_end``."""
    names = [name for name in outputs[0] if all(name in output for output in outputs)] if outputs else []
    return {name: _join([output[name] for output in outputs], sizes, weights) for name in names}


def _join(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    if len(values) == 1:
        return first
    if all(_count_rows(value) == size for value, size in zip(values, sizes, strict=True)):
        if isinstance(first, torch.Tensor):
            return torch.cat([*values])
        return (
            sys.modules["numpy"].concatenate(values) if is_array(first) else [row for value in values for row in value]
        )
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _join([value[key] for value in values], sizes, weights) for key in first}
    if all(type(value) is tuple and len(value) == len(first) for value in values):
        return tuple(_join(parts, sizes, weights) for parts in zip(*values, strict=True))
    return _join_values(values, weights)


def _join_values(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Keep what is equal, and average floats; other values become a list."""
    first = values[0]
    if all(_is_equal(first, value) for value in values[1:]):
        return first
    if all(isinstance(value, float) for value in values):
        return combine("mean", values, weights)
    if all(isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point() for value in values):
        return combine("mean", values, weights).to(first.dtype)
    return [*values]


def _count_rows(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) or is_array(value):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) or is_array(one):
        same = torch.equal if isinstance(one, torch.Tensor) else sys.modules["numpy"].array_equal
        return bool(one.dtype == other.dtype and one.shape == other.shape and same(one, other))
    try:
        return bool(one is other or one == other)
    except (TypeError, ValueError, RuntimeError):  # objects that compare the arrays in them value by value
        return False
