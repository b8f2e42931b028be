"""What ``fit`` may expect before its first trial.

Covers the largest size that a prediction says fits a limit of this process. Does not cover trials, which have the last
word: where nothing can be predicted, there is no expectation, and they begin at two samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from autobatch.errors import CannotPredict
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.isolation import run_apart
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.workload.batches import Layout
from autobatch.workload.step import Workload

__all__ = ["expect_largest"]

_WORKSPACE_BYTES = 4096 * 8 * 1024
"""Of one cuBLAS handle on the newest cards, the larger of what there is: an expectation may be too low."""
_log = logging.getLogger("autobatch")


def expect_largest(workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int]) -> int:
    """The largest of these sizes that the allocator would hold within the limit; 0 where that cannot be predicted.

    Args:
        workload: The step, its model where it is.
        layout: An example batch.
        limit_bytes: What the process's allocator may hold.
        sizes: Ascending.
    """
    try:
        timeline = run_apart(lambda: trace_timeline(workload, layout, Circumstances()))
    except CannotPredict as error:
        _log.debug("autobatch: nothing is expected of the first trial: %s", error)
        return 0
    estimate = Estimate(timeline, _WORKSPACE_BYTES)
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if estimate.reserved(sizes[middle]) <= limit_bytes:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else 0
