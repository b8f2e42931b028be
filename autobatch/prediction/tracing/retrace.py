"""Whether a timeline holds at one more size: the one that a prediction is about.

Covers the trace there, what becomes of a timeline that says another thing, and whether one sample can be run. Does not
cover which size that is (``proof``).

Three sizes on one line are no proof for a fourth: a step that pads its samples to a multiple of 128 takes the same at
2, 3 and 67. Of a step that holds at the size in question one optimizer step is traced, since the second one makes what
the first one makes.
"""

from __future__ import annotations

from dataclasses import replace

from autobatch.batch.layout import Layout
from autobatch.errors import CannotPredict
from autobatch.prediction.timeline import Timeline, TracedStep, combine
from autobatch.prediction.tracing.failures import TooLong
from autobatch.prediction.tracing.fake_step import Circumstances
from autobatch.prediction.tracing.trace import SIZES, climb, expect_events, find_most_events, trace
from autobatch.step.workload import Workload

__all__ = ["check_timeline", "find_smallest"]

_LADDER = (256, 1024)
"""Where a step is no line beyond the largest of the three sizes, though it is one up to there."""


def find_smallest(workload: Workload, layout: Layout) -> int:
    """The fewest samples that the model can run: 2 where one sample alone raises an error, as ``Probe`` finds it.

    Args:
        workload: A step that was traced at other sizes, so that what fails here is due to the one sample.
        layout: As for ``trace_timeline``.
    """
    try:
        trace(replace(workload, optimizer=None), layout, 1, Circumstances(micro_batches=1, steps=1))
    except CannotPredict:
        return 2
    return 1


def check_timeline(
    timeline: Timeline, workload: Workload, layout: Layout, samples: int, circumstances: Circumstances
) -> Timeline | None:
    """Trace the step at one more size.

    Args:
        timeline: Of the same step in the same circumstances.
        workload: As for ``trace_timeline``.
        layout: As for ``trace_timeline``.
        samples: In a micro-batch; at least 2.
        circumstances: As for ``trace_timeline``.

    Returns:
        ``None`` where the timeline says the same, else one that is interpolated and knows this size.

    Raises:
        CannotPredict: At this size it cannot be traced, or not in a few seconds.
    """
    if timeline.interpolated:
        traced = list(timeline.traced)
        if expect_events(traced, samples) > find_most_events(traced):
            raise TooLong("it runs the more operators the more samples it has, there too many to trace")
        return combine([*traced, trace(workload, layout, samples, circumstances, find_most_events(traced))])
    traced = [timeline.as_traced(size) for size in SIZES]
    most = find_most_events(traced)
    if timeline.begins_with(trace(workload, layout, samples, circumstances.once(), most // 2)):
        return None

    def run(size: int) -> TracedStep:
        return trace(workload, layout, size, circumstances, most)

    here = run(samples)
    return combine(climb([*traced, here], [size for size in _LADDER if size != samples], run))
