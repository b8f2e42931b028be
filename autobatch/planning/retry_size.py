"""Chooses the next size after an out-of-memory error in a training step.

Does not cover when a size that failed is tried again (``pacing``), what is restored and run again (``training``), nor
the pieces of ``map`` (``piece_size``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve

__all__ = ["choose_retry_size", "shrink"]


def choose_retry_size(
    failed: int, sizes: Sequence[int], curve: MemoryCurve | None, limit_bytes: int | None, proven: int | None = None
) -> int:
    """The next size to run, always smaller than the one that failed.

    Args:
        failed: Samples in the micro-batch that did not fit.
        sizes: To choose from, ascending; the first is smaller than ``failed``.
        curve: What a size needs; ``None`` where it is not known, or was wrong twice in this step.
        limit_bytes: What the step may hold now, with what is resident; ``None`` where that is not known.
        proven: A size that ran before ``failed`` was tried, which is good enough.
    """
    wanted = shrink(failed, curve, limit_bytes) if proven is None else proven
    return sizes[max(bisect_right(sizes, min(wanted, failed - 1)) - 1, 0)]


def shrink(failed: int, curve: MemoryCurve | None, limit_bytes: int | None) -> int:
    """About how many samples to try next: at least 1, always fewer than failed.

    What the curve says fits is tried first. Where the curve says that the failed size fits, it is wrong today (longer
    sequences, another tenant, fragmentation), but it was right on an earlier day: so only a quarter is given up.
    Without a curve or a limit, half.
    """
    if failed < 2:
        raise InvalidArgument(f"a micro-batch of {failed} cannot be made smaller")
    if curve is None or limit_bytes is None:
        return failed // 2
    fitting = curve.largest(limit_bytes)
    return failed * 3 // 4 if fitting >= failed else max(fitting, 1)
