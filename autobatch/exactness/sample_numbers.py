"""Gives a sample the same random numbers in the whole batch and in every part of it.

1. A draw is identified by its place in the code, and by how often that place has drawn before.
2. The whole batch draws first. What torch draws is kept; other generators are seeded for each draw.
3. A part takes the rows of its own samples from the whole's draw: the dimension that grows with the number of samples
   holds them.
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

_Kind = Literal["once", "per sample", "alike"]
_Site = tuple[int, ...]


class SampleNumbers:
    """The random numbers of one step on one batch, whole and in parts."""

    def __init__(self) -> None:
        self._samples = 0  # of the whole batch
        self._whole: dict[_Site, list[Any]] = {}  # numbers that torch drew, shapes of other draws
        self._kinds: dict[_Site, _Kind] = {}
        self._rows: Sequence[int] = ()
        self._calls: Counter[_Site] = Counter()
        self._replays: dict[int, tuple[_Site, int]] = {}
        self._outer: dict[int, CodeType] = {}
        self._failed: set[_Site] = set()
        self._learned = False

    def begin(self, rows: Sequence[int], samples: int) -> None:
        """Draw for these of so many samples from here on; the step calls it."""
        self.end()
        if samples != self._samples:
            self._whole = {}
        self._rows, self._samples = rows, samples
        # Frames from here outwards are the same for all draws, so they do not identify one. With their code: some are
        # gone when a backward pass runs a part again, and a frame of that part may have the id of one of those.
        self._outer = {id(frame): frame.f_code for frame in running_frames()}

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

    def draw(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the samples that run, for a tensor that an operator of torch has drawn."""
        site, call = self._identify()
        order, known = self._order(site, call), self._whole.setdefault(site, [])
        if not self._is_part() and (order >= len(known) or known[order].shape != drawn.shape):
            known[order : order + 1] = [_unsorted(drawn).to("cpu", copy=True)]
        if order >= len(known):
            self._failed.add(site)
            return drawn
        whole = known[order].to(drawn.device)
        if self._kinds.get(site) != "alike":
            if (found := self._cut(whole, drawn.shape)) is not None:
                return found
            self._failed.add(site)
        return whole.reshape(-1)[:1].expand(drawn.shape) if whole.numel() else drawn

    def hold(self, draw: Callable[[int], tuple[Any, tuple[int, ...]]], free: Callable[[], Any]) -> Any:
        """Make a draw of another generator: by ``draw`` from a seed, which also returns the shape.

        If neither calls nor shapes show the samples, ``free`` draws as in training.
        """
        site, call = self._identify()
        order, shapes = self._order(site, call), self._whole.setdefault(site, [])
        if self._kinds.get(site) != "alike" and not (self._is_part() and order >= len(shapes)):
            # Numbered by the order of places, not by their addresses: a second process gets the same seeds.
            drawn, shape = draw(([*self._whole].index(site) * 1_000_003 + order) % 2**32)
            if len(self._rows) == self._samples and call == len(shapes):
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
        each = max(1, len(self._whole.get(site, [])) // self._samples)
        turn, place = divmod(call, each)
        return self._rows[turn] * each + place if turn < len(self._rows) else sys.maxsize

    def _cut(self, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Take the rows of the samples that run; ``None`` if the shapes do not show them."""
        if whole.ndim != len(shape):
            return None
        for dim in range(len(shape)):
            if shape[dim] != whole.shape[dim]:
                if (shape[dim], whole.shape[dim]) != (len(self._rows), self._samples):
                    return None
                whole = whole.index_select(dim, torch.tensor(self._rows, device=whole.device))
        return whole

    def _find_kind(self, site: _Site, calls: int, kind: _Kind) -> _Kind:
        """Find the kind of a draw that a part has made so often, where ``kind`` was assumed."""
        known, length = len(self._whole.get(site, [])), len(self._rows)
        loops = known % self._samples == 0 and calls * self._samples == known * length
        if kind == "once" and calls != known and loops:
            return "per sample"
        fits = loops if kind == "per sample" else calls == known
        return kind if fits and site not in self._failed else "alike"

    def _is_part(self) -> bool:
        return 0 < len(self._rows) < self._samples


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
