"""Traces the step once more at the size that an estimate leads to; judges again if the timeline does not hold there.

Two sizes on a line do not prove a third: a step that pads its samples to a multiple of 128 takes the same at 2 and 67.
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

_ROUNDS = 3  # mostly the second answer is near the first, which was traced
_LADDER = (256, 1024)  # more sizes, if a step is a line up to the larger of the two sizes only


@dataclass(frozen=True)
class Proof:
    """An estimate, and whether a trace proved it at the size that counts."""

    estimate: Estimate
    proven_at: int = 0  # the size that was traced; 0 if the answer was not
    doubt: str = ""  # why it was not traced


def prove(
    estimate: Estimate,
    judge: Callable[[Estimate], int],
    check: Callable[[Estimate, int], Timeline | None],
    settle: Callable[[Estimate], Estimate] = lambda estimate: estimate,
) -> Proof:
    """Trace the size that the estimate leads to; if the trace differs, judge again with it.

    ``judge`` returns that size. ``check`` returns ``None`` if the timeline holds there, else another timeline.
    ``settle`` asks cuDNN about the sizes that an estimate leads to.
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
    """Prove the answer of a sizing.

    While another process traces, ``meanwhile`` is called: the estimate remembers its results, which mostly still hold.
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
    """Trace one optimizer step at one more size, of at least 2 samples.

    Returns ``None`` if the timeline agrees, else an interpolated timeline that has this size. Raises
    ``InvalidArgument`` if this size cannot be traced in a few seconds.
    """
    traced = list(timeline.traced) or [timeline.at(size) for size in SIZES]
    most = find_most_events(traced)

    def run(size: int) -> TracedStep:
        return trace(workload, layout, size, circumstances, most)

    if timeline.interpolated:
        if expect_events(traced, samples) > most:
            raise TooLong("it runs more operators with more samples, too many to trace at this size")
        return combine([*traced, run(samples)])
    if timeline.begins_with(trace(workload, layout, samples, circumstances.once(), most // 2)):
        return None
    return combine(climb([*traced, run(samples)], [size for size in _LADDER if size != samples], run))


def find_smallest(workload: Workload, layout: Layout) -> int:
    """The fewest samples that the model can run: 2 if one sample raises an error, though other sizes were traced."""
    try:
        trace(replace(workload, optimizer=None), layout, 1, Circumstances(micro_batches=1, steps=1))
    except Exception:  # noqa: BLE001 - the step raises it, or the trace
        return 2
    return 1


def trace_savings(workload: Workload, layout: Layout) -> tuple[Saving, ...]:
    """Find how the step already saves memory; if it cannot be traced, how its model does."""
    found = find_savings(workload.model)
    types = {parameter.device.type for parameter in workload.parameters()} | {"cuda", DEVICE_TYPE}
    with suppress(Exception), watch_savings(found, *types - {"meta"}):
        trace(replace(workload, optimizer=None), layout, SIZES[0], Circumstances(micro_batches=1, steps=1))
    return tuple(sorted(found))
