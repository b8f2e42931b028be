"""Compares the gradient of a few samples with that of their parts, by the code that trains.

1. First cheaply: the step as it is, or repeatable if a first pass has drawn anything. If it is exact, that is all.
2. Otherwise in float64, in a repeatable step, in every kind of partition: what was rounding is gone.
3. If that differs, causes are looked for.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import nn

from autobatch._formatting import plural
from autobatch._user_errors import contextmanager
from autobatch.batch.samples import Layout
from autobatch.batch.tree import is_array, leaves_of, map_tensors, tensors_of
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.determinism import deterministic, full_precision, is_narrow, widen
from autobatch.exactness.diagnosis import find_causes, find_uncontrolled_generators, judge_batch_norm
from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.partitions import Parts, Sizes, crossings, partitions_of, ranges_of
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.step.batch_norm import batch_norms_in_train_mode
from autobatch.step.workload import Workload
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import HostRandomState
from autobatch.undo.undo import Undo

_log = logging.getLogger("autobatch")

_SURELY = 0.1
"""An error of float32 that no rounding has, not even of bfloat16. It is believed if no cause is asked for."""

_HIDDEN = " (it makes no difference with the values that parameters have now, and does once they have moved)"

Side = Literal["", "against", "along"]
"""How parameters have moved: not at all, against their gradient, or along it."""

_STILL: Side = ""


class _ModelDoesNotFit(DoesNotFit):
    """Memory ran out before a sample was run, so fewer samples would not fit either."""


@dataclass
class SplitComparison:
    """Compares samples of one workload whole against split. The model is changed: the caller restores it.

    Attributes:
        workload: The workload, in the mode in which its model is.
        layout: Samples, of which some are taken from first to last (``batch.chosen_rows``).
        device: Device of the runs.
        most: Number of samples that are taken; fewer if memory runs out.
        after_trials: Whether the step is known to run, so that an error comes from making it repeatable or from
            splitting it, and the result is "unchecked". And if BatchNorm explains the first partition, no cause is
            looked for.
        exact_at: Number of samples for which a smaller comparison has found the split exact; 0 if none has.
        order: Rows in the order in which steps take them, if it differs from the batch's order.
        is_trimmed: Whether the step trims parts.
        explains: Whether causes are looked for.
        writes: Whether the step writes into memory that has to be put back; ``None`` if that is not known.
    """

    workload: Workload
    layout: Layout
    device: Device
    most: int
    after_trials: bool = False
    exact_at: int = 0
    order: Sequence[int] | None = None
    is_trimmed: bool = False
    explains: bool = True
    writes: bool | None = None

    def run(self) -> Verdict:
        """Return the verdict, with its seconds. If the step is used wrongly, raise what it raises, but after trials."""
        started = time.perf_counter()
        for parameter in self.workload.parameters():
            parameter.grad = None
        samples, verdict = min(self.layout.count, self.most), None
        reason = "the batch has one sample, and one cannot be split"
        while samples >= 2 and verdict is None:
            verdict, shortage = self.attempt(samples)
            if verdict is None:
                self.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
                samples, reason = samples // 2, f"memory ran out with two samples at once ({shortage})"
        return (verdict or _unchecked(reason)).model_copy(update={"seconds": time.perf_counter() - started})

    @torch.enable_grad()
    def attempt(self, samples: int, partitions: Sequence[Sizes] = ()) -> tuple[Verdict | None, str]:
        """Return the verdict on these partitions, or on the usual ones; or ``None``, and why memory ran out.

        Raises AutobatchError if the step is used wrongly, except after trials, and what the step itself raises.
        """
        handled = sys.exc_info()[1]
        try:
            return self._compare(samples, partitions), ""
        except _ModelDoesNotFit as shortage:
            return None if self.exact_at else _unchecked(str(shortage)), str(shortage)
        except Exception as error:
            reason, kind = describe_error(error, handled=handled), type(error).__name__
            is_ours = isinstance(error, AutobatchError)
            if isinstance(error, DoesNotFit) or is_oom(error, handled=handled):
                return None, str(error) if is_ours else reason
            if is_ours and not self.after_trials:
                raise
        if self.exact_at:
            _log.info("%d samples at once could not be compared: %s", samples, reason)
            return _unchecked(f"more of them raise {kind}; its text is in the log"), ""
        if is_ours:
            return _unchecked(reason), ""
        if not self.after_trials:  # raises the step's error if it is raised without our changes too
            self.measure(self.layout.spread(samples, self.order), None).whole()
        return _unchecked(f"the step cannot be made deterministic ({self._show(reason)})"), ""

    def _compare(self, samples: int, partitions: Sequence[Sizes]) -> Verdict:
        """Compare as cheaply as the answer allows."""
        if not partitions and not _differ(self.layout.spread(samples, self.order)):
            return _unchecked(f"{samples} samples of the batch are all alike: pass a batch of samples that differ")
        quick, moved = (None, _STILL) if self.is_trimmed else self._look_quickly(samples, partitions)
        if quick is not None:
            return quick
        verdict = self._look_closely(samples, partitions)
        if verdict.exact and moved:
            return self._look_for_hidden(samples, moved, verdict)
        return verdict

    def _look_quickly(self, samples: int, partitions: Sequence[Sizes]) -> tuple[Verdict | None, Side]:
        """Compare in float32; return the verdict if that shows it, and how parameters had moved if they differ."""
        moved = _STILL
        try:
            with ExitStack() as stack:
                measured = self._find_first(samples, stack)
                if not 0 < measured.norm() < inf:
                    return None, moved
                if batch_norms_in_train_mode(self.workload.model):
                    sizes = (partitions or partitions_of(samples, 2) or partitions_of(samples, 1))[0]
                    return (judge_batch_norm(measured, ranges_of(sizes)) if self.after_trials else None), moved
                if partitions:
                    error = measured.error([*map(ranges_of, partitions)])
                else:
                    rows, columns = crossings(samples)
                    partitions = [*dict.fromkeys(tuple(map(len, parts)) for parts in (rows, columns))]
                    error, moved = _compare_moved(measured, rows, columns)
                exact = error <= TOLERANCE
                if exact or (error > _SURELY and not self.explains):
                    tried = tuple(partitions)
                    return Verdict(exact=exact, relative_error=error, samples=samples, partitions=tried), moved
        except AutobatchError:  # such as a step that writes into its batch
            raise
        except Exception as error:  # noqa: BLE001 - a step that refuses single samples, or such values
            _log.debug("the quick comparison was left: %s", describe_error(error))
        return None, moved

    def _find_first(self, samples: int, stack: ExitStack) -> Measurement:
        """Return a measurement of the step as it is; of a repeatable one if it draws, or is in half precision."""
        few = self.layout.spread(samples, self.order)
        if not is_narrow([*self.workload.parameters(), *tensors_of(few.batch)]):
            stack.enter_context(full_precision())
            measured = self._begin(stack, widened(few), None)
            before = _read_generators(self.device.torch_device)
            measured.whole()
            self.writes = measured.writes
            if _read_generators(self.device.torch_device) == before:
                return measured
            measured.start.restore()
        random = stack.enter_context(self._repeatable(torch.float32))
        return self._begin(stack, widened(few), random)

    def _look_closely(self, samples: int, partitions: Sequence[Sizes], moves: Side = _STILL) -> Verdict:
        """Return the verdict of float64, in which a difference of rounding is gone; of float32 if that fails."""
        handled, partitions = sys.exc_info()[1], partitions or partitions_of(samples, 1)
        try:
            with self._measuring(samples, torch.float64, moves) as measured:
                return self._judge(measured, partitions)
        except Exception as error:  # noqa: BLE001 - too little memory for float64, or a step that insists on float32
            _log.info("the check was not repeated in float64: %s", describe_error(error, handled=handled))
        self.device.reclaim()
        with self._measuring(samples, torch.float32, moves) as measured:
            return self._judge(measured, partitions)

    def _look_for_hidden(self, samples: int, moves: Side, exact: Verdict) -> Verdict:
        """Return the verdict after parameters have moved if it is inexact, else the exact one of their own values."""
        try:
            found = self._look_closely(samples, (), moves)
        except Exception as error:  # noqa: BLE001 - a step that does not run with other values
            _log.info("the check was not repeated with moved parameters: %s", describe_error(error))
            return exact
        if found.exact or found.unchecked:
            return exact
        causes = *found.causes[:-1], *(f"{cause}{_HIDDEN}" for cause in found.causes[-1:])
        return found.model_copy(update={"causes": causes})

    def _judge(self, measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
        samples, norm = measured.layout.count, measured.norm()
        if norm == 0:
            return _unchecked(f"{samples} samples of the batch count for nothing: no gradient to compare")
        if not isfinite(norm):
            return _unchecked(f"the gradient of {samples} samples of the batch at once is not finite")
        return self._judge_unless_refused(measured, partitions)

    def _judge_unless_refused(self, measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
        """Return the same; or that a part raises an error, if all samples run.

        BatchNorm refuses a single sample, and so does a model that squeezes its batch: they are judged by larger parts.
        """
        handled, samples = sys.exc_info()[1], measured.layout.count
        try:
            return self._judge_partitions(measured, partitions)
        except Exception as raised:
            refused, reason = measured.running, describe_error(raised, handled=handled)
            if refused == samples or isinstance(raised, AutobatchError) or is_oom(raised, handled=handled):
                raise
        if refused == 1 and partitions == partitions_of(samples, 1):
            if larger := partitions_of(samples, 2):
                return self._judge_unless_refused(measured, larger)
            return _unchecked(f"single samples cannot be run, and {samples} are too few to divide otherwise")
        measured.repeat_error()  # raises if all samples do not run any more either
        return _unchecked(f"the step raised an error at {plural(refused, 'sample')} ({self._show(reason)})")

    def _show(self, reason: str) -> str:
        """Return an error's text; its type alone if the verdict is stored with a plan, as the text may be anything."""
        if not (self.after_trials or self.exact_at):
            return reason
        _log.info("the split could not be checked: %s", reason)
        return f"{reason.partition(':')[0]}; its text is in the log"

    def _judge_partitions(self, measured: Measurement, sizes: Sequence[Sizes]) -> Verdict:
        partitions = [*map(ranges_of, sizes)]
        error = measured.error(partitions)
        if error > TOLERANCE and (uncontrolled := find_uncontrolled_generators(measured)):
            return _unchecked(uncontrolled)
        verdict = Verdict(
            exact=error <= TOLERANCE, relative_error=error, samples=measured.layout.count, partitions=tuple(sizes)
        )
        if verdict.exact:
            return verdict
        modules = measured.find_modules(partitions)
        causes = self._explain(measured, partitions) if self.explains else ()
        error = modules[0].relative_error if modules else error
        return verdict.model_copy(update={"relative_error": error, "modules": modules, "causes": causes})

    def _explain(self, measured: Measurement, partitions: Sequence[Parts]) -> tuple[str, ...]:
        """Return the causes. If looking for them fails, the verdict stands."""
        handled = sys.exc_info()[1]
        try:
            is_by_number = self.exact_at and self.order is None
            few = widened(self.layout.spread(self.exact_at), torch.float64) if is_by_number else None
            return find_causes(measured, partitions, few)
        except Exception as error:
            if is_oom(error, handled=handled) or isinstance(error, DoesNotFit):
                raise
            _log.exception("looking for the cause of an inexact split failed")
            return (f"its cause could not be found ({type(error).__name__}; its text is in the log)",)

    @contextmanager
    def _measuring(self, samples: int, dtype: torch.dtype, moves: Side = _STILL) -> Iterator[Measurement]:
        """Yield a measurement of samples that are spread over the batch, in a repeatable step."""
        with ExitStack() as stack:
            random = stack.enter_context(self._repeatable(dtype))
            layout = widened(self.layout.spread(samples, self.order), dtype)
            if moves:
                mirror = stack.enter_context(self.measure(layout, random).moved())
                if moves == "along":
                    mirror()
            measured = self._begin(stack, layout, random)
            yield replace(measured, diagnoses=self.explains)

    @contextmanager
    def _repeatable(self, dtype: torch.dtype) -> Iterator[SampleNumbers]:
        """Make the step repeatable; raises DoesNotFit if the widened model does not fit."""
        handled = sys.exc_info()[1]
        with ExitStack() as stack:
            try:
                random = stack.enter_context(deterministic(self.workload.model, self.workload.parameters(), dtype))
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
                raise _ModelDoesNotFit(f"the model does not fit in memory in float32 ({reason})") from None
            yield random

    def _begin(self, stack: ExitStack, layout: Layout, random: SampleNumbers | None) -> Measurement:
        """Return a measurement; the next comparison begins with the state with which this one began."""
        measured = self.measure(layout, random)
        stack.callback(measured.start.restore)
        return measured

    def measure(self, layout: Layout, random: SampleNumbers | None) -> Measurement:
        """Return a measurement that begins with the state as it is now."""
        model, device = self.workload.model, self.device.torch_device
        modules = [module for module in self.workload.outside() if isinstance(module, nn.Module)]
        outside = ModuleState([part for module in modules for part in module.modules()])
        start = Undo(model, device)
        return Measurement(self.workload, self.device, layout, start, outside, random, writes=self.writes)


