"""Replaces attributes, compares and averages values, and words advice, for both adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autobatch.batch.tree import is_array

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give this one object another attribute inside the block; its class is not touched."""
    attributes = vars(owner)
    earlier = attributes.get(name, _MISSING)
    attributes[name] = value
    try:
        yield
    finally:
        if earlier is _MISSING:
            del attributes[name]
        else:
            attributes[name] = earlier


def advise(reason: object, advice: Mapping[str, str]) -> str:
    """Return a reason, and for what it names and this library's users cannot write, what they can do."""
    return str(reason) + "".join(own for named, own in advice.items() if named in str(reason))


def is_number(value: Any) -> bool:
    """Return whether it is one number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean; a value without a weight does not count, since a mean over nothing is not a number."""
    total = math.fsum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, or all that two containers hold; tensors may be on different devices."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.to(other.device), other)
    if is_array(one) and is_array(other):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    try:
        return bool(type(one) is type(other) and (one is other or one == other))
    except (TypeError, ValueError, RuntimeError):  # objects that compare the arrays in them value by value
        return False
