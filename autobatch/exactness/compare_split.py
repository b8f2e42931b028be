"""One check of a split: a few samples whole against divided, by the code that trains, on a step that is held still.

Covers the order of things: float32 first; where that says inexact, float64, and then the causes. And what becomes of
errors and of memory that ends. Does not cover measuring (``measurement``) nor telling causes apart (``diagnosis``).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from autobatch.batch.layout import Layout, map_tensors
from autobatch.batch.tree import is_array, leaves_of
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.determinism import still, widen
from autobatch.exactness.diagnosis import find_causes, find_unruly_generators
from autobatch.exactness.divisions import Sizes
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.sample_numbers import Numbering
from autobatch.exactness.verdict import (
    Doubt,
    absolve,
    blame_batch_norm,
    conclude,
    divide,
    find_modules,
    find_obstacle,
)
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.state.module_state import ModuleState
from autobatch.state.rewind_point import RewindPoint
from autobatch.step.workload import Workload

__all__ = ["Check", "NoMemoryError"]

_log = logging.getLogger("autobatch")


class NoMemoryError(Exception):
    """Memory ended before a sample was run, so fewer of them do not help."""


@dataclass(frozen=True)
class Check:
    """Compares samples of one workload whole against split. Whoever runs it puts the model back.

    Attributes:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which some are taken, evenly from first to last.
        device: Where.
        most: How many are taken; fewer where memory ends.
        exact_at: Samples whose split a smaller comparison has found exact; 0 where none has.
        after_trials: Whether the step is known to run as it is: then what it raises here comes from being held still or
            divided, and is a reason for no verdict. And then it is quick: where BatchNorm explains why the first
            division is not exact, nothing else is looked for.
    """

    workload: Workload
    layout: Layout
    device: Device
    most: int
    after_trials: bool = False
    exact_at: int = 0

    def run(self) -> Verdict:
        """The verdict, with its seconds.

        Raises:
            AutobatchError: The step or ``weigh`` is used wrongly. Not after trials, nor does the step's own error come
                out then.
        """
        started = time.perf_counter()
        for parameter in self.workload.parameters():
            parameter.grad = None
        with torch.enable_grad():
            verdict = self._try_samples()
        return verdict.model_copy(update={"seconds": time.perf_counter() - started})

    def _try_samples(self) -> Verdict:
        samples, reason = min(self.layout.count, self.most), ""
        while samples >= 2:
            verdict, reason = self._try(samples)
            if verdict is not None:
                return verdict
            self.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
            samples //= 2
        if reason:
            return _unchecked(f"memory ended with two samples at once ({reason})")
        return _unchecked("the batch has one sample, and one cannot be split")

    def _try(self, samples: int) -> tuple[Verdict | None, str]:
        handled = sys.exc_info()[1]
        try:
            return self._judge(samples), ""
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
        if not self.after_trials:
            self._run_as_it_is(samples)
        if self.after_trials:
            # By its type alone: that verdict is kept with its plan, and the text of the user's error may be anything.
            _log.info("autobatch: the step does not run held still: %s", reason)
            reason = f"{reason.partition(':')[0]}; its text is in the log"
        return _unchecked(f"the step does not run held still ({reason})"), ""

    def _judge(self, samples: int) -> Verdict:
        if not _differ(self.layout.spread(samples)):
            return _unchecked(f"{samples} samples of the batch are all alike: pass a batch of samples that differ")
        return self.compare(samples)

    def compare(self, samples: int, partitions: Sequence[Sizes] = ()) -> Verdict:
        """The verdict on these divisions of so many samples, or on those that are usually tried.

        Raises:
            DoesNotFit: Memory ended; or ``torch.OutOfMemoryError``. Whatever else the step or ``weigh`` raises comes
                out too.
        """
        with self._make_deterministic(torch.float32) as draws:
            measured = self._measure(samples, torch.float32, draws)
            obstacle = find_obstacle(measured)
            found = self._compare(measured, partitions) if obstacle is None else _unchecked(obstacle)
            measured.checkpoint.restore()  # the next comparison begins with the state with which this one began
        return found if isinstance(found, Verdict) else self._look_again(found)

    def _compare(self, measured: Measurement, partitions: Sequence[Sizes]) -> Verdict | Doubt:
        partitions = partitions or divide(measured)
        if not partitions:
            samples = measured.layout.count
            return _unchecked(
                f"single samples cannot be run by themselves, and {samples} are too few to divide otherwise"
            )
        if self.after_trials and (blamed := blame_batch_norm(measured, partitions[0])) is not None:
            return blamed
        verdict = conclude(measured, partitions)
        if verdict.exact:
            return verdict
        unruly = find_unruly_generators(measured)
        if unruly is not None:
            return _unchecked(unruly)
        return Doubt(verdict, measured.scales().sizes, {sizes: measured.apart(sizes) for sizes in partitions})

    def _look_again(self, doubt: Doubt) -> Verdict:
        """In float64: a difference that shrinks with the rounding was rounding. float32's word stands if that fails."""
        try:
            return self._confirm(doubt, torch.float64)
        except Exception as error:  # noqa: BLE001 - no room for float64, or a step that insists on float32
            _log.info("autobatch: the check was not repeated in float64: %s", describe_error(error))
        self.device.reclaim()
        return self._confirm(doubt, torch.float32)

    def _confirm(self, doubt: Doubt, dtype: torch.dtype) -> Verdict:
        verdict = doubt.verdict
        with self._make_deterministic(dtype) as draws:
            measured = self._measure(verdict.samples, dtype, draws, diagnoses=True)
            if dtype is torch.float64:
                confirmed = absolve(doubt, measured)
                if confirmed is not None:
                    return confirmed
            modules = find_modules(measured, verdict.partitions)
            error = modules[0].relative_error if modules else verdict.relative_error
            found = {"relative_error": error, "modules": modules, "causes": self._explain(measured, verdict.partitions)}
            return verdict.model_copy(update=found)

    def _explain(self, measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
        """The causes. That none could be found changes nothing of the verdict."""
        handled = sys.exc_info()[1]
        try:
            return find_causes(measured, partitions, self.exact_at)
        except Exception as error:
            if is_oom(error, handled=handled) or isinstance(error, DoesNotFit):
                raise
            _log.exception("autobatch: looking for the cause of an inexact split failed")
            return (f"its cause could not be found ({type(error).__name__}; its text is in the log)",)

    @contextmanager
    def _make_deterministic(self, dtype: torch.dtype) -> Iterator[Numbering]:
        handled = sys.exc_info()[1]
        with ExitStack() as stack:
            try:
                draws = stack.enter_context(still(self.workload.model, self.workload.parameters(), dtype))
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
                raise NoMemoryError(f"the model does not fit in memory in float32 ({reason})") from None
            yield draws

    def _measure(self, samples: int, dtype: torch.dtype, draws: Numbering, *, diagnoses: bool = False) -> Measurement:
        batch = map_tensors(self.layout.stretched(samples).batch, lambda tensor: widen(tensor, dtype))
        layout = Layout(batch, samples, self.layout.lists)
        checkpoint = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        outside = ModuleState(self.workload.outside_modules())
        return Measurement(self.workload, self.device, layout, checkpoint, outside, draws, diagnoses=diagnoses)

    def _run_as_it_is(self, samples: int) -> None:
        """Let what the step raises out, where it raises without being held still as well."""
        batch = self.layout.spread(samples).batch
        layout = Layout(batch, samples, self.layout.lists)
        checkpoint = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        outside = ModuleState(self.workload.outside_modules())
        Measurement(self.workload, self.device, layout, checkpoint, outside, Numbering()).whole()


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
    except (TypeError, ValueError, RuntimeError):  # objects that compare their arrays number by number
        return False


def _unchecked(reason: str) -> Verdict:
    return Verdict(exact=False, relative_error=0.0, unchecked=reason)