def _compare_moved(measured: Measurement, rows: Parts, columns: Parts) -> tuple[float, Side]:
    """Return the error after parameters have moved, and the last side; if memory is too short for a copy, they stay."""
    try:
        return _compare_sides(measured, rows, columns)
    except DoesNotFit as shortage:
        _log.info("the check was not repeated with moved parameters: %s", shortage)
    measured.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
    return measured.after_move().error([rows, columns]), _STILL


def _compare_sides(measured: Measurement, rows: Parts, columns: Parts) -> tuple[float, Side]:
    """Return the error after parameters have moved, to both sides, and the last side.

    A term that compares samples may be 0 with the values that parameters have. One side alone may not show it, as a
    mean may be kept from below 0.
    """
    with measured.moved() as mirror:
        error = _error_at(measured.after_move(), rows)
        if error > TOLERANCE:
            return error, "against"
        mirror()
        return max(error, _error_at(measured.after_move(), columns)), "along"


def _error_at(measured: Measurement, parts: Parts) -> float:
    """Return the error of one partition; infinite without a gradient to compare."""
    return measured.error([parts]) if 0 < measured.norm() < inf else inf


def widened(layout: Layout, dtype: torch.dtype = torch.float32) -> Layout:
    """Return a copy of a batch, in ``dtype`` where it is narrower."""
    return Layout(map_tensors(layout.batch, lambda tensor: widen(tensor, dtype)), layout.count, layout.lists)


def _read_generators(device: torch.device) -> bytes:
    """Return the states of all generators that a step may draw from."""
    host = HostRandomState.capture()
    which = () if device.type == "mps" else (device,)  # there is one, and before torch 2.13 its functions take none
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(*which).tolist()]
    return pickle.dumps((torch.get_rng_state().tolist(), own, host.python, host.numpy))


def _differ(layout: Layout) -> bool:
    rows = [[*leaves_of(layout.take(range(index, index + 1)))] for index in range(layout.count)]
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
