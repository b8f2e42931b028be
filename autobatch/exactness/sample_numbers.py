"""Gives a sample the same random numbers in the whole batch and in every part of it.

1. A draw is identified by its place in the code, and by how often that place has drawn before.
2. The whole batch draws first. The shapes of its draws are recorded.
3. A part makes the whole's draw again, from the same seed, and takes the rows of its own samples: the dimension that
   grows with the number of samples holds them.
4. A step may draw in a loop over its samples. Then a part takes the turns of its samples.
5. If neither shapes nor calls show the samples of a draw, all its numbers are equal, in the whole and in the parts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import CodeType
from typing import Any, Literal

import torch

Order = Literal["", "rising", "falling"]
Shape = tuple[int, ...]
Make = Callable[[Shape, int], torch.Tensor]
"""Draws numbers of a shape, from a seed."""

_Kind = Literal["once", "per sample", "alike"]
_Site = tuple[int, ...]


class SampleNumbers:
    """The random numbers of one step on one batch, whole and in parts.

    Attributes:
        samples: Number of samples of the whole batch; 0 before it has run.
        ordered: Order into which drawn rows are sorted, to see whether shuffling explains a difference; ``""``: none.
    """

    def __init__(self) -> None:
        """Begin with nothing drawn."""
        self.samples = 0
        self.ordered: Order = ""
        self._whole: dict[_Site, list[Shape]] = {}
        self._kinds: dict[_Site, _Kind] = {}
        self._rows: Sequence[int] = ()
        self._calls: Counter[_Site] = Counter()
        self._replays: dict[int, tuple[_Site, int]] = {}
        self._outer: dict[int, CodeType] = {}
        self._failed: set[_Site] = set()
        self._learned = False

    def is_used(self) -> bool:
        """Return whether the step has drawn anything."""
        return bool(self._whole)

    def begin(self, rows: Sequence[int], samples: int) -> None:
        """Draw for these of so many samples from here on; the step calls it."""
        self.end()
        self._rows, self.samples = rows, samples
        # Frames from here outwards are the same for all draws, so they do not identify one. With their code: some are
        # gone when a backward pass runs a part again, and a frame of that part may have the id of one of those.
        self._outer = {id(frame): frame.f_code for frame in running_frames()}
        if self._is_whole():
            self._whole = {}

    def end(self) -> None:
        """End a part, and learn from the number of its draws which of them are made in a loop."""
        if self._is_part():
            for site, calls in self._calls.items():
                kind = self._kinds.get(site, "once")
                self._kinds[site] = self._find_kind(site, calls, kind)
                self._learned = self._learned or self._kinds[site] != kind
        self._calls.clear()
        self._replays.clear()
        self._failed.clear()
        self._rows = ()

    def take_learned(self) -> bool:
        """Return once whether a draw is of another kind than was assumed, so that earlier measurements are void."""
        learned, self._learned = self._learned, False
        return learned

    def draw(self, shape: Sequence[int], make: Make) -> torch.Tensor:
        """Make a draw of this shape; ``make`` draws any shape from a seed."""
        site, call = self._identify()
        shape = tuple(int(size) for size in shape)
        if self._is_whole() and call == len(self._whole.setdefault(site, [])):
            self._whole[site].append(shape)
        seed = self._seed(site, order := self._order(site, call))
        if self.ordered and shape:
            return make(shape, seed).sort(0, descending=self.ordered == "falling").values
        if self._kinds.get(site) != "alike":
            if not self._is_part():
                return _unsorted(make(shape, seed))
            found = self._cut(self._whole.get(site, [])[order : order + 1], shape, lambda whole: make(whole, seed))
            if found is not None:
                return found
            self._failed.add(site)
        return make((1,) * len(shape), seed).expand(shape)

    def hold(self, draw: Callable[[int], tuple[Any, Shape]], free: Callable[[], Any]) -> Any:
        """Make a draw of another generator.

        Args:
            draw: Draws from a seed; returns the result and its shape.
            free: Draws as in training; used if neither calls nor shapes show the samples.
        """
        site, call = self._identify()
        if self._is_whole():
            self._whole.setdefault(site, [])
        order, shapes = self._order(site, call), self._whole.get(site, [])
        if self._kinds.get(site) != "alike" and not (self._is_part() and order >= len(shapes)):
            drawn, shape = draw(self._seed(site, order))
            if self._is_whole() and call == len(shapes):
                shapes.append(shape)
            if not self._is_part() or shape == shapes[order]:
                return drawn
        self._failed.add(site)
        return free()

    def _identify(self) -> tuple[_Site, int]:
        """Find the place of a draw. Activation checkpointing restores the generator, so it repeats the same draw."""
        token = int(torch.randint(2**62, ()))
        known = self._replays.get(token)
        if known is None:
            inner = takewhile(lambda frame: self._outer.get(id(frame)) is not frame.f_code, running_frames())
            site = tuple(part for frame in inner for part in (id(frame.f_code), frame.f_lasti))
            known = self._replays[token] = (site, self._calls[site])
            self._calls[site] += 1
        return known

    def _order(self, site: _Site, call: int) -> int:
        """Find the number of the draw among the whole's draws at the same place."""
        if self._kinds.get(site) != "per sample" or not self._is_part():
            return call
        each = max(1, len(self._whole.get(site, [])) // self.samples)
        turn, place = divmod(call, each)
        return self._rows[turn] * each + place if turn < len(self._rows) else sys.maxsize

    def _seed(self, site: _Site, order: int) -> int:
        """Number a draw by the order of places, not by their addresses: a second process gets the same seeds."""
        sites = self._whole if site in self._whole else {**self._whole, site: []}
        return ([*sites].index(site) * 1_000_003 + order) % 2**32

    def _cut(self, shapes: Sequence[Shape], shape: Shape, make: Callable[[Shape], torch.Tensor]) -> torch.Tensor | None:
        """Take this part's rows of the whole's draw; ``None`` if the shapes do not show them."""
        if not shapes or len(shapes[0]) != len(shape):
            return None
        differ = [dim for dim, sizes in enumerate(zip(shape, shapes[0], strict=True)) if sizes[0] != sizes[1]]
        if any((shape[dim], shapes[0][dim]) != (len(self._rows), self.samples) for dim in differ):
            return None
        numbers = _unsorted(make(shapes[0]))
        for dim in differ:
            numbers = numbers.index_select(dim, torch.tensor(self._rows, device=numbers.device))
        return numbers

    def _find_kind(self, site: _Site, calls: int, kind: _Kind) -> _Kind:
        """Find the kind of a draw that a part has made so often, where ``kind`` was assumed."""
        known, length = len(self._whole.get(site, [])), len(self._rows)
        loops = known % self.samples == 0 and calls * self.samples == known * length
        if kind == "once" and calls != known and loops:
            return "per sample"
        fits = loops if kind == "per sample" else calls == known
        return kind if fits and site not in self._failed else "alike"

    def _is_whole(self) -> bool:
        return 0 < len(self._rows) == self.samples

    def _is_part(self) -> bool:
        return 0 < len(self._rows) < self.samples


def _unsorted(numbers: torch.Tensor) -> torch.Tensor:
    """Turn rows that happen to be in order: samples must be shuffled where a step sorts by them."""
    if numbers.ndim == 0 or len(numbers) < 2 or numbers.numel() == 0:
        return numbers
    column = numbers.reshape(len(numbers), -1)[:, 0]
    return numbers.flip(0) if bool((column[1:] >= column[:-1]).all()) else numbers


def running_frames() -> list[Any]:
    """List the frames of the step, the innermost first, without those of modes, which not every run has."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - documented for its use
    found = []
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("autobatch.", "torch._ops")):
            found.append(frame)
        frame = frame.f_back
    return found
