"""Finds the largest samples of a dataset and collates them into the batch that a plan must survive.

A sample's size is the number of tensor elements it has alone after the loader's own ``collate_fn``; ties are broken by
the characters of its strings. If lengths are known, they come first, and shorter samples are taken too. The samples are
then collated together, so that a collate function that pads gives the widest batch it can. No worker process starts.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, default_collate

from autobatch.batch.layout import Layout, describe
from autobatch.batch.lengths import ByLength
from autobatch.batch.registry import find_type
from autobatch.batch.rules import ListReading
from autobatch.batch.tree import count_elements, leaves_of
from autobatch.errors import InvalidArgument

_OUTWEIGHS: tuple[ListReading, ...] = ("unclear", "samples", "fields")
"""Where two batches of one loader are read differently, the later of these holds."""

_CLASSES_PER_HALF = 4
"""Of lengths: a sample that fills a shorter edge is then at most a fifth shorter than it."""

_MOST_SHORTER = 24
"""One of each class down to 1/64 of the longest: shorter edges are not tried."""


@dataclass(frozen=True)
class _Source:
    """A dataset, and the way in which a loader reads it."""

    dataset: Any
    collate: Callable[[Any], Any] = default_collate
    sampler: Any = None
    gives_batches: bool = False
    lengths: ByLength | None = None

    def collated(self, entries: Sequence[Any]) -> Any:
        """The batch that the loader would yield for these samples, or for this one whole batch."""
        return self.collate(entries[0]) if self.gives_batches else self.collate(list(entries))

    def described(self, entries: Sequence[Any]) -> Layout:
        """The batch of these samples, with its lists read by their known number where that is possible."""
        if self.gives_batches:
            return describe(self.collated(entries))
        # Made of one sample and of several: a list whose length does not follow their number holds fields.
        one, batch = self.collated(entries[:1]), self.collated(entries)
        several = batch if len(entries) > 1 else self.collated([entries[0], entries[0]])
        found = [_read_known(one, 1), _read_known(several, max(2, len(entries)))]
        if None in found:
            return describe(batch)
        read = [reading for lists in found if lists for reading in lists.items()]
        lists = dict(sorted(read, key=lambda reading: _OUTWEIGHS.index(reading[1])))
        return describe(batch, lists)

    def size(self, entry: Any) -> tuple[int, float, int]:
        """Return the rank of an entry: length, if it is known; elements (a sample, if it is a batch); characters."""
        batch = self.collated([entry])
        samples = describe(batch).count if self.gives_batches else 1
        length = 0 if self.lengths is None else max(self.lengths.read(batch, samples))
        characters = sum(len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, str))
        return length, count_elements(batch) / samples, characters

    def rank(
        self, entries: Iterable[Any], count: int, time_limit: float, *, adds_smallest: bool = False
    ) -> tuple[list[Any], int, bool]:
        """The largest entries, largest first; how many were looked at; and whether the smallest was added.

        If lengths are known, a half of them are shorter ones: the longest of each class of lengths. Else the
        smallest of all is added as the last, where it is smaller than the largest.
        """
        deadline, seen = time.monotonic() + time_limit, 0
        longest = dict[int, tuple[Any, Any]]()  # of each class
        smallest: tuple[Any, Any] | None = None

        def in_time() -> Iterator[tuple[Any, Any]]:
            nonlocal seen, smallest
            for entry in entries:
                seen += 1
                size = self.size(entry)
                if self.lengths is not None:
                    key = _class_of(size[0])
                    longest[key] = max(longest.get(key, (size, entry)), (size, entry), key=itemgetter(0))
                elif smallest is None or size < smallest[0]:
                    smallest = size, entry
                yield size, entry
                if time.monotonic() > deadline:
                    return

        largest = heapq.nlargest(1 if self.gives_batches else count, in_time(), key=itemgetter(0))
        if not largest:
            raise InvalidArgument(
                f"{type(self.dataset).__name__} gave no samples: pass a dataset that does, or a batch"
            )
        if longest and not self.gives_batches:
            largest = largest[: -(-count // 2)]
            shorter = sorted((longest[key] for key in longest if key < _class_of(largest[-1][0][0])), key=itemgetter(0))
            largest += shorter[: -_MOST_SHORTER - 1 : -1]
        is_added = adds_smallest and smallest is not None and smallest[0] < largest[0][0] and not self.gives_batches
        if is_added and smallest is not None:
            largest.append(smallest)
        return [entry for _, entry in largest], seen, is_added

    def keys(self) -> Sequence[Any]:
        """List the keys of a map-style dataset."""
        if isinstance(self.sampler, SubsetRandomSampler):
            return self.sampler.indices
        if self.gives_batches and isinstance(self.sampler, BatchSampler):
            return list(self.sampler)
        if isinstance(self.dataset, Mapping):
            return list(self.dataset)
        try:
            return range(len(self.dataset))
        except (TypeError, NotImplementedError) as error:
            name = type(self.dataset).__name__
            raise InvalidArgument(f"{name} has no length, so no samples can be chosen from it: pass a batch") from error


def _class_of(length: int) -> int:
    """Ascending with the length."""
    return round(_CLASSES_PER_HALF * math.log2(length)) if length else -1


def count_dataset(batch: Any) -> int:
    """Count the samples of a dataset, also in a loader; 0 for a stream and for a batch."""
    dataset = getattr(batch, "dataset", None) if isinstance(batch, DataLoader) else batch
    if not is_source(batch) or isinstance(dataset, IterableDataset):
        return 0
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0


def is_source(batch: Any) -> bool:
    """Whether it is a ``Dataset`` or ``DataLoader`` to draw samples from, and no batch.

    Other classes count as datasets if they have ``__getitems__``, as Hugging Face's ``datasets.Dataset`` does.
    """
    if find_type(batch) is not None or isinstance(batch, type):
        return False
    return isinstance(batch, Dataset | DataLoader) or hasattr(batch, "__getitems__")


def choose_samples(
    source: Any,
    count: int,
    lengths: ByLength | None = None,
    *,
    adds_smallest: bool = True,
    scan_limit: int = 2048,
    time_limit: float = 10.0,
) -> tuple[Layout, str | None, bool]:
    """Return the ``count`` largest samples, collated together, a note, and whether the smallest was added.

    With ``lengths`` they are the longest, half as many, and beside them samples of all shorter lengths that there are.
    Without them the smallest sample is the last one: it may have nothing to count, as an image without a box has.
    The note says what was read of a stream, or not looked at.

    A map-style dataset is looked at evenly: ``scan_limit`` samples, and none after ``time_limit`` seconds. A stream
    gives one batch, since training may not get what was read. A loader of whole batches (``batch_size=None``) gives the
    one with most elements a sample. Each sample is fetched once, so that a random one is the one that was measured.

    Raises:
        InvalidArgument: The dataset is empty or has no length.
    """
    opened = _Source(source, lengths=lengths)
    if isinstance(source, DataLoader):
        gives_batches = source.batch_sampler is None
        opened = _Source(source.dataset, source.collate_fn, source.sampler, gives_batches, lengths)
    if isinstance(opened.dataset, IterableDataset) or not hasattr(opened.dataset, "__getitem__"):
        one_batch = 1 if opened.gives_batches else getattr(source, "batch_size", None) or count
        stream = iter(opened.dataset)
        try:
            largest, *_ = opened.rank(itertools.islice(stream, one_batch), count, time_limit)
        finally:
            getattr(stream, "close", lambda: None)()
        was_read = (
            f"one batch of {type(opened.dataset).__name__} was read, and training does not get it if this stream goes "
            f"on where it was left; pass a batch to read none"
        )
        return opened.described(largest), was_read, False
    keys = opened.keys()
    chosen = (opened.dataset[keys[index]] for index in _spread(len(keys), scan_limit))
    largest, seen, is_added = opened.rank(chosen, count, time_limit, adds_smallest=adds_smallest)
    kind = "batches" if opened.gives_batches else "samples"
    looked_at = f"the largest was looked for among {seen} of the dataset's {len(keys)} {kind}"
    note = looked_at if seen < len(keys) else None
    if is_added:
        with suppress(Exception):  # of a collate function that does not pad: the largest may be of one size
            return opened.described(largest), note, True
        largest.pop()
    return opened.described(largest), note, False


def _read_known(batch: Any, samples: int) -> Mapping[str, ListReading] | None:
    """Return how its lists are read, if it has that many samples."""
    try:
        layout = describe(batch, samples=samples)
    except InvalidArgument:
        return None
    return layout.lists if layout.count == samples else None


def _spread(length: int, most: int) -> Iterator[int]:
    """At most ``most`` different indices, the two ends first, any first part of them spread evenly (van der Corput)."""
    bits = max(1, (length - 1).bit_length())
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    inside = (index for index in reversed_bits if 0 < index < length - 1)
    return itertools.islice(itertools.chain([0, length - 1][:length], inside), most)
