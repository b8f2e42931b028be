"""What ``fit`` may expect before its first trial.

Covers the largest size that a prediction says fits a limit of this process. Does not cover trials, which have the last
word: where nothing can be predicted, or not soon, there is no expectation, and they begin at two samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from autobatch.prediction.estimate import Estimate
from autobatch.prediction.isolation import run_apart
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.workload.batches import Layout
from autobatch.workload.step import Workload

__all__ = ["expect_largest"]

_WORKSPACE_BYTES = 4096 * 8 * 1024
"""Of one cuBLAS handle on the newest cards, the larger of what there is: an expectation may be too low."""
_MOST_SECONDS = 15.0
"""A trace that takes longer costs more than the trials that it spares."""
_FEW_SIZES = 4
_log = logging.getLogger("autobatch")


def expect_largest(workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int]) -> int:
    """The largest of these sizes that the allocator would hold within the limit; 0 where that cannot be predicted.

    Args:
        workload: The step, its model where it is.
        layout: An example batch.
        limit_bytes: What the process's allocator may hold.
        sizes: Ascending.
    """
    if len(sizes) <= _FEW_SIZES:
        return 0
    try:
        timeline = run_apart(lambda: trace_timeline(workload, layout, Circumstances()), _MOST_SECONDS)
        return _bisect(Estimate(timeline, _WORKSPACE_BYTES), limit_bytes, sizes)
    except Exception as error:  # noqa: BLE001 - trials need no expectation, so nothing about it may stop them
        _log.debug("autobatch: nothing is expected of the first trial: %s", error)
        return 0


def _bisect(estimate: Estimate, limit_bytes: int, sizes: Sequence[int]) -> int:
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if estimate.reserved(sizes[middle]) <= limit_bytes:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else 0
