"""Takes samples of any length out of an example batch, cut to that length.

Covers reading the lengths and the padding of an example, and refusing those that change when padding is trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autobatch.batch.layout import Layout
from autobatch.batch.lengths import Lengths, find_padding, padded_length, read_lengths
from autobatch.batch.trimming import SortedLayout, TrimmedLayout, gather
from autobatch.records import Padding

__all__ = ["SamplesByLength"]


@dataclass(frozen=True)
class SamplesByLength:
    """The samples of an example batch, from which trials of any length are made.

    Attributes:
        example: The batch.
        values: The length of each sample.
        padding: Where its padding is.
        longest: What it is padded to; of samples in lists the longest one's length.
    """

    example: Layout
    values: Sequence[int]
    padding: Padding
    longest: int

    @classmethod
    def read(cls, example: Layout, lengths: Lengths) -> SamplesByLength:
        """Read the lengths and the padding of an example.

        Raises:
            InvalidArgument: They cannot be read, or the lengths are others once the padding is trimmed.
        """
        values = read_lengths(lengths, example.batch, example.count)
        padding = find_padding(example, lengths, values)
        samples = cls(example, values, padding, max(padded_length(example, padding, values), 1))
        samples._check_trimmed(lengths)
        return samples

    def _check_trimmed(self, lengths: Lengths) -> None:
        """Refuse an example of which the longest, a middle or the shortest sample does not survive trimming."""
        ordered = SortedLayout.of(self.example, self.values, self.padding, (), lengths=lengths)
        last = ordered.count - 1
        alone = [(row, row + 1) for row in (0, last // 2, last)]
        ordered.check_trimmed({bounds: ordered.ask(ordered.take(*bounds)) for bounds in alone})

    def at(self, length: int) -> tuple[Layout, int]:
        """Samples that fill this length, cut to it, and how long they are: in lists as long as the batch has them."""
        if not self.padding.dims:
            length = max([value for value in self.values if value <= length], default=min(self.values))
            rows = [row for row, value in enumerate(self.values) if value == length]
        else:
            rows = [row for row, value in enumerate(self.values) if value >= length]
            rows = rows or [max(range(len(self.values)), key=self.values.__getitem__)]
        batch = gather(self.example, rows, self.padding, length)
        return Layout(batch, len(rows), self.example.lists), max(length, 1)

    def in_order(self) -> SortedLayout:
        """All samples, from the longest to the shortest, as steps take them: any few of them are of all lengths."""
        return SortedLayout.of(self.example, self.values, self.padding, ())

    def trim_parts(self, layout: Layout, lengths: Lengths) -> TrimmedLayout:
        """Samples of this example, of which each part is trimmed."""
        values = read_lengths(lengths, layout.batch, layout.count)
        return TrimmedLayout(layout.batch, layout.count, layout.lists, values=values, padding=self.padding)
