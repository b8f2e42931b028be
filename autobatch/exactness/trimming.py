"""Asks whether trimming padding is exact: a few samples padded together against each trimmed to its own length.

Covers the comparison and its cause. Does not cover splitting without trimming (``verification``), which goes first:
what differs here and not there comes from the padding.
"""

from __future__ import annotations

import time

from autobatch.batch.lengths import Lengths
from autobatch.batch.samples_by_length import SamplesByLength
from autobatch.exactness.compare_split import SplitComparison
from autobatch.memory.device import Device
from autobatch.records import Verdict
from autobatch.step.workload import Workload

__all__ = ["check_trimming"]

_MOST_SAMPLES = 8
"""Each is run by itself: of lengths from the longest to the shortest. Half as many where memory ends."""

_FEWEST_SAMPLES = 2
"""The longest, and a shorter one."""

_CAUSE = (
    "trimming padding changes the gradient: the step looks at padding. A mean over all positions instead of those that "
    "count (ignore_index=, a mask, weigh=), a layer that mixes positions without a mask (attention, convolution, a "
    "recurrent layer that runs backwards, pooling), positions that are counted from the padded end, BatchNorm over "
    "positions, or noise that is drawn for each position: leave padding out of it, or plan without lengths="
)


def check_trimming(
    verdict: Verdict, workload: Workload, samples: SamplesByLength, lengths: Lengths, device: Device
) -> Verdict:
    """The verdict of a split that is exact, or that trimming makes inexact.

    Args:
        verdict: Without trimming; exact.
        workload: What is run, in the mode in which its model is.
        samples: Samples of the example, by length.
        lengths: How long samples are.
        device: Where, inside the limit that holds for the comparison.
    """
    if not samples.padding.dims:
        return verdict
    started, layout = time.perf_counter(), samples.in_order()
    comparison = SplitComparison(
        workload, layout, device, 0, after_trials=True, trim=lambda few: samples.trim_parts(few, lengths)
    )
    found, ended, count = None, "", min(layout.count, _MOST_SAMPLES)
    while found is None and count >= _FEWEST_SAMPLES:
        found, ended = comparison.attempt(count, ((1,) * count,))
        device.reclaim()  # only now, after the ``except`` block, are a failed attempt's frames gone
        count //= 2
    seconds = verdict.seconds + time.perf_counter() - started
    if found is None or found.unchecked:
        reason = f"trimming padding could not be checked: {ended if found is None else found.unchecked}"
        return verdict.model_copy(update={"exact": False, "unchecked": reason, "seconds": seconds})
    if not found.exact:
        return found.model_copy(update={"causes": (_CAUSE,), "seconds": seconds})
    error = max(verdict.relative_error, found.relative_error)
    return verdict.model_copy(update={"relative_error": error, "seconds": seconds})
