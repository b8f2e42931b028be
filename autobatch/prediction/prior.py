"""Predicts the largest size that fits a limit of this process, for ``fit`` before its first trial.

Trials have the last word: if nothing can be predicted, or not soon, they begin at two samples.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from autobatch.batch.samples import Layout
from autobatch.errors import InvalidArgument
from autobatch.memory.cuda import uses_expandable_segments
from autobatch.planning.next_trial import FIRST_SIZE, Forecast
from autobatch.prediction.allocator import simulate
from autobatch.prediction.cards import GPUS, Gpu, make_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.sizing import check_timeline, prove
from autobatch.prediction.timeline import StepParts, Timeline, find_parts, without_second_micro_batch
from autobatch.prediction.tracing.trace import SIZES, Circumstances, trace_timeline
from autobatch.step.workload import Workload

_MOST_SECONDS = 15.0  # a longer trace costs more than the trials that it spares
_FEW_SIZES = 4
_NEAR = 8
"""Trials of so many sizes below the largest that fits are replayed, and of half as many above it: 20 ms each."""
_AGREES = 16  # the first forward pass of ten models left within 1/40 of the predicted bytes (tests/card, torch 2.13)
_MOST_LOSS = 10  # at most a tenth of the samples is given up so that a new process stays within the limit too
_HEADROOM = 20  # 1/20 of a budget is left free by default
_log = logging.getLogger("autobatch")


class FirstStep(NamedTuple):
    """Measurements of the first step of two samples."""

    allocated_before: int = 0  # bytes in tensors of this process, the model's among them
    forward_bytes: int | None = None  # what its forward pass left; None if it did not run or ran out of memory


_NOTHING_RAN = FirstStep()


class Expectation(NamedTuple):
    """The largest size that fits (0 if unknown), and what trials near it will hold."""

    largest: int = 0
    knows_no_larger: bool = False  # whether larger ones may fit as well
    forecast: Forecast = Forecast()


def read_card(index: int | None = None) -> Gpu:
    """Read the card with this index, or the current one; ``"unknown"`` is an architecture that the table lacks."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    architecture = f"sm_{properties.major}{properties.minor}"
    return make_gpu(
        properties.name,
        properties.total_memory,
        architecture if architecture in {gpu.architecture for gpu in GPUS} else "unknown",
        properties.multi_processor_count,
        source="read from the card of this machine",
    )


def expect_largest(
    workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int], first: FirstStep = _NOTHING_RAN
) -> Expectation:
    """Predict which of these ascending sizes is the largest that the allocator holds within the limit."""
    if len(sizes) <= _FEW_SIZES:
        return Expectation()
    try:
        return _expect(workload, layout, limit_bytes, sizes, first)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - trials need no expectation, so its errors must not stop them
        _log.debug("nothing is expected of the first trial: %s", error)
        return Expectation()


def _expect(
    workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int], first: FirstStep
) -> Expectation:
    deadline, circumstances = time.monotonic() + _MOST_SECONDS, Circumstances()
    homes = {parameter.device for parameter in workload.parameters() if parameter.device.type == "cuda"}
    card = read_card(homes.pop().index) if homes else make_gpu("any", 0, source="")

    def judge(estimate: Estimate) -> int:
        return _TrialEstimate(estimate, limit_bytes, first).find_largest(sizes)

    def check(estimate: Estimate, size: int) -> Timeline | None:
        left = deadline - time.monotonic()
        try:
            return run_apart(lambda: check_timeline(estimate.timeline, workload, layout, size, circumstances), left)
        except Exception as error:  # a trial of this size shows an error of the step
            raise InvalidArgument(str(error)) from error

    timeline = run_apart(lambda: trace_timeline(workload, layout, circumstances), _MOST_SECONDS)
    estimate = Estimate(timeline, expandable_segments=uses_expandable_segments()).on_card(card)
    proof = prove(estimate, judge, check, settle=lambda estimate: estimate.settle(lambda known: [judge(known)]))
    trials = _TrialEstimate(proof.estimate, limit_bytes, first)
    known = trials.known_of(sizes, SIZES[-1] if proof.doubt else sizes[-1])
    largest = trials.find_largest(known)
    forecast = Forecast() if proof.doubt or not largest else trials.forecast(known, largest, deadline)
    return Expectation(largest, largest == known[-1] < sizes[-1], forecast)


class ForwardBytes(NamedTuple):
    """Bytes that a forward pass leaves: input, output, tensors for backward, and a workspace of cuBLAS."""

    left: int
    in_tensors: int  # without the workspace


