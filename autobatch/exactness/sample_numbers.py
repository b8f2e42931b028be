"""Generates uniform random numbers that are the same for a sample in the whole batch and in every part of it.

A draw is identified by where in the code it is made and how often it was made there. The shapes that the whole batch
draws are recorded; a part gets the rows of its own samples: the dimension that has grown with the number of samples
holds them. Where a step draws in a loop over its samples, the number of calls grows instead. Covers draws of one row or
several rows a sample (tokens, heads), of one number in each turn of such a loop, and draws that are shared by all
samples. Where neither shapes nor calls show which samples a draw is for, all its numbers are equal, so what it shuffles
is not found. Other generators than torch's draw as in training there. How numbers become a distribution:
``per_sample_random``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import CodeType
from typing import Any, Literal

import torch

__all__ = ["Order", "SampleNumbers"]

_ALIKE = 0.31
"""The number that is drawn where all are alike: half a deviation below the mean of a normal distribution, where a
learned scale still has a gradient, and below 1/2, where a coin shows heads."""

_NEAREST = 1e-6
"""How close to 0 and 1 a number may be: the logarithm of either is infinite."""

Order = Literal["", "alike", "rising", "falling"]
_Kind = Literal["once", "per sample", "alike"]
_Shape = tuple[int, ...]
_Site = tuple[int, ...]


class SampleNumbers:
    """The random numbers of one step on one batch, whole and in parts.

    Attributes:
        samples: Of the whole batch; 0 before it has run.
        ordered: Replaces random numbers by ones that keep samples in order, to see whether shuffling explains a
            difference; ``""`` for random ones.
        samples_last: Whether several rows a sample are in the order (rows, samples) instead of (samples, rows).
        flattened: Whether any draw has several rows a sample.
    """

    def __init__(self) -> None:
        """Begin with nothing drawn."""
        self.samples = 0
        self.ordered: Order = ""
        self.samples_last = False
        self.flattened = False
        self._whole: dict[_Site, list[_Shape]] = {}
        self._kinds: dict[_Site, _Kind] = {}
        self._start, self._stop = 0, 0
        self._calls: Counter[_Site] = Counter()
        self._replays: dict[int, tuple[_Site, int]] = {}
        self._outer: dict[int, CodeType] = {}
        self._failed: set[_Site] = set()
        self._learned = False

    def is_used(self) -> bool:
        """Whether the step has drawn anything."""
        return bool(self._whole)

    def begin(self, start: int, stop: int, samples: int) -> None:
        """Draw for samples ``start`` to ``stop`` of so many from here on; called from inside the step."""
        self.end()
        self._start, self._stop, self.samples = start, stop, samples
        # Frames from here outwards are the same for all draws, so they do not identify one. With their code: some are
        # gone when a backward pass runs a part again, and a frame of that part may have got the id of one of those.
        self._outer = {id(frame): frame.f_code for frame in _frames()}
        if self._is_whole():
            self._whole = {}

    def end(self) -> None:
        """End the part: whether it drew as often as the whole did shows which draws are made in a loop."""
        if self._stop and not self._is_whole():
            for site, calls in self._calls.items():
                kind = self._kinds.get(site, "once")
                self._kinds[site] = self._find_kind(site, calls, kind)
                self._learned = self._learned or self._kinds[site] != kind
        self._calls.clear()
        self._replays.clear()
        self._failed.clear()
        self._stop = 0

    def take_learned(self) -> bool:
        """Whether a draw has turned out to be of another kind, so that earlier measurements are void; once."""
        learned, self._learned = self._learned, False
        return learned

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Numbers in (0, 1) for the draw that is being made; float64, but float32 on MPS, which has no float64."""
        numbers = self._numbers(tuple(int(size) for size in shape))
        return numbers.to(device, torch.float32 if device.type == "mps" else torch.float64)

    def hold(self, draw: Callable[[int], tuple[Any, _Shape]], free: Callable[[], Any]) -> Any:
        """What another generator draws: the same for a sample wherever it is.

        Args:
            draw: Returns what is drawn with a seed, and its shape.
            free: Draws as in training, where neither calls nor shapes show which samples a draw is for.
        """
        site, call = self._identify()
        if self._stop and self._is_whole():
            self._whole.setdefault(site, [])
        order, shapes = self._order(site, call), self._whole.get(site, [])
        is_part = self._stop > 0 and not self._is_whole()
        if self._kinds.get(site) != "alike" and not (is_part and order >= len(shapes)):
            drawn, shape = draw(self._seed(site, order) % 2**32)
            if not is_part and call == len(shapes) and self._stop:
                shapes.append(shape)
            if not is_part or shape == shapes[order]:
                return drawn
        self._failed.add(site)
        return free()

    def _numbers(self, shape: _Shape) -> torch.Tensor:
        site, call = self._identify()
        if self._stop and self._is_whole() and call == len(self._whole.setdefault(site, [])):
            self._whole[site].append(shape)
        if self.ordered:
            return _in_order(shape, self.ordered)
        kind = self._kinds.get(site, "once")
        if kind != "alike":
            found = self._cut(site, self._order(site, call), shape)
            if found is not None:
                return found
            self._failed.add(site)
        return torch.full(shape, _ALIKE, dtype=torch.float64)

    def _identify(self) -> tuple[_Site, int]:
        """Which draw this is. Activation checkpointing restores the generator, so it makes the same one again."""
        token = int(torch.randint(2**62, ()))
        known = self._replays.get(token)
        if known is None:
            inner = takewhile(lambda frame: self._outer.get(id(frame)) is not frame.f_code, _frames())
            site = tuple(part for frame in inner for part in (id(frame.f_code), frame.f_lasti))
            known = self._replays[token] = (site, self._calls[site])
            self._calls[site] += 1
        return known

    def _order(self, site: _Site, call: int) -> int:
        """Which of the whole's draws there it is."""
        if self._kinds.get(site) != "per sample" or self._is_whole():
            return call
        return len(self._whole.get(site, [])) // self.samples * self._start + call

    def _seed(self, site: _Site, order: int) -> int:
        """By the order of sites, not by their addresses: a second process, and float64, get the same numbers."""
        sites = self._whole if site in self._whole else {**self._whole, site: []}
        return [*sites].index(site) * 1_000_003 + order

    def _cut(self, site: _Site, order: int, shape: _Shape) -> torch.Tensor | None:
        """This part's rows of what the whole draws there; ``None`` where the shapes do not show them."""
        seed = self._seed(site, order)
        if not self._stop or self._is_whole():
            return _random(shape, seed)
        shapes = self._whole.get(site, [])
        if order >= len(shapes) or len(shapes[order]) != len(shape):
            return None
        numbers: torch.Tensor | None = _random(shapes[order], seed)
        for dim, (size, full) in enumerate(zip(shape, shapes[order], strict=True)):
            if numbers is not None and size != full:
                numbers = self._take(numbers, dim, size, full)
        return numbers

    def _take(self, numbers: torch.Tensor, dim: int, size: int, full: int) -> torch.Tensor | None:
        length, (rows, rest) = self._stop - self._start, divmod(full, self.samples)
        if rest or size != rows * length:
            return None
        self.flattened = self.flattened or rows > 1
        if self.samples_last and rows > 1:
            by_row: torch.Tensor = numbers.unflatten(dim, (rows, -1))
            return by_row.narrow(dim + 1, self._start, length).flatten(dim, dim + 1)
        return numbers.narrow(dim, self._start * rows, size)

    def _find_kind(self, site: _Site, calls: int, kind: _Kind) -> _Kind:
        """What kind a draw is that a part made so often, where it was of that kind before."""
        known, length = len(self._whole.get(site, [])), self._stop - self._start
        loops = known % self.samples == 0 and calls * self.samples == known * length
        if kind == "once" and calls != known and loops:
            return "per sample"
        fits = loops if kind == "per sample" else calls == known
        return kind if fits and site not in self._failed else "alike"

    def _is_whole(self) -> bool:
        return self._stop - self._start == self.samples


def _in_order(shape: _Shape, order: Order) -> torch.Tensor:
    if order == "alike" or not shape:
        return torch.full(shape, _ALIKE, dtype=torch.float64)
    rows = (torch.arange(shape[0], dtype=torch.float64) + 0.5) / shape[0]
    rows = rows if order == "rising" else rows.flip(0)
    return rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)


def _random(shape: _Shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64)
    if len(shape) and shape[0] > 1 and numbers.numel():
        first = numbers.reshape(shape[0], -1)[:2, 0]
        if bool(first[0] < first[1]):  # never in order: two samples must be shuffled too
            numbers = 1 - numbers
    return numbers.clamp(_NEAREST, 1 - _NEAREST)


def _frames() -> list[Any]:
    """The running frames, from the caller's caller outwards."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - documented for its use
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
