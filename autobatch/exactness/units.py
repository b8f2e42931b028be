"""Lists what a mean may be over, other than samples: tokens, valid labels, masks, as a batch shows them.

Covers counts of the batch's own tensors that a loss is commonly divided by, also of those in lists of samples (boxes
and labels of each image). Does not cover what only the loss knows, such as class weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autobatch.batch.layout import Layout
from autobatch.batch.tree import fields_of

__all__ = ["Unit", "units_of"]

_FILLERS = (-100, 0, -1, 1)
"""What stands for "no label" or "padding": torch's ignore_index, and the usual padding tokens."""


@dataclass(frozen=True)
class Unit:
    """Something a batch has a number of: how it is counted, as Python with ``batch`` in it, and the counting itself."""

    code: str
    count: Callable[[Any], float]


class _Source(NamedTuple):
    """A tensor of a batch, or the tensors that all samples of a list have under the same path.

    Attributes:
        path: How it is reached from ``batch``; of a list of samples, how the list is.
        within: How a tensor is reached from its ``item`` of a list of samples; ``None`` for a tensor of the batch.
        joined: All its values, to be looked at.
        ndim: Dimensions of the tensor, or of each sample's.
    """

    path: str
    within: str | None
    joined: torch.Tensor
    ndim: int

    @property
    def is_mask(self) -> bool:
        return self.joined.dtype == torch.bool or bool(((self.joined == 0) | (self.joined == 1)).all())

    def cuts(self) -> tuple[str, ...]:
        # A language model's labels are its inputs, shifted by one: the first of each row is no label.
        return ("", "[:, 1:]") if self.ndim >= 2 and self.within is None else ("",)

    def unit(self, code: str, count: Callable[[torch.Tensor], float]) -> Unit:
        if self.within is None:
            return Unit(code.format(self.path), lambda batch: float(count(_tensors("batch", batch)[self.path])))
        within, path = self.within, self.path
        return Unit(
            f"sum({code.format(f'item{within}')} for item in {path})",
            lambda batch: float(
                sum(float(count(_tensors("item", item)[f"item{within}"])) for item in _at(batch, path))
            ),
        )


def units_of(layout: Layout) -> Iterator[Unit]:
    """Everything in this batch that a mean may be over, the most common first."""
    found = [*_sources(layout)]
    for source in found:
        if source.within is not None:
            yield source.unit("len({})", len)
    integers = [source for source in found if not source.is_mask and not source.joined.is_floating_point()]
    for filler in _FILLERS:
        for source in integers:
            for cut in source.cuts():
                yield source.unit(f"({{}}{cut} != {filler}).sum()", _count_unequal(cut, filler))
    for source in found:
        if source.is_mask or (source.ndim == 1 and bool((source.joined >= 0).all())):
            for cut in source.cuts():
                yield source.unit(f"{{}}{cut}.sum()", _sum(cut))


def _count_unequal(cut: str, filler: int) -> Callable[[torch.Tensor], float]:
    return lambda tensor: float((_cut(tensor, cut) != filler).sum())


def _sum(cut: str) -> Callable[[torch.Tensor], float]:
    return lambda tensor: float(_cut(tensor, cut).double().sum())


def _cut(tensor: torch.Tensor, cut: str) -> torch.Tensor:
    return tensor[:, 1:] if cut else tensor


def _sources(layout: Layout) -> Iterator[_Source]:
    lists = [path for path, reading in layout.lists.items() if reading == "samples"]
    for path, tensor in _tensors("batch", layout.batch).items():
        if not any(path.startswith(f"{of_samples}[") for of_samples in lists):
            yield _Source(path, None, tensor, tensor.ndim)
    for path in lists:
        items = [_tensors("item", item) for item in _at(layout.batch, path)]
        for name in items[0] if items else ():
            if all(name in item for item in items):
                joined = torch.cat([item[name].reshape(-1) for item in items])
                yield _Source(path, name.removeprefix("item"), joined, items[0][name].ndim)


def _tensors(path: str, node: Any) -> dict[str, torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return {path: node} if node.ndim and not node.is_complex() else {}
    found: dict[str, torch.Tensor] = {}
    for suffix, child in fields_of(node) or ():
        found.update(_tensors(path + suffix, child))
    return found


def _at(batch: Any, path: str) -> Any:
    """What a container holds at this path."""
    waiting = [("batch", batch)]
    while waiting:
        reached, node = waiting.pop()
        if reached == path:
            return node
        waiting += [(reached + suffix, child) for suffix, child in fields_of(node) or ()]
    return ()
