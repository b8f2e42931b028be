"""Reads what a micro-batch counts for: what ``weigh`` of it returned, and counts that the step states with its loss.

Covers numbers and tensors of one element. Does not cover how the counts of many micro-batches divide a loss
(``training.loss_denominators``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autobatch.errors import InvalidBatch, InvalidStep

__all__ = ["Weigh", "read_count", "read_weights"]

Weigh = Callable[[Any], "float | torch.Tensor | Mapping[str, float | torch.Tensor]"]


def read_weights(returned: Any, samples: int) -> dict[str, float]:
    """What ``weigh`` of a micro-batch of so many samples returned, by term; ``""`` stands for every term.

    Raises InvalidBatch where a weight is no number, negative or not finite.
    """
    if not isinstance(returned, Mapping):
        return {"": _read_weight(returned, "", samples)}
    if not returned:
        raise InvalidBatch("weigh() returned an empty dict: it must name the step's terms, or return one number")
    return {str(name): _read_weight(value, f" for {name!r}", samples) for name, value in returned.items()}


def _read_weight(value: Any, what: str, samples: int) -> float:
    weight = _read_number(value)
    if weight is None:
        raise InvalidBatch(
            f"weigh() returned {type(value).__name__}{what}; it must return one number, or a dict of them by term"
        )
    if not math.isfinite(weight) or weight < 0:
        raise InvalidBatch(
            f"weigh() gave {weight}{what} for a micro-batch of {samples}; it must be a finite number >= 0"
        )
    return weight


def read_count(value: Any, argument: str) -> float:
    """A count as a Python number, finite and 0 or more; else raises InvalidStep, where ``argument`` names it."""
    count = _read_number(value)
    if count is None:
        raise InvalidStep(f"{argument} is {type(value).__name__}; it must be one number")
    if not math.isfinite(count) or count < 0:
        raise InvalidStep(f"{argument} is {count}; it must be a finite number >= 0")
    return count


def _read_number(value: Any) -> float | None:
    """A number, or a tensor of one, as a Python number; ``None`` where it is neither. The device's errors come out."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, str | bytes):  # of which float() reads some
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
