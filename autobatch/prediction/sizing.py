"""Decides which micro-batch sizes fit which card, from an estimate, and traces the step once more at the answer.

Each answer is a size that fits while the next larger useful one does not, both simulated for that card. Two sizes on a
line do not prove a third: a step that pads its samples to a multiple of 128 takes the same at 2 and 67.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from autobatch._formatting import plural
from autobatch.batch.samples import Layout
from autobatch.errors import InvalidArgument
from autobatch.events import Hook, StageBegan, emit
from autobatch.planning.division import least_size, useful_sizes
from autobatch.prediction.cards import COMMON, GPUS, Gpu
from autobatch.prediction.child_process import begin_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prediction import CardFit, Point, Reach
from autobatch.prediction.timeline import Timeline, TracedStep, combine
from autobatch.prediction.tracing.failures import TooLong
from autobatch.prediction.tracing.fake_device import DEVICE_TYPE
from autobatch.prediction.tracing.trace import SIZES, Circumstances, climb, expect_events, find_most_events, trace
from autobatch.prediction.workspaces import Workspaces
from autobatch.records import Saving
from autobatch.step.model_info import find_savings, watch_savings
from autobatch.step.workload import Workload

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


# ------------------------------------------------------------------------------ the size that fits is traced once more

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
