"""Takes samples of similar length out of a batch, without the padding that none of them needs.

Covers ``SortedLayout``: a batch whose samples are in order of their lengths, and ``TrimmedLayout``: in their own order.
Does not cover how lengths and padding are read (``lengths``), nor how many samples go together (``planning.lengths``).

Samples that lie apart are gathered, one micro-batch at a time: a copy of what is left of them after trimming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from autobatch.batch.chosen_rows import spread_evenly
from autobatch.batch.layout import Layout
from autobatch.batch.lengths import Lengths, ask_lengths, padded_length, read_answers
from autobatch.batch.list_rules import ROOT
from autobatch.batch.registry import find_type
from autobatch.batch.tree import fields_of, is_array, with_fields, with_items
from autobatch.errors import InvalidArgument
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
        lengths: Asked again of parts that are trimmed, where they are checked.
    """

    order: Sequence[int] = ()
    values: Sequence[int] = ()
    padding: Padding = field(default_factory=Padding)
    padded: int = 0
    sizes: tuple[SizeAtLength, ...] = ()
    trims_to_edges: bool = False
    lengths: Lengths | None = None

    @classmethod
    def of(
        cls,
        layout: Layout,
        values: Sequence[int],
        padding: Padding,
        sizes: tuple[SizeAtLength, ...],
        *,
        trims_to_edges: bool = False,
        lengths: Lengths | None = None,
    ) -> SortedLayout:
        """Sort a batch, equal lengths in the order they came in; raises InvalidArgument as ``padded_length`` does."""
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
            lengths=lengths,
        )

    def take(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop`` of the order, trimmed, as new tensors."""
        return gather(self, self.order[start:stop], self.padding, self._length_from(start))

    def spread(self, n: int) -> Layout:
        """``n`` samples, evenly from the longest to the shortest, as new tensors, padded as they were."""
        rows = [self.order[index] for index in spread_evenly(n, self.count)]
        return Layout(gather(self, rows, self.padding, self.padded), n, self.lists)

    def is_trimmed(self, start: int) -> bool:
        """Whether a part that begins at this sample loses anything, which might be no padding."""
        return bool(self.padding.dims) and self._length_from(start) < self.padded

    def ask(self, part: Any) -> Any:
        """What the user's function answers for a trimmed part, for ``check_trimmed``."""
        return None if self.lengths is None else ask_lengths(self.lengths, part)

    def check_trimmed(self, answers: Mapping[tuple[int, int], Any]) -> None:
        """Refuse padding on the wrong side, and lengths that count positions of padding too.

        Args:
            answers: Of ``ask``, by where its part begins and ends; all are read at once, as each may wait for a device.

        Raises:
            InvalidArgument: A sample is of another length once it is trimmed.
        """
        before = [max(self.values[row], 1) for bounds in answers for row in range(*bounds)]
        counts = [stop - start for start, stop in answers]
        for one, other in zip(before, read_answers([*answers.values()], counts), strict=True):
            if max(other, 1) != one:
                raise InvalidArgument(
                    f"lengths() gives {other} for a sample that it gave {one} for before its padding was trimmed on "
                    f"the {self.padding.side}: count what is no padding, or pass autobatch.Lengths(length_of, "
                    f"padding='left') where padding comes first"
                )

    def _length_from(self, start: int) -> int:
        """What a part that begins at this sample, its longest, is trimmed to."""
        length = self.values[start]
        if self.trims_to_edges:
            length = min((size.length for size in self.sizes if size.length >= length), default=length)
        return min(length, self.padded)


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
