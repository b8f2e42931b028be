"""Gives each sample the same random numbers in the whole batch and in every part of it, and others than its neighbours.

A draw is known by where in the code it is made and how often it was made there. What the whole batch draws there is
written down; a part gets the rows of its own samples out of it, as the shapes show: the dimension that has grown with
the number of samples holds them. Where a step draws in a loop over its samples, it is the number of calls that grows.

Covers draws of one row a sample, of several rows a sample (tokens, heads), of one number in each turn of a loop over
samples, and draws that are the same for all. Where neither shapes nor calls show which samples a draw is for, all its
numbers are alike, and what it shuffles is not seen. Does not cover how numbers become a distribution (``draws``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch

__all__ = ["Numbering", "Order"]

_ALIKE = 0.31
"""The one number of draws that are alike: half a deviation below the mean of a normal distribution, where a learned
scale still has a gradient, and below 1/2, where a coin shows heads."""

_NEAREST = 1e-6
"""How near to 0 and 1 a number comes: the logarithm of either is infinite."""

Order = Literal["", "alike", "rising", "falling"]
_Kind = Literal["once", "per sample", "alike"]
_Shape = tuple[int, ...]
_Site = tuple[int, ...]


class Numbering:
    """The draws of one step on one batch, whole and in parts.

    Attributes:
        samples: Of the whole batch; 0 before it has run.
        ordered: How draws are made that change no order, to see whether one explains a difference; ``""`` as usual.
        samples_last: Whether rows of several a sample are read as (rows, samples) instead of (samples, rows).
        flattened: Whether any draw has several rows a sample.
    """

    def __init__(self) -> None:
        """Nothing has been drawn."""
        self.samples = 0
        self.ordered: Order = ""
        self.samples_last = False
        self.flattened = False
        self._whole: dict[_Site, list[_Shape]] = {}
        self._kinds: dict[_Site, _Kind] = {}
        self._start, self._stop = 0, 0
        self._calls: Counter[_Site] = Counter()
        self._replays: dict[int, tuple[_Site, int]] = {}
        self._outer: frozenset[int] = frozenset()
        self._failed: set[_Site] = set()
        self._learnt = False

    @property
    def draws(self) -> bool:
        """Whether the step has drawn anything."""
        return bool(self._whole)

    def begin(self, start: int, stop: int, samples: int) -> None:
        """What is drawn from here on is for samples ``start`` to ``stop`` of so many. Called from inside the step."""
        self.end()
        self._start, self._stop, self.samples = start, stop, samples
        # Frames from here outwards are the same for the forward and the backward pass, and tell nothing.
        self._outer = frozenset(_outer_frames())
        if self._is_whole():
            self._whole = {}

    def end(self) -> None:
        """The piece is done: whether it drew as often as the whole did shows which draws are made in a loop."""
        if self._stop and not self._is_whole():
            for site, calls in self._calls.items():
                self._compare_calls(site, calls)
        self._calls.clear()
        self._replays.clear()
        self._failed.clear()
        self._stop = 0

    def take_learnt(self) -> bool:
        """Whether a draw has turned out to be of another kind, so that what was measured before is void; once."""
        learnt, self._learnt = self._learnt, False
        return learnt

    def uniform(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Numbers in (0, 1) for the draw that is being made; float64, but float32 on MPS, which knows no float64."""
        numbers = self._numbers(tuple(int(size) for size in shape))
        return numbers.to(device, torch.float32 if device.type == "mps" else torch.float64)

    def _numbers(self, shape: _Shape) -> torch.Tensor:
        site, call = self._identify()
        if self._stop and self._is_whole() and call == len(self._whole.setdefault(site, [])):
            self._whole[site].append(shape)
        kind = self._kinds.get(site, "once")
        if self.ordered:
            return _in_order(shape, self.ordered)
        if kind != "alike":
            order = call if kind == "once" else self._calls_a_sample(site) * self._start + call
            found = self._cut(site, order, shape)
            if found is not None:
                return found
            self._failed.add(site)
        return torch.full(shape, _ALIKE, dtype=torch.float64)

    def _identify(self) -> tuple[_Site, int]:
        """Which draw this is. A checkpoint's recomputation, which finds the generator as it was, makes the same one."""
        token = int(torch.randint(2**62, ()))
        known = self._replays.get(token)
        if known is None:
            site = tuple(_site(self._outer))
            known = self._replays[token] = (site, self._calls[site])
            self._calls[site] += 1
        return known

    def _cut(self, site: _Site, order: int, shape: _Shape) -> torch.Tensor | None:
        """This piece's part of what the whole draws there; ``None`` where it cannot be told."""
        if not self._stop or self._is_whole():
            return _random(shape, self._seed(site, order))
        shapes = self._whole.get(site, [])
        if order >= len(shapes) or len(shapes[order]) != len(shape):
            return None
        whole = shapes[order]
        numbers: torch.Tensor | None = _random(whole, self._seed(site, order))
        for dim, (size, full) in enumerate(zip(shape, whole, strict=True)):
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

    def _compare_calls(self, site: _Site, calls: int) -> None:
        known, length = len(self._whole.get(site, [])), self._stop - self._start
        loops = known % self.samples == 0 and calls * self.samples == known * length
        kind = self._kinds.get(site, "once")
        if kind == "once" and calls != known and loops:
            self._learn(site, "per sample")
        elif kind != "alike" and (site in self._failed or not (loops if kind == "per sample" else calls == known)):
            self._learn(site, "alike")

    def _calls_a_sample(self, site: _Site) -> int:
        return 0 if self._is_whole() else len(self._whole.get(site, [])) // self.samples

    def _learn(self, site: _Site, kind: _Kind) -> None:
        self._kinds[site] = kind
        self._learnt = True

    def _is_whole(self) -> bool:
        return self._stop - self._start == self.samples

    def _seed(self, site: _Site, order: int) -> int:
        # By the order of places, not by their addresses: a second process, and float64, shall see the same numbers.
        places = self._whole if site in self._whole else {**self._whole, site: []}
        return [*places].index(site) * 1_000_003 + order


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
        if bool(first[0] < first[1]):  # never in order: a shuffle of two samples shall be one
            numbers = 1 - numbers
    return numbers.clamp(_NEAREST, 1 - _NEAREST)


def _outer_frames() -> list[int]:
    frame: Any = sys._getframe(2)  # noqa: SLF001 - documented for its use
    found = []
    while frame is not None:
        found.append(id(frame))
        frame = frame.f_back
    return found


def _site(outer: frozenset[int]) -> list[int]:
    """Where in the code we are: the functions that are running and how far each has come, up to those of ours."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - documented for its use
    found = []
    while frame is not None and id(frame) not in outer:
        found += [id(frame.f_code), frame.f_lasti]
        frame = frame.f_back
    return found
