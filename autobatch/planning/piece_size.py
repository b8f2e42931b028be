"""Chooses how many samples the next piece of an inference has, from what the pieces before it took.

Covers the policy alone: measurements in, one size out. Nothing is tried for the sake of trying: every piece is work
that is kept, and each that ran says more about the next. Does not cover how a piece is run (``inference.piece``), nor
training, where every size is tried before it is used (``next_trial``).

Memory is taken to grow convexly with the size, so a straight line through two pieces is seldom too flat beyond them.
An allocator takes memory from the device in large segments, so what a small piece makes it take says little of its
samples: the line is as steep as that through the pieces' tensors, at least.
Where samples have lengths, a sample takes no more than a longer one did, whether memory follows the length (as it does
where padding is trimmed) or not; and of a longer one no more than the square of the ratio of the lengths (attention:
``aL + bL**2`` a sample). Samples come the longest first, so that each piece says much of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ["FIRST_SAMPLES", "Piece", "PieceSizes"]

FIRST_SAMPLES = 2
"""In the first piece, of which nothing is known; a single sample is often another program."""

_FROM_ONE = 4  # times the first piece, while there is no second one to draw a line through
_FARTHEST = 16  # times the largest piece that ran: beyond that the curve may have bent up
_LEAST_SLOPE = 0.5  # of the average bytes a unit: what is the same for all sizes may be as much as the rest, not more
_CLEAN_PIECES = 20  # before a size that failed is tried again; twice as many each time it fails


class Piece(NamedTuple):
    """What one piece took.

    Attributes:
        samples: How many it had.
        length: Of the longest of them; 1 where samples have no lengths.
        growth_bytes: Its peak less what was held before it, with what the allocator had to take for it.
        tensor_bytes: The same of its tensors alone; ``None``: not known apart.
    """

    samples: int
    length: int
    growth_bytes: int
    tensor_bytes: int | None = None

    @property
    def least_bytes(self) -> int:
        """What its tensors took."""
        return self.growth_bytes if self.tensor_bytes is None else self.tensor_bytes


@dataclass(frozen=True)
class _Ceiling:
    """A size that ran out of memory, and when it is tried again."""

    most: int  # samples that are allowed meanwhile
    wait: int = _CLEAN_PIECES
    left: int = _CLEAN_PIECES


@dataclass(frozen=True)
class _LengthClass:
    """What is known of samples whose lengths are within a quarter of each other."""

    pieces: tuple[Piece, ...] = ()  # the two that say most; the larger one last
    ceiling: _Ceiling | None = None

    def after_piece(self, piece: Piece) -> _LengthClass:
        """A piece is done, which brings a size that failed nearer."""
        ceiling = self.ceiling and replace(self.ceiling, left=self.ceiling.left - 1)
        return _LengthClass(_remember(self.pieces, piece), ceiling)

    def after_shortage(self, most: int) -> _LengthClass:
        """A size failed; one that fails again when it is tried waits twice as long."""
        wait = _CLEAN_PIECES
        if self.ceiling is not None:
            wait = self.ceiling.wait * (1 if self.ceiling.left > 0 else 2)
        return replace(self, ceiling=_Ceiling(most, wait, wait))

    @property
    def most(self) -> int | None:
        """The most samples that may be tried now."""
        return self.ceiling.most if self.ceiling and self.ceiling.left > 0 else None


@dataclass(frozen=True)
class PieceSizes:
    """The size of the next piece and what the pieces before it took.

    Every transition returns a new value.

    Attributes:
        most_samples: In a piece, as the user allows; ``None``: no limit.
        measures: Whether the device reports bytes; if not, running out of memory is the only signal.
        classes: What is known, by the class of the length.
        thrashed: Pieces in a row for which the allocator gave back its cache.
    """

    most_samples: int | None = None
    measures: bool = True
    classes: Mapping[int, _LengthClass] = field(default_factory=dict)
    thrashed: int = 0

    def next_samples(self, length: int, room_bytes: int, left: int | None = None) -> int:
        """How many samples the next piece has: at least 1.

        Args:
            length: Of the longest sample in it.
            room_bytes: What it may take on top of what is held.
            left: How many samples there still are, if that is known: they are divided evenly.
        """
        known = self._nearest(length)
        bounds = [FIRST_SAMPLES if known is None else self._reach(known, length, room_bytes)]
        bounds += [
            bound for bound in (self.known_at(length).most, self.most_samples, left or None) if bound is not None
        ]
        samples = max(min(bounds), 1)
        return samples if not left else -(-left // -(-left // samples))

    def after_piece(self, piece: Piece, *, thrashed: bool = False) -> PieceSizes:
        """A piece is done; ``thrashed`` where the allocator had to give back its cache and ask again.

        Once may be the cache of other sizes; twice in a row the piece is too large to be fast.
        """
        sizes = self.with_known(piece.length, self.known_at(piece.length).after_piece(piece))
        times = self.thrashed + 1 if thrashed else 0
        if times < 2 or piece.samples == 1:
            return replace(sizes, thrashed=times)
        return replace(_shrink(sizes, piece.samples * 3 // 4, piece.length), thrashed=0)

    def after_shortage(self, samples: int, length: int) -> PieceSizes:
        """Memory ended in a piece of more than one sample: the next is smaller.

        By a quarter, as what was expected was seldom wrong by more; where nothing is measured, half-way to the largest
        that ran.
        """
        if self.measures:
            return _shrink(self, samples * 3 // 4, length)
        ran = max((piece.samples for piece in self.known_at(length).pieces if piece.samples < samples), default=0)
        return _shrink(self, (ran + samples) // 2, length)

    def _reach(self, known: tuple[Piece, ...], length: int, room_bytes: int) -> int:
        """The most samples that are expected to fit, and are not far beyond what has run."""
        last = known[-1]
        if not self.measures:
            return 2 * last.samples
        peak = _scale(last, length)
        if peak <= 0:
            return _FARTHEST * last.samples
        if len(known) == 1:
            return min(_FROM_ONE * last.samples, room_bytes * last.samples // peak)
        average = peak / last.samples
        slope = average
        if known[0].length == last.length:
            rise = max(last.growth_bytes - known[0].growth_bytes, last.least_bytes - known[0].least_bytes)
            slope = max(rise / (last.samples - known[0].samples), _LEAST_SLOPE * average)
        return min(int(last.samples + (room_bytes - peak) / slope), _FARTHEST * last.samples)

    def known_at(self, length: int) -> _LengthClass:
        """What was measured at lengths like this one."""
        return self.classes.get(_classify(length), _LengthClass())

    def with_known(self, length: int, known: _LengthClass) -> PieceSizes:
        """The same with something else known of lengths like this one."""
        return replace(self, classes={**self.classes, _classify(length): known})

    def _nearest(self, length: int) -> tuple[Piece, ...] | None:
        """What was measured at this length or, failing that, at the next longer one, else the next shorter one."""
        own = _classify(length)
        found = [key for key, known in self.classes.items() if known.pieces]
        if not found:
            return None
        return self.classes[min(found, key=lambda key: (key < own, abs(key - own)))].pieces


def _shrink(sizes: PieceSizes, most: int, length: int) -> PieceSizes:
    return sizes.with_known(length, sizes.known_at(length).after_shortage(max(most, 1)))


def _classify(length: int) -> int:
    """A number that rises with the length: four classes from one power of two to the next."""
    doublings = max(length.bit_length() - 3, 0)
    return 4 * doublings + (length >> doublings)


def _scale(piece: Piece, length: int) -> int:
    """What a piece of as many samples may take if they are longer; shorter ones take no more."""
    if length <= piece.length:
        return piece.growth_bytes
    return -(-piece.growth_bytes * length * length // (piece.length * piece.length))


def _remember(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
    """The two pieces that say most: the last that were larger than all before, or took more a sample than those did."""
    if not pieces:
        return (piece,)
    last = pieces[-1]
    if piece.samples > last.samples:
        return (last, piece)
    if piece.growth_bytes * last.samples <= last.growth_bytes * piece.samples:
        return pieces
    if piece.growth_bytes < last.growth_bytes // 2:  # so small that what is the same for all sizes decides
        return pieces
    return (piece,) if piece.samples < last.samples else (*pieces[:-1], piece)
