"""Which micro-batch sizes fit which card, from an estimate.

Covers the sizes worth asking for, and the most samples that fit with a margin, without one, and with the allocator
giving memory back. Does not cover the estimate. Nothing here imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autobatch.planning.planner import balance, useful_sizes
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.gpu_table import GPUS, Gpu
from autobatch.prediction.record import CardFit, Point, Reach

__all__ = ["Sizing"]

_MOST_POINTS = 24
_HANDLES = 2


@dataclass(frozen=True)
class Sizing:
    """How one estimated step fits cards.

    Attributes:
        estimate: Of the step, with the workspaces of the asked card.
        gpu: The asked card.
        target: Samples an optimizer step should see.
        margin: Fraction of the predicted peak to leave free.
    """

    estimate: Estimate
    gpu: Gpu
    target: int
    margin: float

    def points(self) -> tuple[Point, ...]:
        """Peaks at the useful sizes up to the target, thinned out where there are many, but for the largest that fits.

        Other cards are judged by these points alone: what fits them may be a little more than is said.
        """
        sizes = useful_sizes(self.target, self.target)
        limit, factor = self.gpu.total_bytes - self.gpu.context_bytes, 1 + self.margin
        fitting = bisect_right(sizes, limit, key=lambda size: round(self.estimate.reserved(size) * factor))
        chosen = {*_thin(sizes), *sizes[max(fitting - 1, 0) : fitting]}
        return tuple(
            Point(size=size, allocated=self.estimate.allocated(size), reserved=self.estimate.reserved(size))
            for size in sorted(chosen)
        )

    def largest(self, points: Sequence[Point]) -> int:
        """The most samples that fit the asked card with the margin; 0 where not even one."""
        return _largest(points, self.gpu, 1 + self.margin)

    def reach(self, points: Sequence[Point]) -> Reach:
        """The same without the margin, and with the allocator giving memory back."""
        limit = self.gpu.total_bytes - self.gpu.context_bytes
        comfortable = _largest(points, self.gpu, 1.0)
        above = [point.size for point in points if point.size > comfortable and point.allocated <= limit]
        tight = comfortable
        for size in above:  # few: what fits in tensors and not in segments
            if self.estimate.thresholds(size).tight > limit:
                break
            tight = size
        return Reach(comfortable=comfortable, tight=tight)

    def cards(self, points: Sequence[Point]) -> tuple[CardFit, ...]:
        """Every card that is known; workspaces of another size are added to the peaks, not simulated anew."""
        return tuple(self._fit(points, gpu) for gpu in GPUS)

    def _fit(self, points: Sequence[Point], gpu: Gpu) -> CardFit:
        more = _HANDLES * (gpu.cublas_workspace_bytes - self.gpu.cublas_workspace_bytes)
        moved = [point.model_copy(update={"reserved": max(point.reserved + more, 0)}) for point in points]
        size = _largest(moved, gpu, 1 + self.margin)
        peak = next((point.reserved for point in moved if point.size == size), 0)
        return CardFit(
            gpu=gpu.name,
            total_bytes=gpu.total_bytes,
            micro_batch_size=size,
            accumulation_steps=len(balance(self.target, size)) if size else 0,
            peak_bytes=peak + gpu.context_bytes if size else 0,
            measured=gpu.measured,
        )


def _largest(points: Sequence[Point], gpu: Gpu, factor: float) -> int:
    limit = gpu.total_bytes - gpu.context_bytes
    return max((point.size for point in points if point.reserved * factor <= limit), default=0)


def _thin(sizes: Sequence[int]) -> list[int]:
    """At most so many of them, evenly by ratio, always the first and the last."""
    if len(sizes) <= _MOST_POINTS:
        return list(sizes)
    step = (sizes[-1] / sizes[0]) ** (1 / (_MOST_POINTS - 1))
    wanted = (sizes[0] * step**index for index in range(_MOST_POINTS))
    return sorted({min(sizes, key=lambda size, goal=goal: abs(size - goal)) for goal in wanted} | {sizes[-1]})  # type: ignore[misc]
