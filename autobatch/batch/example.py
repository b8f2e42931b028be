"""Finds the example batch that every trial is made from: given, drawn from a dataset, or inferred from the model.

Covers the choice between the three and what has to be said about it. Does not cover how samples are compared
(``largest``) nor what can be seen of a model's input (``inference``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from autobatch.batch.inference import infer_example
from autobatch.batch.largest import is_source, largest_samples
from autobatch.batch.layout import Layout, describe

__all__ = ["Example", "find_example"]

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
