"""Defines the events of ``map`` and their log lines: a piece that is done, one that ran out of memory, and the end."""

from __future__ import annotations

import logging
from typing import ClassVar

from autobatch._formatting import format_bytes, plural
from autobatch.events.event import Event


class PieceFinished(Event):
    """``map`` has the results of one piece.

    Attributes:
        samples: Number of samples in the piece.
        samples_done: Number of samples in all pieces so far.
        peak_bytes: Most bytes held on the device during the piece.
        budget_bytes: Bytes that the process may hold.
        seconds: Wall time of the piece.
    """

    samples: int
    samples_done: int
    peak_bytes: int
    budget_bytes: int
    seconds: float
    level: ClassVar[int] = logging.DEBUG  # the line at the end has the sums

    def __str__(self) -> str:
        peak = f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, " if self.peak_bytes else ""
        samples = plural(self.samples, "sample")
        return f"{self.source}map: {samples}, {self.samples_done} done, {peak}{self.seconds:.2f} s"


class PieceRetried(Event):
    """A piece ran out of memory; its samples are run again in smaller ones, a single one once more.

    Attributes:
        samples: Number of samples in the piece that did not fit.
        used_bytes: Bytes held on the device after the clean-up.
        budget_bytes: Bytes that the process may hold.
        reason: First line of the error.
    """

    samples: int
    used_bytes: int
    budget_bytes: int
    reason: str
    level: ClassVar[int] = logging.WARNING  # a retry costs time

    def __str__(self) -> str:
        again = "is run once more after the clean-up" if self.samples == 1 else "are run again in smaller pieces"
        return (
            f"{self.source}map ran out of memory at {plural(self.samples, 'sample')}, which {again}; "
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} held after clean-up; "
            f"{self.reason}"
        )


class MapFinished(Event):
    """``map`` ended, or its caller took no more results.

    Attributes:
        samples: Number of results.
        pieces: Number of pieces.
        smallest: Samples in the smallest piece.
        largest: Samples in the largest piece.
        shortages: Number of pieces that ran out of memory.
        peak_bytes: Most bytes held on the device during a piece.
        budget_bytes: Bytes that the process may hold.
        device: Name of the device.
        seconds: Wall time of all pieces.
    """

    samples: int
    pieces: int
    smallest: int
    largest: int
    shortages: int
    peak_bytes: int
    budget_bytes: int
    device: str
    seconds: float

    def __str__(self) -> str:
        sizes = f" of {self.smallest} to {self.largest}" if self.smallest < self.largest else f" of {self.largest}"
        pieces = plural(self.pieces, "piece") + (sizes if self.pieces else "")
        peak = f"; peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}" if self.peak_bytes else ""
        return (
            f"{self.source}map: {plural(self.samples, 'sample')} in {pieces} on {self.device}{peak}; "
            f"{self.shortages} out of memory, {self.seconds:.1f} s"
        )
