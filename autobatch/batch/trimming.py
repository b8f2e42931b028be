"""Takes samples of similar length out of a batch, without the padding that none of them needs.

Covers ``SortedLayout``: a batch whose samples are in order of their lengths, and ``TrimmedLayout``: in their own order.
Does not cover how lengths and padding are read (``lengths``), nor how many samples go together (``planning.lengths``).

Samples that lie apart are gathered, one micro-batch at a time: a copy of what is left of them after trimming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from autobatch.batch.layout import Layout
from autobatch.batch.lengths import padded_length
from autobatch.batch.list_rules import ROOT
from autobatch.batch.registry import find_type
from autobatch.batch.tree import fields_of, is_array, with_fields, with_items
from autobatch.records import Padding, SizeAtLength

__all__ = ["SortedLayout", "TrimmedLayout", "gather"]


@dataclass(eq=False)
class TrimmedLayout(Layout):
    """A batch whose parts are trimmed to their longest sample; all of its samples are the batch as it is.

    Attributes:
        values: The length of each sample.
        padding: Where the padding is.
    """

    values: Sequence[int] = ()
    padding: Padding = field(default_factory=Padding)

    def take(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop``, trimmed."""
        if stop - start == self.count:
            return self.batch
        return gather(self, range(start, stop), self.padding, max(self.values[start:stop]))


@dataclass(eq=False)
class SortedLayout(Layout):
    """A batch whose samples are taken in order of their lengths, the longest first, and trimmed.

    Attributes:
        order: The row of each sample in the batch.
        values: The length of each sample, in the same order.
        padding: Where the padding is.
        padded: The length to which the batch is padded.
        sizes: How many samples may run together, by length.
        trims_to_edges: Whether parts are trimmed to lengths that were tried, so that there are few shapes to compile.
    """

    order: Sequence[int] = ()
    values: Sequence[int] = ()
    padding: Padding = field(default_factory=Padding)
    padded: int = 0
    sizes: tuple[SizeAtLength, ...] = ()
    trims_to_edges: bool = False

    @classmethod
    def of(
        cls,
        layout: Layout,
        values: Sequence[int],
        padding: Padding,
        sizes: tuple[SizeAtLength, ...],
        *,
        trims_to_edges: bool = False,
    ) -> SortedLayout:
        """Sort a batch, equal lengths in the order they came in; raises InvalidBatch as ``padded_length`` does."""
        if "unclear" in layout.lists.values() and layout.count > 1:
            layout.take(0, 1)  # raises, and says what to pass
        order = sorted(range(layout.count), key=lambda row: -values[row])
        return cls(
            layout.batch,
            layout.count,
            layout.lists,
            order=order,
            values=[values[row] for row in order],
            padding=padding,
            padded=padded_length(layout, padding, values),
            sizes=sizes,
            trims_to_edges=trims_to_edges,
        )

    def take(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop`` of the order, trimmed, as new tensors."""
        length = self.values[start]
        if self.trims_to_edges:
            length = min((size.length for size in self.sizes if size.length >= length), default=length)
        return gather(self, self.order[start:stop], self.padding, min(length, self.padded))


def gather(layout: Layout, rows: Sequence[int], padding: Padding, length: int) -> Any:
    """These samples in this order, padded dimensions cut to ``length``; a part of at least one position."""
    length = max(length, 1)

    def take(node: Any, path: str) -> Any:
        registered = find_type(node)
        if registered is not None:
            return registered.take_samples(node, [*rows])
        if layout.lists.get(path) == "samples":
            return with_items(node, [node[row] for row in rows])
        if isinstance(node, torch.Tensor) or is_array(node):
            return _take_rows(_trim(node, padding.dims.get(path, ()), padding.side, length), rows)
        fields = fields_of(node)
        taken = [take(child, path + suffix) for suffix, child in fields or ()]
        return node if fields is None else with_fields(node, taken)

    return take(layout.batch, ROOT)


def _trim(part: Any, dims: Sequence[int], side: Literal["right", "left"], length: int) -> Any:
    """A view; before rows are taken, so that only what is left is copied."""
    cuts = [slice(None)] * part.ndim
    for dim in dims:
        cuts[dim] = slice(length) if side == "right" else slice(max(part.shape[dim] - length, 0), None)
    return part[tuple(cuts)] if dims else part


def _take_rows(part: Any, rows: Sequence[int]) -> Any:
    if not part.ndim:
        return part
    if not isinstance(part, torch.Tensor):
        return part[[*rows]]
    index = torch.tensor([*rows], device=part.device)
    return part.detach().index_select(0, index).requires_grad_(part.requires_grad)
