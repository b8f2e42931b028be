"""What a mean may be over, other than samples: tokens, valid labels, masks, as a batch shows them.

Covers counts of the batch's own tensors that a loss is commonly divided by. Does not cover what only the loss knows,
such as class weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.batch.tree import fields_of

__all__ = ["Unit", "units_of"]

_FILLERS = (-100, 0, -1, 1)
"""What stands for "no label" or "padding": torch's ignore_index, and the usual padding tokens."""


@dataclass(frozen=True)
class Unit:
    """Something a batch has a number of.

    Attributes:
        code: How it is counted, as Python with ``batch`` in it.
        count: The number in one micro-batch.
    """

    code: str
    count: Callable[[Any], float]


def units_of(batch: Any) -> Iterator[Unit]:
    """Everything in this batch that a mean may be over, the most common first."""
    found = dict(_tensors("batch", batch))
    integers = [path for path, tensor in found.items() if not _is_mask(tensor) and not tensor.is_floating_point()]
    for filler in _FILLERS:
        for path in integers:
            for cut in _cuts(found[path]):
                yield _unequal(path, cut, filler)
    for path, tensor in found.items():
        if _is_mask(tensor) or (tensor.ndim == 1 and bool((tensor >= 0).all())):
            for cut in _cuts(tensor):
                yield _summed(path, cut)


def _tensors(path: str, node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor) and node.ndim and not node.is_complex():
        yield path, node
    for suffix, child in fields_of(node) or ():
        yield from _tensors(path + suffix, child)


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _cuts(tensor: torch.Tensor) -> tuple[str, ...]:
    # A language model's labels are its inputs, one place on: the first of each row is no label.
    return ("", "[:, 1:]") if tensor.ndim >= 2 else ("",)


def _at(path: str, cut: str, batch: Any) -> torch.Tensor:
    tensor = dict(_tensors("batch", batch))[path]
    return tensor[:, 1:] if cut else tensor


def _unequal(path: str, cut: str, filler: int) -> Unit:
    return Unit(f"({path}{cut} != {filler}).sum()", lambda batch: float((_at(path, cut, batch) != filler).sum()))


def _summed(path: str, cut: str) -> Unit:
    return Unit(f"{path}{cut}.sum()", lambda batch: float(_at(path, cut, batch).double().sum()))
