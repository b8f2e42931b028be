"""Says what a CUDA process takes outside torch's allocator, from readings on cards (``contexts.csv``).

Covers which reading stands for a card and a version of CUDA. Of errors of torch a reading is what "this process has ...
in use" leaves without what torch allocated and reserved, and the most that their rounding to 0.01 GiB allows. It grows
with the threads that a card runs at once, whose local memory is set aside: from 158 MiB of a T4 to 760 MiB of an H100.
Does not cover CUDA before 11.7 nor ``CUDA_MODULE_LOADING=EAGER``, which load all kernels at once, nor NCCL's buffers.

Also reads the tables that are shipped beside the code, of which it is one.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import NamedTuple, TypeVar

from autobatch._bounds import Text
from autobatch.records import Record

__all__ = ["Chip", "Context", "Reading", "choose_context", "read_table"]

_MIB = 2**20
_Row = TypeVar("_Row", bound=Record)


def read_table(name: str, kind: type[_Row]) -> tuple[_Row, ...]:
    """The rows of a file whose first line names the fields; an empty cell is left out, so that the default holds."""
    text = files("autobatch.prediction").joinpath(name).read_text(encoding="utf-8")
    cells = csv.DictReader(text.splitlines())
    return tuple(kind.model_validate({key: cell for key, cell in row.items() if cell}) for row in cells)


class Chip(NamedTuple):
    """What a card's context depends on."""

    architecture: str
    multiprocessors: int
    resident_threads: int


class Context(NamedTuple):
    """Bytes outside the allocator, where the number was found, and whether on a card of this architecture."""

    byte_count: int
    source: str
    measured: bool


class Reading(Record):
    """One line of the table.

    Attributes:
        card: On which it was read.
        cuda: The major version of CUDA that torch was built with; empty where that is not known.
        mebibytes: What the process held beside torch's allocator.
        source: Where it was found.
    """

    card: Text
    cuda: Text = ""
    mebibytes: int
    source: Text


READINGS = read_table("contexts.csv", Reading)

_FITTED = Context(
    1711 * _MIB,
    "fitted to published peaks of training steps on a 40 GB card (make accuracy), with what that process took beside "
    "torch; 528 MiB were read on such cards",
    measured=False,
)
"""Of sm_80. The readings are lower, but it is with this that predictions were compared with peaks."""


def choose_context(chip: Chip, cuda: str | None, cards: dict[str, Chip]) -> Context:
    """The most that was read on cards of this architecture up to its size, or to the next larger one.

    Where none of them is as large: on cards of any architecture, by the threads that they run at once. For AMD's cards,
    and for one that has just a size: the most of all.

    Args:
        chip: Of the card that is asked for.
        cuda: The version that torch was built with, ``"13.0"``; readings with another major version do not count.
            ``None``: all count.
        cards: The chip of each card of the table of readings.
    """
    if chip.architecture == "sm_80":
        return _FITTED
    major = (cuda or "").partition(".")[0]
    readings = [reading for reading in READINGS if not major or reading.cuda in ("", major)]
    alike = [reading for reading in readings if cards[reading.card].architecture == chip.architecture]
    sizes = [cards[reading.card].multiprocessors for reading in alike]
    found = _most_up_to(chip.multiprocessors, alike, sizes)
    if found:
        return Context(found.mebibytes * _MIB, f"on {found.card}: {found.source}", measured=True)
    return _guess(chip, readings, alike, cards)


def _guess(chip: Chip, readings: list[Reading], alike: list[Reading], cards: dict[str, Chip]) -> Context:
    threads = [cards[reading.card].resident_threads for reading in readings]
    is_cuda = chip.architecture.startswith("sm_")  # what HIP takes, nobody has read
    nearby = _most_up_to(chip.resident_threads, readings, threads) if is_cuda else None
    found = max([nearby] if nearby else readings, key=lambda reading: reading.mebibytes)
    found = max([found, *alike], key=lambda reading: reading.mebibytes)
    source = f"none for such a card: the most that was read on any up to its size, on {found.card}: {found.source}"
    return Context(found.mebibytes * _MIB, source, measured=False)


def _most_up_to(size: int, readings: list[Reading], sizes: list[int]) -> Reading | None:
    """The largest of those on cards up to the smallest one of at least this size; ``None`` where none is as large."""
    bound = min((other for other in sizes if other >= size), default=None)
    if bound is None:
        return None
    up_to = [reading for reading, other in zip(readings, sizes, strict=True) if other <= bound]
    return max(up_to, key=lambda reading: reading.mebibytes)
