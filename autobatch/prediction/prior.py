"""Predicts the largest size that fits a limit of this process, for ``fit`` before its first trial.

Does not cover trials, which have the last word: where nothing can be predicted, or not soon, they begin at two samples.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autobatch.batch.samples import Layout
from autobatch.memory.cuda import uses_expandable_segments
from autobatch.planning.evidence import Forecast
from autobatch.prediction.cards import Gpu, make_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.local_card import read_card
from autobatch.prediction.retrace import check_timeline, prove
from autobatch.prediction.step_parts import has_parts
from autobatch.prediction.timeline import Timeline
from autobatch.prediction.tracing.trace import SIZES, Circumstances, trace_timeline
from autobatch.prediction.trial_replay import TrialReplay
from autobatch.step.workload import Workload

__all__ = ["Expectation", "FirstStep", "expect_largest"]

_MOST_SECONDS = 15.0
"""A trace that takes longer costs more than the trials that it spares."""
_FEW_SIZES = 4
_NEAR = 8
"""Sizes below the largest that fits, and half as many above it, whose trials are replayed: 20 ms each."""
_AGREES = 16
"""Of ten models the first forward pass left within 1/40 of what was predicted (tests/card, torch 2.13)."""
_MOST_LOSS = 10
"""A tenth of the samples is the most that is given up so that a new process stays within the limit, too."""
_HEADROOM = 20
"""1/20 of a budget is left free by default."""
_log = logging.getLogger("autobatch")


class FirstStep(NamedTuple):
    """What the first step of two samples has shown."""

    allocated_before: int = 0  # bytes in tensors of this process, the model's among them
    forward_bytes: int | None = None  # what its forward pass left; None where it was not run, or memory ended


_NOTHING_RAN = FirstStep()


class Expectation(NamedTuple):
    """The largest size that fits, 0 where that cannot be predicted, and what trials near it will hold."""

    largest: int = 0
    knows_no_larger: bool = False  # whether larger ones may fit as well
    forecast: Forecast = Forecast()


def expect_largest(
    workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int], first: FirstStep = _NOTHING_RAN
) -> Expectation:
    """The largest of these ascending sizes that this process's allocator would hold within the limit.

    Args:
        workload: What is run.
        layout: The samples of the trials.
        limit_bytes: What the allocator may hold.
        sizes: The sizes that are asked about.
        first: What has been measured.
    """
    if len(sizes) <= _FEW_SIZES:
        return Expectation()
    try:
        return _expect(workload, layout, limit_bytes, sizes, first)
    except Exception as error:  # noqa: BLE001 - trials need no expectation, so nothing about it may stop them
        _log.debug("nothing is expected of the first trial: %s", error)
        return Expectation()


def _find_card(workload: Workload) -> Gpu:
    """The card of the model; where there is none, one of which nothing is known, whose workspaces are large."""
    homes = {parameter.device for parameter in workload.parameters() if parameter.device.type == "cuda"}
    return read_card(homes.pop().index) if homes else make_gpu("any", 0, source="")


def _expect(
    workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int], first: FirstStep
) -> Expectation:
    deadline, circumstances, card = time.monotonic() + _MOST_SECONDS, Circumstances(), _find_card(workload)

    def judge(estimate: Estimate) -> int:
        return _TrialEstimate(estimate, limit_bytes, first).find_largest(sizes)

    def check(estimate: Estimate, size: int) -> Timeline | None:
        left = deadline - time.monotonic()
        return run_apart(lambda: check_timeline(estimate.timeline, workload, layout, size, circumstances), left)

    timeline = run_apart(lambda: trace_timeline(workload, layout, circumstances), _MOST_SECONDS)
    estimate = Estimate(timeline, expandable_segments=uses_expandable_segments()).on_card(card)
    proof = prove(estimate, judge, check, settle=lambda estimate: estimate.settle(lambda known: [judge(known)]))
    trials = _TrialEstimate(proof.estimate, limit_bytes, first)
    known = trials.known_of(sizes, SIZES[-1] if proof.doubt else sizes[-1])
    largest = trials.find_largest(known)
    forecast = Forecast() if proof.doubt or not largest else trials.forecast(known, largest, deadline)
    return Expectation(largest, largest == known[-1] < sizes[-1], forecast)


@dataclass(frozen=True)
class _TrialEstimate:
    """What trials of one estimated step will hold."""

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
        """Those sizes of which something is known, up to ``most``."""
        return sizes[: bisect_right(sizes, min(most, self.estimate.largest_traced or most))]

    def find_largest(self, sizes: Sequence[int]) -> int:
        """The largest of those that are known whose trial stays within the limit; 0 where none does."""
        known = self.known_of(sizes, sizes[-1])
        fitting = bisect_left(known, True, key=lambda size: self.bytes_at(size) > self.limit_bytes)
        return known[fitting - 1] if fitting else 0

    def find_largest_to_train(self, sizes: Sequence[int], largest: int) -> int:
        """The largest of them whose training stays within the limit in a new process; 0: no bound.

        There is no bound where it would cost more than a tenth of the samples and the default headroom covers what
        training takes beyond the limit: where sizes are far apart, one segment of the allocator can halve the size.
        """
        limit = self.limit_bytes - self.others_bytes
        fitting = bisect_left(sizes, True, key=lambda size: self.estimate.reserved(size) > limit)
        most = sizes[fitting - 1] if fitting else 0
        costs_much = (largest - most) * _MOST_LOSS > largest
        return 0 if costs_much and self.estimate.reserved(largest) <= limit + limit // _HEADROOM else most

    def forecast(self, sizes: Sequence[int], largest: int, deadline: float) -> Forecast:
        """Of sizes next to the largest that fits, of a quarter of it, and of those that were asked about."""
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
        """Bytes in tensors now that are no part of the step."""
        if self._replay is None:
            return 0
        others, (left, tensors) = self.first.allocated_before - self._replay.resident_bytes, self._replay.forward
        if self._has_left(tensors) and not self._has_left(left):  # an earlier step has left both workspaces of cuBLAS
            others -= 2 * (left - tensors)
        return max(others, 0)

    def _has_left(self, predicted: int) -> bool:
        """Whether the first forward pass left so many bytes: then the traced operators are those that run."""
        if self._replay is None or self.first.forward_bytes is None:
            return False
        return abs(self.first.forward_bytes - predicted) * _AGREES <= self._replay.forward.in_tensors

    @cached_property
    def _replay(self) -> TrialReplay | None:
        if self.estimate.timeline.interpolated or not has_parts(self.estimate.timeline):
            return None
        return TrialReplay(self.estimate)