@dataclass(frozen=True)
class TrialReplay:
    """Replays a trial in the simulated allocator: a first step of two samples, caches released, then a step.

    On a card of 2 GiB it is 1.7 % below to 3 % above the trial; a step alone reserves 6 % less to 2.5 % more.
    """

    estimate: Estimate  # not interpolated
    parts: StepParts  # of its steps of two samples, as ``with_workspaces`` orders them

    @staticmethod
    def of(estimate: Estimate) -> TrialReplay | None:
        if estimate.timeline.interpolated:
            return None
        order, _ = estimate.with_workspaces(estimate.timeline.at(FIRST_SIZE))
        parts = find_parts(order, estimate.timeline.blocks)
        return None if parts is None else TrialReplay(estimate, parts)

    def reserved(self, n: int) -> int:
        """Most bytes that the allocator takes during a trial of ``n`` samples."""
        order, first_sizes = self._first_step
        # The first step has one micro-batch, the second has two.
        trial = without_second_micro_batch(order, self.estimate.timeline.blocks, self.parts, steps=1)
        second = trial.index(order[self.parts.forwards[2]])
        _, sizes = self.estimate.with_workspaces(self.estimate.timeline.at(n))
        for entry in trial[:second]:
            if entry > 0:
                sizes[entry - 1] = first_sizes[entry - 1]
        expandable = self.estimate.expandable_segments
        return simulate(trial, sizes, expandable_segments=expandable, released_at=second).reserved

    @cached_property
    def resident_bytes(self) -> int:
        return self._bytes_before(self.parts.forwards[0])

    @cached_property
    def forward(self) -> ForwardBytes:
        blocks, (order, _) = self.estimate.timeline.blocks, self._first_step
        begun = [entry for entry in order[: self.parts.first_backward] if 0 < entry <= len(blocks)]
        handles = sum(blocks[entry - 1].kind == "cuBLAS workspace" for entry in begun)
        left = self._bytes_before(self.parts.first_backward) - self.resident_bytes
        return ForwardBytes(left, left - handles * self.estimate.workspace_bytes)

    @cached_property
    def _first_step(self) -> tuple[list[int], list[int]]:
        return self.estimate.with_workspaces(self.estimate.timeline.at(FIRST_SIZE))

    def _bytes_before(self, position: int) -> int:
        order, sizes = self._first_step
        return simulate(order[:position], sizes).allocated_at_end


@dataclass(frozen=True)
class _TrialEstimate:
    estimate: Estimate
    limit_bytes: int
    first: FirstStep
    _seen: dict[int, int] = field(default_factory=dict)

    def bytes_at(self, size: int) -> int:
        """Bytes that the allocator reserves in a trial, with what else is in this process."""
        if size not in self._seen:
            replay = self._replay
            held = self.estimate.reserved(size) if replay is None else replay.reserved(size) + self.others_bytes
            self._seen[size] = held
        return self._seen[size]

    def known_of(self, sizes: Sequence[int], most: int) -> Sequence[int]:
        """The sizes up to ``most`` that can be judged."""
        return sizes[: bisect_right(sizes, min(most, self.estimate.largest_traced or most))]

    def find_largest(self, sizes: Sequence[int]) -> int:
        known = self.known_of(sizes, sizes[-1])
        fitting = bisect_left(known, True, key=lambda size: self.bytes_at(size) > self.limit_bytes)
        return known[fitting - 1] if fitting else 0

    def find_largest_to_train(self, sizes: Sequence[int], largest: int) -> int:
        """The largest size whose training stays within the limit in a new process; 0: no bound.

        A bound that costs more than a tenth of the samples is dropped, if the default headroom covers what training
        takes beyond the limit. If sizes are far apart, one segment of the allocator can halve the size.
        """
        limit = self.limit_bytes - self.others_bytes
        fitting = bisect_left(sizes, True, key=lambda size: self.estimate.reserved(size) > limit)
        most = sizes[fitting - 1] if fitting else 0
        costs_much = (largest - most) * _MOST_LOSS > largest
        return 0 if costs_much and self.estimate.reserved(largest) <= limit + limit // _HEADROOM else most

    def forecast(self, sizes: Sequence[int], largest: int, deadline: float) -> Forecast:
        """Predict sizes next to the largest that fits, a quarter of it, and those that were judged before."""
        if self._replay is None:
            return Forecast()
        index = bisect_left(sizes, largest)
        quarter = sizes[max(bisect_right(sizes, largest // 4) - 1, 0)]
        near = [quarter, *sizes[max(index - _NEAR, 0) : index + _NEAR // 2]]
        for size in sorted(near, key=lambda size: abs(size - largest)):
            if time.monotonic() < deadline:
                self.bytes_at(size)
        points = tuple(sorted(self._seen.items()))
        left, tensors = self._replay.forward
        confirmed = self._has_left(left) or self._has_left(tensors)
        return Forecast(
            points=points, largest_to_train=self.find_largest_to_train(sizes, largest), is_confirmed=confirmed
        )

    @cached_property
    def others_bytes(self) -> int:
        if self._replay is None:
            return 0
        others, (left, tensors) = self.first.allocated_before - self._replay.resident_bytes, self._replay.forward
        if self._has_left(tensors) and not self._has_left(left):  # an earlier step has left both workspaces of cuBLAS
            others -= 2 * (left - tensors)
        return max(others, 0)

    def _has_left(self, predicted: int) -> bool:
        """Whether the first forward pass left the predicted bytes: then the traced operators are those that run."""
        if self._replay is None or self.first.forward_bytes is None:
            return False
        return abs(self.first.forward_bytes - predicted) * _AGREES <= self._replay.forward.in_tensors

    @cached_property
    def _replay(self) -> TrialReplay | None:
        return TrialReplay.of(self.estimate)
