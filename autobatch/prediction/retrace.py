"""Retraces the step at the size that an estimate leads to, and judges again where the timeline does not hold there.

Covers how often the answer may move, the trace at that size, and whether one sample can be run. Does not cover which
size the estimate leads to. A line through two sizes is no proof for a third: a step that pads its samples to a multiple
of 128 takes the same at 2 and at 67.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autobatch._formatting import plural
from autobatch.batch.samples import Layout
from autobatch.errors import InvalidArgument
from autobatch.events import Hook, StageBegan, emit
from autobatch.prediction.child_process import begin_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.sizing import Sizing
from autobatch.prediction.timeline import Timeline, TracedStep, combine
from autobatch.prediction.tracing.failures import TooLong
from autobatch.prediction.tracing.fake_device import DEVICE_TYPE
from autobatch.prediction.tracing.fake_step import Circumstances
from autobatch.prediction.tracing.trace import SIZES, climb, expect_events, find_most_events, trace
from autobatch.records import Saving
from autobatch.step.model_info import find_savings, watch_savings
from autobatch.step.workload import Workload

__all__ = ["Proof", "check_timeline", "find_smallest", "prove", "prove_sizing", "trace_savings"]

_ROUNDS = 3
"""A step that is no line is mostly judged anew once: with a trace at the first answer, the second is near to it."""
_LADDER = (256, 1024)
"""Where a step is no line beyond the larger of the two sizes, though it is one up to there."""


@dataclass(frozen=True)
class Proof:
    """An estimate with what the traces have shown, and whether it holds where it counts."""

    estimate: Estimate
    proven_at: int = 0  # the size that it was asked about and traced at; 0 where it was not traced there
    doubt: str = ""  # why not


def prove(
    estimate: Estimate,
    judge: Callable[[Estimate], int],
    check: Callable[[Estimate, int], Timeline | None],
    settle: Callable[[Estimate], Estimate] = lambda estimate: estimate,
) -> Proof:
    """Trace the size that the estimate leads to; where the trace differs, judge again with it.

    Args:
        estimate: Where to begin.
        judge: Returns the size that an estimate leads to.
        check: Returns ``None`` where its timeline holds at a size, else one with a trace of it (``check_timeline``).
        settle: Asks cuDNN what an estimate with this timeline has to know (``Estimate.settle``).
    """
    for tries in range(_ROUNDS + 1):
        estimate = settle(estimate)
        size = judge(estimate)
        if size in ([step.samples for step in estimate.timeline.traced] or SIZES):
            return Proof(estimate, size)
        if tries == _ROUNDS:
            break
        if size < 2:
            doubt = "one sample is another program than several, which skips some copies, so it is never traced"
            return Proof(estimate, doubt=doubt)
        try:
            changed = check(estimate, size)
        except InvalidArgument as error:
            return Proof(estimate, doubt=str(error))
        if changed is None:
            return Proof(estimate, size)
        estimate = estimate.changed(timeline=changed)
    return Proof(estimate, doubt=f"after {_ROUNDS} more traces the answer had moved once more")


def prove_sizing(
    sizing: Sizing,
    workload: Workload,
    layout: Layout,
    circumstances: Circumstances,
    meanwhile: Callable[[Sizing], object] = lambda _: None,
    *,
    hooks: Sequence[Hook] = (),
) -> tuple[Sizing, Proof]:
    """The same on an estimate that has been put to the test at the size that it leads to.

    Args:
        sizing: The estimate, the card and the target.
        workload: What is traced.
        layout: Of the example batch.
        circumstances: Of the step.
        meanwhile: Called while another process traces: what it asks is remembered, and mostly asked again afterwards.
        hooks: Called before each trace.
    """

    def check(estimate: Estimate, size: int) -> Timeline | None:
        emit(StageBegan(stage=f"tracing the step at {plural(size, 'sample')}"), hooks)
        with begin_apart(
            lambda: check_timeline(estimate.timeline, workload, layout, size, circumstances)
        ) as await_timeline:
            meanwhile(replace(sizing, estimate=estimate))
            return await_timeline()

    proof = prove(
        sizing.estimate,
        judge=lambda estimate: replace(sizing, estimate=estimate).largest,
        check=check,
        settle=lambda estimate: replace(sizing, estimate=estimate).settled().estimate,
    )
    return replace(sizing, estimate=proof.estimate), proof


def check_timeline(
    timeline: Timeline, workload: Workload, layout: Layout, samples: int, circumstances: Circumstances
) -> Timeline | None:
    """Trace the step at one more size, of at least 2 samples; one optimizer step where that is as the timeline has it.

    The second makes what the first makes.

    Returns:
        ``None`` where the timeline says the same, else one that is interpolated and has this size.

    Raises:
        InvalidArgument: At this size it cannot be traced, or not in a few seconds.
    """
    traced = list(timeline.traced) or [timeline.at(size) for size in SIZES]
    most = find_most_events(traced)

    def run(size: int) -> TracedStep:
        return trace(workload, layout, size, circumstances, most)

    if timeline.interpolated:
        if expect_events(traced, samples) > most:
            raise TooLong("it runs the more operators the more samples it has, there too many to trace")
        return combine([*traced, run(samples)])
    if timeline.begins_with(trace(workload, layout, samples, circumstances.once(), most // 2)):
        return None
    return combine(climb([*traced, run(samples)], [size for size in _LADDER if size != samples], run))


def find_smallest(workload: Workload, layout: Layout) -> int:
    """The fewest samples that the model can run: 2 where one sample alone raises an error, as ``Probe`` finds it.

    The step was traced at other sizes, so what fails here is due to the one sample.
    """
    try:
        trace(replace(workload, optimizer=None), layout, 1, Circumstances(micro_batches=1, steps=1))
    except InvalidArgument:
        return 2
    return 1


def trace_savings(workload: Workload, layout: Layout) -> tuple[Saving, ...]:
    """What the step does already to save memory; of one that cannot be traced, what its model shows."""
    found = find_savings(workload.model)
    types = {parameter.device.type for parameter in workload.parameters()} | {"cuda", DEVICE_TYPE}
    with suppress(InvalidArgument), watch_savings(found, *types - {"meta"}):
        trace(replace(workload, optimizer=None), layout, SIZES[0], Circumstances(micro_batches=1, steps=1))
    return tuple(sorted(found))
