"""Chooses the number of samples in the next piece of ``map``, from the memory that earlier pieces took.

``map`` runs no trials. It keeps the results of every piece, and each piece shows more about the next.

- Memory grows convexly with the size, so a line through two pieces is seldom too flat beyond them.
- An allocator takes large segments from the device, so a small piece says little about its samples. The line is at
  least as steep as the one through the pieces' tensors.
- A sample takes no more than a longer one did, whether or not padding is trimmed. A longer sample takes at most the
  square of the ratio of the lengths (attention: ``aL + bL**2`` a sample). The longest samples come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

FIRST_SAMPLES = 2
"""Samples in the first piece. One sample is often another program."""

_FROM_ONE = 4  # times the first piece, until a second one gives a line
_FARTHEST = 16  # times the largest piece that ran: beyond that the curve may have bent up
_LEAST_SLOPE = 0.5  # of the average bytes a sample: at most half of a piece is the same for all sizes
_CLEAN_PIECES = 20  # before a size that failed is tried again, doubled each time it fails


class Piece(NamedTuple):
    """Measurements of one piece."""

    samples: int
    length: int  # of the longest; 1 if samples have no lengths
    growth_bytes: int  # peak less the bytes held before it, in memory of the allocator
    tensor_bytes: int | None = None  # the same in tensors; ``None`` if unknown

    @property
    def least_bytes(self) -> int:
        return self.growth_bytes if self.tensor_bytes is None else self.tensor_bytes


@dataclass(frozen=True)
class _LengthClass:
    """Measurements at lengths within a quarter of each other, and the wait after a size that ran out of memory."""

    pieces: tuple[Piece, ...] = ()  # the two most telling ones, the larger one last
    most: int = 0  # samples allowed during the wait
    wait: int = 0  # pieces; 0 before any failure
    left: int = 0  # of them still to come

    def after_piece(self, piece: Piece) -> _LengthClass:
        return replace(self, pieces=_remember(self.pieces, piece), left=max(self.left - 1, 0))

    def after_shortage(self, most: int) -> _LengthClass:
        wait = self.wait if self.left else 2 * self.wait or _CLEAN_PIECES
        return replace(self, most=most, wait=wait, left=wait)


@dataclass(frozen=True)
class PieceSizes:
    """The size of the next piece, and the measurements of earlier pieces. Every transition returns a new value."""

    most_samples: int | None = None  # that the user allows in a piece
    measures: bool = True  # whether the device reports bytes. If not, running out of memory is the only signal
    classes: Mapping[int, _LengthClass] = field(default_factory=dict)  # measurements by class of length
    thrashed: int = 0  # pieces in a row for which the allocator gave back its cache

    def next_samples(self, length: int, room_bytes: int, left: int | None = None) -> int:
        """Return the number of samples of the next piece, at least 1, whose longest sample has this length.

        It may take ``room_bytes`` beside those that are held. If known, the samples ``left`` are divided evenly.
        """
        own, found = _classify(length), [key for key, known in self.classes.items() if known.pieces]
        reach = FIRST_SAMPLES
        if found:  # at this length, or at the next longer one, or at the next shorter one
            nearest = min(found, key=lambda key: (key < own, abs(key - own)))
            reach = self._reach(self.classes[nearest].pieces, length, room_bytes)
        here = self._known_at(length)
        bounds = (reach, here.most if here.left else None, self.most_samples, left or None)
        samples = max(min(bound for bound in bounds if bound is not None), 1)
        return samples if not left else -(-left // -(-left // samples))

    def after_piece(self, piece: Piece, *, thrashed: bool = False) -> PieceSizes:
        """Learn from a finished piece; ``thrashed`` if the allocator had to give back its cache and ask again.

        One such piece may follow from the cache of other sizes. After two in a row the size is too large to be fast.
        """
        sizes = self._with_known(piece.length, self._known_at(piece.length).after_piece(piece))
        times = self.thrashed + 1 if thrashed else 0
        if times < 2 or piece.samples == 1:
            return replace(sizes, thrashed=times)
        return replace(sizes.shrink(piece.samples * 3 // 4, piece.length), thrashed=0)

    def after_shortage(self, samples: int, length: int) -> PieceSizes:
        if self.measures:
            return self.shrink(samples * 3 // 4, length)  # expectations are seldom wrong by more
        ran = max((piece.samples for piece in self._known_at(length).pieces if piece.samples < samples), default=0)
        return self.shrink((ran + samples) // 2, length)

    def shrink(self, most: int, length: int) -> PieceSizes:
        return self._with_known(length, self._known_at(length).after_shortage(max(most, 1)))

    def _reach(self, known: tuple[Piece, ...], length: int, room_bytes: int) -> int:
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

    def _known_at(self, length: int) -> _LengthClass:
        return self.classes.get(_classify(length), _LengthClass())

    def _with_known(self, length: int, known: _LengthClass) -> PieceSizes:
        return replace(self, classes={**self.classes, _classify(length): known})


def _classify(length: int) -> int:
    doublings = max(length.bit_length() - 3, 0)
    return 4 * doublings + (length >> doublings)


def _scale(piece: Piece, length: int) -> int:
    """Return the bytes of a piece with as many samples of another length. Shorter ones take as much."""
    if length <= piece.length:
        return piece.growth_bytes
    return -(-piece.growth_bytes * length * length // (piece.length * piece.length))


def _remember(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
    """Return the two most telling pieces: larger than all before, or with more bytes a sample."""
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
