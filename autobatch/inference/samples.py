"""Decides what the samples of a ``map`` are, and hands out the next ones that have not run.

- One batch, which is cut: a tensor, an array, a mapping, a tuple, a dataclass, an object of a registered type,
  ``batches.Fields``.
- Samples, which are collated: a list, a Dataset, an iterator, any other iterable; each entry is one sample.
- A ``DataLoader`` gives batches. Each of them is cut; they are not joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autobatch._formatting import name_type, plural, show_value
from autobatch._user_errors import add_note
from autobatch.batch.example import is_source
from autobatch.batch.lengths import ByLength, read_answer, sort_rows
from autobatch.batch.registry import Fields, find_type
from autobatch.batch.samples import Layout
from autobatch.batch.tree import copy_arrays, field_names, is_array, map_tensors, tensors_of, with_fresh_containers
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device

Collate = Callable[[list[Any]], Any]
Indices = range | list[int]
LengthsOf = Callable[[Any, int, int], list[int]]  # of a sample or a batch, the index of its first one, and their number
_WINDOW = 256  # samples of a stream that are sorted by length at once, at least
_PIECES_IN_WINDOW = 16  # and as many as this many pieces have: each is then of like lengths
_END = object()  # of the samples; StopIteration of the user's length_of() is an error


class BatchSamples:
    """The samples of one batch that have not run, the longest first if lengths are known."""

    def __init__(self, layout: Layout, lengths_of: LengthsOf | None = None, first: int = 0) -> None:
        """Sort them; ``first`` is the index of the batch's first sample among all."""
        self._layout, self._position, self._first = layout, 0, first
        self._lengths = None if lengths_of is None else lengths_of(layout.batch, first, layout.count)
        self._order: Indices = range(layout.count) if self._lengths is None else sort_rows(self._lengths)

    def head(self, piece: int) -> int | None:
        """Return the length of the next sample, 1 if it is not known; ``None`` where no sample is left."""
        if self._position >= self._layout.count:
            return None
        return 1 if self._lengths is None else self._lengths[self._order[self._position]]

    def left(self) -> int | None:
        """Return the number of samples left; ``None`` for sizes by length, which are not divided evenly."""
        return self._layout.count - self._position if self._lengths is None else None

    def ready(self, samples: int) -> Indices:
        """Return the indices of the next samples: as many as asked for, or those that are left."""
        rows = self._next(samples)
        is_range = isinstance(rows, range)
        return range(self._first + rows[0], self._first + rows[-1] + 1) if is_range else [self._first + r for r in rows]

    def batch(self, samples: int, device: Device) -> Any:
        """Return the next samples as a batch on the device; again after a shortage."""
        part = self._layout.part(self._next(samples))
        return with_fresh_containers(map_tensors(copy_arrays(part.batch), device.move_tensor))

    def drop(self, samples: int) -> None:
        self._position += samples

    def tensors(self, samples: int) -> Iterable[torch.Tensor]:
        """Return the user's own tensors, of which a piece may be views."""
        return self._layout.tensors()

    def _next(self, samples: int) -> Indices:
        return self._order[self._position : self._position + samples]


class SingleSamples:
    """Samples of an iterable, read when they are needed; with lengths a window of them, the longest first.

    Methods are those of ``BatchSamples``; ``head`` reads the next window, at least 16 times the last piece.
    """

    def __init__(self, samples: Iterator[Any], collate: Collate, lengths_of: LengthsOf | None) -> None:
        self._samples, self._collate, self._lengths_of = samples, collate, lengths_of
        self._read = 0
        self._buffer: deque[tuple[int, int, Any]] = deque()  # index, length, and the sample
        self._error: Exception | None = None

    def head(self, piece: int) -> int | None:
        if not self._buffer:
            self._fill(1 if self._lengths_of is None else max(_WINDOW, _PIECES_IN_WINDOW * piece))
            self._buffer = deque(sorted(self._buffer, key=lambda waiting: -waiting[1]))
        if not self._buffer and self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._buffer[0][1] if self._buffer else None

    def left(self) -> None:
        return None

    def ready(self, samples: int) -> Indices:
        if self._lengths_of is None:  # a window is never added to
            self._fill(samples)
        indices = [index for index, _, _ in islice(self._buffer, samples)]
        return indices if self._lengths_of is not None else range(indices[0], indices[-1] + 1)

    def batch(self, samples: int, device: Device) -> Any:
        values = [value for _, _, value in islice(self._buffer, samples)]
        if self._collate is not default_collate:  # which makes new tensors
            values = [copy_arrays(value) for value in values]
        return map_tensors(self._collate(values), device.move_tensor)

    def drop(self, samples: int) -> None:
        for _ in range(samples):
            self._buffer.popleft()

    def tensors(self, samples: int) -> Iterable[torch.Tensor]:
        return [tensor for _, _, value in islice(self._buffer, samples) for tensor in tensors_of(value)]

    def _fill(self, samples: int) -> None:
        """Read until so many wait. An error of the iterable waits too, until those before it have run."""
        while len(self._buffer) < samples and self._error is None:
            index = self._read
            try:
                value = next(self._samples, _END)
                if value is _END:
                    return
                length = 1 if self._lengths_of is None else self._lengths_of(value, index, 1)[0]
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the user's, and raised in its turn
                add_note(error, f"autobatch.map: raised where sample {index} is read")
                set_attributes(error, sample_index=index)
                self._error = error
                return
            self._read += 1
            self._buffer.append((index, length, value))


