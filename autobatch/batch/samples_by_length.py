"""Takes samples of any length out of an example batch, cut to that length.

Covers reading the lengths and the padding of an example, and refusing those that change when padding is trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autobatch.batch.layout import Layout
from autobatch.batch.lengths import Lengths, find_padding, padded_length, read_lengths
from autobatch.batch.trimming import SortedLayout, TrimmedLayout, gather
from autobatch.errors import InvalidBatch
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
            InvalidBatch: They cannot be read, or the lengths are others once the padding is trimmed.
        """
        values = read_lengths(lengths, example.batch, example.count)
        padding = find_padding(example, lengths, values)
        samples = cls(example, values, padding, max(padded_length(example, padding, values), 1))
        samples._check_trimmed(lengths)
        return samples

    def _check_trimmed(self, lengths: Lengths) -> None:
        """Refuse padding on the wrong side, and lengths that count positions of padding too."""
        ordered = SortedLayout.of(self.example, self.values, self.padding, ())
        last = ordered.count - 1
        for start, stop in ((0, 1), (last // 2, last // 2 + 1), (last, last + 1)):
            before = max(ordered.values[start], 1)
            [after] = read_lengths(lengths, ordered.take(start, stop), 1)
            if max(after, 1) != before:
                raise InvalidBatch(
                    f"lengths() gives {after} for a sample that it gave {before} for before its padding was trimmed on "
                    f"the {self.padding.side}: count what is no padding, or pass autobatch.Lengths(length_of, "
                    f"padding='left') where padding comes first"
                )

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

    def spread(self) -> Layout:
        """All samples, from the longest to the shortest, padded as they were: any few of them are of all lengths."""
        ordered = SortedLayout.of(self.example, self.values, self.padding, ())
        batch = gather(self.example, ordered.order, self.padding, self.longest)
        return Layout(batch, self.example.count, self.example.lists)

    def trim_parts(self, layout: Layout, lengths: Lengths) -> TrimmedLayout:
        """Samples of this example, of which each part is trimmed."""
        values = read_lengths(lengths, layout.batch, layout.count)
        return TrimmedLayout(layout.batch, layout.count, layout.lists, values=values, padding=self.padding)
