"""Compares the gradient of a few samples with that of their parts, in a deterministic step, by the code that trains.

Covers the order of things: float32 first; where that says inexact, float64, and then the causes. Also what follows from
errors and from memory that ends. Does not cover measuring (``measurement``), judging (``verdict``) nor finding causes
(``diagnosis``).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from autobatch.batch.layout import Layout, map_tensors
from autobatch.batch.tree import is_array, leaves_of
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.determinism import deterministic, widen
from autobatch.exactness.diagnosis import find_causes, find_uncontrolled_generators
from autobatch.exactness.measurement import Measurement, Sizes
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.exactness.verdict import (
    blame_batch_norm,
    confirm_exact,
    find_modules,
    find_obstacle,
    find_partitions,
    judge,
    reference_norms,
)
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.state.module_state import ModuleState
from autobatch.state.rewind_point import RewindPoint
from autobatch.step.workload import Workload

__all__ = ["NoMemoryError", "SplitComparison"]

_log = logging.getLogger("autobatch")


class NoMemoryError(Exception):
    """Memory ended before a sample was run, so fewer samples would not fit either."""


@dataclass(frozen=True)
class SplitComparison:
    """Compares samples of one workload whole against split. The model is changed: the caller restores it.

    Attributes:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which some are taken, evenly from first to last.
        device: Where.
        most: How many are taken; fewer where memory ends.
        after_trials: Whether the step is known to run: then an error that it raises here comes from being made
            deterministic or split, and the result is "unchecked". And then the comparison is quick: where BatchNorm
            explains why the first partition is not exact, no other cause is looked for.
        exact_at: The number of samples for which a smaller comparison has found the split exact; 0 where none has.
    """

    workload: Workload
    layout: Layout
    device: Device
    most: int
    after_trials: bool = False
    exact_at: int = 0

    def run(self) -> Verdict:
        """The verdict, with its seconds. Raises what the step raises where it is used wrongly, except after trials."""
        started = time.perf_counter()
        for parameter in self.workload.parameters():
            parameter.grad = None
        with torch.enable_grad():
            verdict = self._try_samples()
        return verdict.model_copy(update={"seconds": time.perf_counter() - started})

    def _try_samples(self) -> Verdict:
        samples, ended = min(self.layout.count, self.most), ""
        while samples >= 2:
            verdict, ended = self._try(samples)
            if verdict is not None:
                return verdict
            self.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
            samples //= 2
        if ended:
            return _unchecked(f"memory ended with two samples at once ({ended})")
        return _unchecked("the batch has one sample, and one cannot be split")

    def _try(self, samples: int) -> tuple[Verdict | None, str]:
        """The verdict; or ``None`` and how memory ended."""
        handled = sys.exc_info()[1]
        try:
            alike = f"{samples} samples of the batch are all alike: pass a batch of samples that differ"
            return self.compare(samples) if _differ(self.layout.spread(samples)) else _unchecked(alike), ""
        except NoMemoryError as ended:
            return _unchecked(str(ended)), ""
        except DoesNotFit as ended:
            return None, str(ended)
        except Exception as error:
            reason = describe_error(error, handled=handled)
            if is_oom(error, handled=handled):
                return None, reason
            if isinstance(error, AutobatchError):
                if self.after_trials:
                    return _unchecked(reason), ""
                raise
        if self.after_trials:
            # By its type alone: that verdict is stored with its plan, and the text of the user's error may be anything.
            _log.info("autobatch: the step cannot be made deterministic: %s", reason)
            reason = f"{reason.partition(':')[0]}; its text is in the log"
        else:  # raises the step's error, where it is raised without our changes as well
            self._measure(self.layout.spread(samples), SampleNumbers()).whole()
        return _unchecked(f"the step cannot be made deterministic ({reason})"), ""

    def compare(self, samples: int, partitions: Sequence[Sizes] = ()) -> Verdict:
        """The verdict on these partitions of so many samples, or on those that are usually tried.

        Raises DoesNotFit or ``torch.OutOfMemoryError`` if memory ends; errors of the step or ``weigh`` come out too.
        """
        with self._make_deterministic(torch.float32) as random:
            measured = self._measure(self._widened(samples, torch.float32), random)
            verdict, before = self._compare(measured, partitions)
            measured.rewind_point.restore()  # the next comparison begins with the state with which this one began
        return self._confirm_or_explain(verdict, before) if before else verdict

    def _compare(
        self, measured: Measurement, partitions: Sequence[Sizes]
    ) -> tuple[Verdict, Mapping[Sizes, Sequence[float]]]:
        """The verdict of float32; and, where it has to be confirmed, its ``reference_norms``."""
        if (obstacle := find_obstacle(measured)) is not None:
            return _unchecked(obstacle), {}
        partitions = partitions or find_partitions(measured)
        if not partitions:
            samples = measured.layout.count
            reason = f"single samples cannot be run by themselves, and {samples} are too few to divide otherwise"
            return _unchecked(reason), {}
        if self.after_trials and (blamed := blame_batch_norm(measured, partitions[0])) is not None:
            return blamed, {}
        verdict = judge(measured, partitions)
        if verdict.exact:
            return verdict, {}
        if (uncontrolled := find_uncontrolled_generators(measured)) is not None:
            return _unchecked(uncontrolled), {}
        return verdict, reference_norms(measured, partitions)

    def _confirm_or_explain(self, verdict: Verdict, before: Mapping[Sizes, Sequence[float]]) -> Verdict:
        """In float64: a difference that shrinks with the rounding was rounding. If that fails float32's word stands."""
        try:
            return self._look_again(verdict, before, torch.float64)
        except Exception as error:  # noqa: BLE001 - too little memory for float64, or a step that insists on float32
            _log.info("autobatch: the check was not repeated in float64: %s", describe_error(error))
        self.device.reclaim()
        return self._look_again(verdict, {}, torch.float32)

    def _look_again(self, verdict: Verdict, before: Mapping[Sizes, Sequence[float]], dtype: torch.dtype) -> Verdict:
        with self._make_deterministic(dtype) as random:
            measured = self._measure(self._widened(verdict.samples, dtype), random, diagnoses=True)
            if before and (confirmed := confirm_exact(verdict, before, measured)) is not None:
                return confirmed
            modules = find_modules(measured, verdict.partitions)
            error = modules[0].relative_error if modules else verdict.relative_error
            found = {"relative_error": error, "modules": modules, "causes": self._explain(measured, verdict.partitions)}
            return verdict.model_copy(update=found)

    def _explain(self, measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
        """The causes. Where looking for them fails, the verdict stands."""
        handled = sys.exc_info()[1]
        try:
            return find_causes(measured, partitions, self.exact_at)
        except Exception as error:
            if is_oom(error, handled=handled) or isinstance(error, DoesNotFit):
                raise
            _log.exception("autobatch: looking for the cause of an inexact split failed")
            return (f"its cause could not be found ({type(error).__name__}; its text is in the log)",)

    @contextmanager
    def _make_deterministic(self, dtype: torch.dtype) -> Iterator[SampleNumbers]:
        handled = sys.exc_info()[1]
        with ExitStack() as stack:
            try:
                random = stack.enter_context(deterministic(self.workload.model, self.workload.parameters(), dtype))
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
                raise NoMemoryError(f"the model does not fit in memory in float32 ({reason})") from None
            yield random

    def _widened(self, samples: int, dtype: torch.dtype) -> Layout:
        batch = map_tensors(self.layout.spread(samples).batch, lambda tensor: widen(tensor, dtype))
        return Layout(batch, samples, self.layout.lists)

    def _measure(self, layout: Layout, random: SampleNumbers, *, diagnoses: bool = False) -> Measurement:
        rewind_point = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        modules = [module for module in self.workload.outside() if isinstance(module, torch.nn.Module)]
        outside = ModuleState([part for module in modules for part in module.modules()])
        return Measurement(self.workload, self.device, layout, rewind_point, outside, random, diagnoses=diagnoses)


def _differ(layout: Layout) -> bool:
    rows = [[*leaves_of(layout.take(index, index + 1))] for index in range(layout.count)]
    return any(not all(map(_same, first, second)) for first, second in pairwise(rows))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if is_array(first) and is_array(second):
        return first.shape == second.shape and bool((first == second).all())
    try:
        return bool(first is second or type(first) is not type(second) or first == second)
    except (TypeError, ValueError, RuntimeError):  # objects that compare their arrays value by value
        return False


def _unchecked(reason: str) -> Verdict:
    return Verdict(exact=False, relative_error=0.0, unchecked=reason)
