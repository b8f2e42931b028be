"""Puts together what ``training_step`` returned beside its loss in each micro-batch, for ``on_train_batch_end``.

Covers rows, which are put end to end, and numbers, which are a mean. What is neither is a list of the micro-batches'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autobatch.integrations.lightning.logs import combine

__all__ = ["join_outputs"]


def join_outputs(
    outputs: Sequence[Mapping[str, Any]], sizes: Sequence[int], weights: Sequence[float]
) -> dict[str, Any]:
    """One dict for those of all micro-batches.

    Args:
        outputs: Without the loss.
        sizes: Samples of each.
        weights: What each counts for.
    """
    names = [name for name in outputs[0] if all(name in output for output in outputs)] if outputs else []
    return {name: _join([output[name] for output in outputs], sizes, weights) for name in names}


def _join(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if len(values) == 1:
        return values[0]
    if not all(isinstance(value, torch.Tensor) for value in values):
        is_number = all(isinstance(value, float) for value in values)
        return combine("mean", values, weights) if is_number else [*values]
    if all(value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat([*values])
    if all(not value.dim() and value.is_floating_point() for value in values):
        return combine("mean", values, weights).to(values[0].dtype)
    return [*values]
