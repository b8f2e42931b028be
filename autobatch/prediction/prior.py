"""Predicts the largest size that fits a limit of this process, for ``fit`` before its first trial.

Does not cover trials, which have the last word: where nothing can be predicted, or not soon, they begin at two samples.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from autobatch.batch.layout import Layout
from autobatch.prediction.cards import Gpu, make_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.local_card import read_card
from autobatch.prediction.retrace import check_timeline, prove
from autobatch.prediction.timeline import Timeline
from autobatch.prediction.tracing.trace import SIZES, Circumstances, trace_timeline
from autobatch.step.workload import Workload

__all__ = ["Expectation", "expect_largest", "expects_expandable_segments"]

_MOST_SECONDS = 15.0
"""A trace that takes longer costs more than the trials that it spares."""
_FEW_SIZES = 4
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where several are set the first of them counts: so torch 2.13 was seen to do, whatever its notes say."""
_log = logging.getLogger("autobatch")


class Expectation(NamedTuple):
    """The largest size that fits, 0 where that cannot be predicted, and whether larger ones may fit as well."""

    largest: int = 0
    knows_no_larger: bool = False


def expect_largest(workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int]) -> Expectation:
    """The largest of these ascending sizes that this process's allocator would hold within the limit."""
    if len(sizes) <= _FEW_SIZES:
        return Expectation()
    try:
        return _expect(workload, layout, limit_bytes, sizes)
    except Exception as error:  # noqa: BLE001 - trials need no expectation, so nothing about it may stop them
        _log.debug("autobatch: nothing is expected of the first trial: %s", error)
        return Expectation()


def _find_card(workload: Workload) -> Gpu:
    """The card of the model; where there is none, one of which nothing is known, whose workspaces are large."""
    homes = {parameter.device for parameter in workload.parameters() if parameter.device.type == "cuda"}
    return read_card(homes.pop().index) if homes else make_gpu("any", 0, source="")


def _expect(workload: Workload, layout: Layout, limit_bytes: int, sizes: Sequence[int]) -> Expectation:
    deadline, circumstances, card = time.monotonic() + _MOST_SECONDS, Circumstances(), _find_card(workload)

    def sizes_judged(estimate: Estimate, known: int = sizes[-1]) -> Sequence[int]:
        return sizes[: bisect_right(sizes, min(known, estimate.largest_traced or known))]

    def largest_of(judged: Sequence[int], estimate: Estimate) -> int:
        fitting = bisect_left(judged, True, key=lambda size: estimate.reserved(size) > limit_bytes)
        return judged[fitting - 1] if fitting else 0

    def judge(estimate: Estimate) -> int:
        return largest_of(sizes_judged(estimate), estimate)

    def check(timeline: Timeline, size: int) -> Timeline | None:
        left = deadline - time.monotonic()
        return run_apart(lambda: check_timeline(timeline, workload, layout, size, circumstances), left)

    timeline = run_apart(lambda: trace_timeline(workload, layout, circumstances), _MOST_SECONDS)
    estimate = Estimate(timeline, expandable_segments=expects_expandable_segments()).on_card(card)
    proof = prove(estimate, judge, check, settle=lambda estimate: estimate.settle(lambda known: [judge(known)]))
    known = sizes_judged(proof.estimate, SIZES[-1] if proof.doubt else sizes[-1])
    largest = largest_of(known, proof.estimate)
    return Expectation(largest, knows_no_larger=largest == known[-1] < sizes[-1])


def expects_expandable_segments() -> bool:
    """Whether this process's environment asks torch's allocator for them."""
    settings = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ), "")
    return "expandable_segments:True" in "".join(settings.split()).split(",")
