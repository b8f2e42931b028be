"""What both adapters need: replaced attributes, means of logged numbers, and advice for their users."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

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