Waiting = BatchSamples | SingleSamples


def set_attributes(error: Exception, **values: Any) -> None:
    """Set what its class allows."""
    for name, value in values.items():
        try:
            setattr(error, name, value)
        except AttributeError:  # a class whose attributes cannot be set
            return


def are_samples(given: Any) -> bool:
    """Return whether each entry of it is a sample, or a loader's batch; else it is one batch."""
    if find_type(given) is not None or isinstance(given, Fields) or is_array(given):
        return False
    if is_source(given):
        return True
    is_batch = isinstance(given, torch.Tensor | Mapping | tuple | str | bytes | set | frozenset)
    return isinstance(given, Iterable) and not is_batch and field_names(given) is None


def count_samples(given: Any) -> int | None:
    """Count the samples, if their container knows it; a loader knows its batches only."""
    if isinstance(given, IterableDataset | DataLoader) or not hasattr(given, "__len__"):
        return None
    return len(given)


def iterate(given: Any) -> Iterator[Any]:
    """Return every sample of a list, Dataset or other iterable; a Dataset with a length is read by index."""
    if isinstance(given, IterableDataset | list) or not is_source(given) or isinstance(given, DataLoader):
        return iter(given)
    if not hasattr(given, "__len__"):
        raise InvalidArgument(f"{name_type(given)} has no length, so its samples cannot be read: pass an iterable")
    return (given[index] for index in range(len(given)))


def read_lengths(cut: Any, samples: int | None, *, of_each: bool) -> LengthsOf | None:
    """Return what was given as ``cut=`` of ``map``; ``of_each``: a function of each of ``samples``, not of a batch."""
    if cut is None:
        return None
    if not isinstance(cut, ByLength):
        raise InvalidArgument(f"cut={show_value(cut)}: map() takes autobatch.by_length(length_of), or None")
    if cut.dims is not None or cut.padding is not None:
        raise InvalidArgument("map() trims no padding: leave dims= and padding= out of by_length()")
    given: Any = cut.length_of
    if not callable(given):
        _check_list(given, samples)

    def lengths_of(value: Any, first: int, count: int) -> list[int]:
        if not callable(given):
            if first + count > len(given):
                raise InvalidArgument(
                    f"by_length() has {len(given)} lengths, and there is a sample {first + count - 1}: pass one int a "
                    f"sample, or a function"
                )
            answer: Any = [given[index] for index in range(first, first + count)]
        else:
            try:
                answer = [given(value)] if of_each else given(value)
            except StopIteration as error:  # next() of an empty iterator; a generator would end with it
                raise InvalidArgument(
                    f"length_of() raised StopIteration for sample {first}: return an int of at least 0"
                ) from error
        return [max(length, 1) for length in read_answer(answer, count)]

    return lengths_of


def _check_list(lengths: Any, samples: int | None) -> None:
    is_sequence = all(hasattr(lengths, name) for name in ("__len__", "__getitem__"))
    if not is_sequence or isinstance(lengths, Mapping | str | bytes) or getattr(lengths, "ndim", None) == 0:
        raise InvalidArgument(
            f"by_length({show_value(lengths)}): pass a function that returns a length, or one int a sample in a list"
        )
    if samples is not None and len(lengths) != samples:
        raise InvalidArgument(
            f"by_length() has {len(lengths)} lengths for {plural(samples, 'sample')}: pass one int a sample, or a "
            f"function"
        )
