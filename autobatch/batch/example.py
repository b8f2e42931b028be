"""Finds the example batch that every trial is made from: given, drawn from a dataset, or inferred from the model.

Covers the choice between the three and what has to be said about it. Does not cover how samples are compared
(``largest``) nor what can be seen of a model's input (``inference``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autobatch.batch.inference import infer_example
from autobatch.batch.largest import is_source, largest_samples
from autobatch.batch.layout import Layout, describe, tensors_of
from autobatch.batch.registry import find_type
from autobatch.batch.tree import fields_of
from autobatch.errors import InvalidBatch

__all__ = ["Example", "check_values", "find_example", "refuse_meta"]

_MOST_SAMPLES = 64
"""How many of a dataset's largest samples are taken: enough for a mixture, few enough that it stays the large end."""


@dataclass(frozen=True)
class Example:
    """A batch, and what the user should know about where it came from."""

    layout: Layout
    warnings: tuple[str, ...] = ()


def find_example(model: nn.Module, batch: Any | None, most: int) -> Example:
    """An example batch.

    Args:
        model: Asked for its input where no batch is given.
        batch: Any nest, a Dataset or a DataLoader, or ``None``.
        most: No more samples than this are of use.

    Raises:
        NeedsBatch: None is given and the model does not tell.
        InvalidBatch: The batch cannot be counted.
    """
    if batch is None:
        warning = (
            "no batch= was given: sizes were tried with an input inferred from the model; real samples may be larger"
        )
        return Example(describe(infer_example(model)), (warning,))
    if not is_source(batch):
        return Example(describe(batch))
    largest = largest_samples(batch, min(most, _MOST_SAMPLES))
    return Example(largest.layout, () if largest.note is None else (largest.note,))


def check_values(batch: Any) -> None:
    """What can be seen of a batch only by its values, before any sample of it is run.

    Raises:
        InvalidBatch: A tensor has none, or the ``take`` of a registered type does not use its indices.
    """
    for tensor in tensors_of(batch):
        refuse_meta(tensor)
    _check_takes(batch)


def refuse_meta(tensor: torch.Tensor) -> None:
    """Raises InvalidBatch where a tensor of a batch is on the meta device."""
    if tensor.is_meta:
        raise InvalidBatch(
            f"a tensor of shape {tuple(tensor.shape)} in the batch is on the meta device and has no values to run: "
            f"pass real samples (predict() needs no values)"
        )


def _check_takes(node: Any) -> None:
    registered = find_type(node)
    if registered is not None:
        registered.check_take(node)
    for _, child in fields_of(node) or ():
        _check_takes(child)
