"""Decides which micro-batch sizes fit which card, from an estimate.

Each answer is a size that fits while the next larger useful one does not, both simulated for that card.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autobatch.planning.division import least_size, useful_sizes
from autobatch.prediction.cards import COMMON, GPUS, Gpu
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prediction import CardFit, Point, Reach
from autobatch.prediction.workspaces import Workspaces

_MOST_POINTS = 24


def find_limit(gpu: Gpu, margin: float) -> int:
    """Bytes that the allocator may hold, besides the margin and CUDA's own; 0 or less if not even that fits."""
    return int(gpu.total_bytes / (1 + margin)) - gpu.context_bytes


@dataclass(frozen=True)
class Sizing:
    """How one estimated step fits cards."""

    estimate: Estimate  # with the workspaces of the asked card
    gpu: Gpu
    target: int  # samples of an optimizer step
    margin: float  # fraction of the predicted peak of the process to leave free
    smallest: int = 1  # the fewest samples that the model can run

    @cached_property
    def largest(self) -> int:
        """The most samples that fit the asked card with the margin; 0 if none do."""
        return self._find_largest(self.margin)

    @cached_property
    def reach(self) -> Reach:
        """The most samples without the margin, and if the allocator gives memory back."""
        limit = find_limit(self.gpu, 0)
        tight = _bisect(self._sizes, lambda size: self.estimate.runs_within(size, limit))
        return Reach(comfortable=self._find_largest(0), tight=tight)

    def points(self) -> tuple[Point, ...]:
        answers = {self.largest, self.reach.comfortable, self.reach.tight} - {0}
        return tuple(
            Point(size=size, allocated=self.estimate.allocated(size), reserved=self.estimate.reserved(size))
            for size in sorted({*_thin(self._sizes), *answers})
        )

    def cards(self, *, every: bool = False) -> tuple[CardFit, ...]:
        """Fit the common cards and the asked one, or all cards."""
        own, estimates, fits = self.estimate.workspaces, dict[object, Estimate](), []
        for gpu in GPUS:
            if not (every or gpu.name in COMMON or gpu.name == self.gpu.name):
                continue
            # cuDNN's answers for the asked card, the rule for the others: fifty questions each would take long.
            is_same = (gpu.architecture, gpu.multiprocessors) == (own.architecture, own.multiprocessors)
            workspaces = own if is_same else Workspaces(gpu.architecture, gpu.multiprocessors)
            kind = gpu.cublas_workspace_bytes, gpu.resident_threads, gpu.architecture
            estimate = estimates.setdefault(kind, self.estimate.on_card(gpu, workspaces))
            size = replace(self, estimate=estimate, gpu=gpu).largest
            fits.append(
                CardFit(
                    gpu=gpu.name,
                    total_bytes=gpu.total_bytes,
                    micro_batch_size=size,
                    accumulation_steps=-(-self.target // size) if size else 0,
                    peak_bytes=estimate.reserved(size) + gpu.context_bytes if size else 0,
                    measured=gpu.measured,
                )
            )
        return tuple(fits)

    def settled(self) -> Sizing:
        def judge(estimate: Estimate) -> set[int]:
            sizing = replace(self, estimate=estimate)
            return {sizing.judged, sizing.reach.comfortable, sizing.reach.tight} - {0}

        return replace(self, estimate=self.estimate.settle(judge))

    @property
    def judged(self) -> int:
        return self.largest or self.least

    @property
    def bound(self) -> int:
        """The largest size that is judged: the target, or the largest traced size if interpolated."""
        return min(self.target, self.estimate.largest_traced or self.target)

    @property
    def least(self) -> int:
        """The least size that leaves no micro-batch smaller than ``smallest``."""
        return least_size(self.target, self.smallest)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        sizes = useful_sizes(self.target, self.bound)
        return tuple(size for size in sizes if size >= self.least) or sizes[-1:]

    def _find_largest(self, margin: float) -> int:
        limit = find_limit(self.gpu, margin)
        return _bisect(self._sizes, lambda size: self.estimate.fits_within(size, limit))


def _bisect(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest size that fits, 0 if none does.

    All searches ask about the same sizes in the same order. So a higher limit never ends lower, even if the allocator
    takes less for a larger size.
    """
    if fits(sizes[-1]):
        return sizes[-1]
    index = bisect_left(sizes, True, hi=len(sizes) - 1, key=lambda size: not fits(size))
    return sizes[index - 1] if index else 0


def _thin(sizes: Sequence[int]) -> Sequence[int]:
    """At most ``_MOST_POINTS`` sizes, evenly by ratio, with the first and the last."""
    if len(sizes) <= _MOST_POINTS:
        return sizes
    step = (sizes[-1] / sizes[0]) ** (1 / (_MOST_POINTS - 1))
    wanted = [sizes[0] * step**index for index in range(_MOST_POINTS - 1)]
    return [*{min(sizes, key=lambda size: abs(size - want)) for want in wanted}, sizes[-1]]
