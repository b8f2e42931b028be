"""Reads the lengths of the samples of a ``map``, as its user gives them.

Covers functions of a sample, functions of a batch, and sequences with one length a sample. Does not cover what is done
with them (``samples``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autobatch._formatting import name_type, plural, show_value
from autobatch.batch.layout import Layout
from autobatch.errors import InvalidArgument

__all__ = ["Lengths", "check_lengths", "measure_all", "measure_length"]

Lengths = Callable[[Any], Any] | Sequence[int]
"""A function of a sample that gives an int, or of a batch that gives one int a sample; or one int a sample."""


def measure_length(lengths: Lengths, index: int, sample: Any) -> int:
    """The length of a single sample; raises InvalidArgument where there is none."""
    try:
        length = lengths(sample) if callable(lengths) else _look_up(lengths, index)
    except StopIteration as error:  # next() of an empty iterator; a generator would end with it
        raise InvalidArgument(
            f"lengths= raised StopIteration for sample {index}: return an int of at least 0"
        ) from error
    return _check_length(length, index)


def check_lengths(lengths: Any, samples: int | None) -> None:
    """Refuse what is no function and no sequence of one length a sample.

    Args:
        lengths: The argument of ``map``.
        samples: How many there are; ``None`` where that is not known.

    Raises:
        InvalidArgument: With what it is.
    """
    if lengths is None or callable(lengths):
        return
    is_sequence = all(hasattr(lengths, name) for name in ("__len__", "__getitem__"))
    if not is_sequence or isinstance(lengths, Mapping | str | bytes) or getattr(lengths, "ndim", None) == 0:
        raise InvalidArgument(
            f"lengths={show_value(lengths)} must be a function that returns a length, or one int a sample in a list"
        )
    if samples is not None and len(lengths) != samples:
        raise InvalidArgument(
            f"lengths= has {len(lengths)} entries for {plural(samples, 'sample')}: pass one int a sample, or a function"
        )


def measure_all(lengths: Lengths, layout: Layout, first: int) -> list[int]:
    """The lengths of a batch whose first sample has this index; raises InvalidArgument where they are not there."""
    if not callable(lengths):
        return [_check_length(_look_up(lengths, first + row), first + row) for row in range(layout.count)]
    given: Any = lengths(layout.batch)
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple) or len(listed) != layout.count:
        raise InvalidArgument(
            f"lengths= gave {name_type(given)} for a batch of {layout.count} samples: of one batch it returns one int "
            f'a sample, such as lambda batch: batch["attention_mask"].sum(1)'
        )
    return [_check_length(length, first + row) for row, length in enumerate(listed)]


def _look_up(lengths: Sequence[int], index: int) -> Any:
    try:
        return lengths[index]
    except IndexError:
        raise InvalidArgument(
            f"lengths= has {len(lengths)} entries, and there is a sample {index}: pass one int a sample, or a function"
        ) from None


def _check_length(length: Any, index: int) -> int:
    try:
        value = length.item() if hasattr(length, "item") else length
    except (RuntimeError, ValueError):  # of several numbers
        value = length
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"lengths= gave {show_value(value)} for sample {index}: a length is an int of at least 0")
    return max(value, 1)
