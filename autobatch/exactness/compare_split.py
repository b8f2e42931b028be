"""Compares the gradient of a few samples with that of their parts, in a deterministic step, by the code that trains.

Covers the order of things: float32 first; where that says inexact, float64, and then the causes. Also what follows from
errors and from memory that ends. Does not cover measuring (``measurement``), the scale on which a parameter is judged
(``gradients``) nor finding causes (``diagnosis``).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, Literal

import torch
from torch import nn

from autobatch._formatting import plural
from autobatch._user_errors import contextmanager
from autobatch.batch.layout import Layout, map_tensors
from autobatch.batch.tree import is_array, leaves_of
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.determinism import deterministic, widen
from autobatch.exactness.diagnosis import find_causes, find_uncontrolled_generators, judge_batch_norm
from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.moved_parameters import stepping
from autobatch.exactness.partitions import Sizes, partitions_of
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.step.workload import Workload
from autobatch.undo.module_state import ModuleState
from autobatch.undo.undo import Undo

__all__ = ["SplitComparison"]

_log = logging.getLogger("autobatch")


_SURELY = 1e-2
"""An error of float32 that no rounding has: it needs no float64 to be believed, where no cause is asked for."""

_MOST_HIDDEN = 8
"""Samples that are compared again with parameters that have moved."""

_HIDDEN = " (it makes no difference with the values that parameters have now, and does once they have moved)"


class _ModelDoesNotFit(DoesNotFit):
    """Memory ended before a sample was run, so fewer samples would not fit either."""


@dataclass(frozen=True)
class SplitComparison:
    """Compares samples of one workload whole against split. The model is changed: the caller restores it.

    Attributes:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which some are taken, from first to last (``batch.chosen_rows``).
        device: Where.
        most: How many are taken; fewer where memory ends.
        after_trials: Whether the step is known to run, so that an error comes from being made deterministic or split,
            and the result is "unchecked". And where BatchNorm explains the first partition, no cause is looked for.
        exact_at: The number of samples for which a smaller comparison has found the split exact; 0 where none has.
        is_reordered: Whether the smaller comparison took samples in another order: then it may also be which of them
            are together, not only how many, that makes a difference.
        trim: Makes a batch one whose parts are trimmed; the whole of it is not.
        moves: Whether parameters have moved while samples are compared: against their gradient, along it or not.
        explains: Whether causes are looked for.
    """

    workload: Workload
    layout: Layout
    device: Device
    most: int
    after_trials: bool = False
    exact_at: int = 0
    is_reordered: bool = False
    trim: Callable[[Layout], Layout] | None = None
    moves: Literal["", "against", "along"] = ""
    explains: bool = True

    def run(self) -> Verdict:
        """The verdict, with its seconds. Raises what the step raises where it is used wrongly, except after trials."""
        started = time.perf_counter()
        for parameter in self.workload.parameters():
            parameter.grad = None
        samples, verdict = min(self.layout.count, self.most), None
        reason = "the batch has one sample, and one cannot be split"
        while samples >= 2 and verdict is None:
            verdict, ended = self.attempt(samples)
            if verdict is None:
                self.device.reclaim()  # only now, after the ``except`` block, are the failed attempt's frames gone
                samples, reason = samples // 2, f"memory ended with two samples at once ({ended})"
        return (verdict or _unchecked(reason)).model_copy(update={"seconds": time.perf_counter() - started})

    @torch.enable_grad()
    def attempt(self, samples: int, partitions: Sequence[Sizes] = ()) -> tuple[Verdict | None, str]:
        """The verdict on these partitions, or on those usually tried; or ``None``, and how memory ended.

        Raises AutobatchError where the step is used wrongly, except after trials, and what the step itself raises.
        """
        handled = sys.exc_info()[1]
        try:
            return self._compare(samples, partitions), ""
        except DoesNotFit as ended:
            is_final = isinstance(ended, _ModelDoesNotFit) and not self.exact_at
            return _unchecked(str(ended)) if is_final else None, str(ended)
        except Exception as error:
            reason = describe_error(error, handled=handled)
            if is_oom(error, handled=handled):
                return None, reason
            if isinstance(error, AutobatchError) and not self.after_trials:
                raise
            is_ours, kind = isinstance(error, AutobatchError), type(error).__name__
        # By its type alone: the verdict is stored with its plan, and the text of the user's error may be anything.
        if self.exact_at:
            _log.info("%d samples at once could not be compared: %s", samples, reason)
            return _unchecked(f"more of them raise {kind}; its text is in the log"), ""
        if is_ours:
            return _unchecked(reason), ""
        if self.after_trials:
            _log.info("the step cannot be made deterministic: %s", reason)
            reason = f"{reason.partition(':')[0]}; its text is in the log"
        else:  # raises the step's error, where it is raised without our changes as well
            self._make_measurement(self.layout.spread(samples), SampleNumbers()).whole()
        return _unchecked(f"the step cannot be made deterministic ({reason})"), ""

    def _compare(self, samples: int, partitions: Sequence[Sizes]) -> Verdict:
        if not partitions and not _differ(self.layout.spread(samples)):
            return _unchecked(f"{samples} samples of the batch are all alike: pass a batch of samples that differ")
        before: dict[Sizes, list[float]] = {}
        moves: Literal["", "against", "along"] = ""
        with self._measuring(samples, torch.float32) as measured:
            verdict = self._judge(measured, partitions)
            if verdict.exact and not (partitions or self.moves):
                moves = _find_hidden(measured)
            is_doubtful = self.explains or verdict.relative_error < _SURELY
            if is_doubtful and not (verdict.exact or verdict.unchecked or verdict.causes):
                apart = {sizes: math.hypot(*measured.differences(sizes)) for sizes in verdict.partitions}
                worst_first = sorted(apart, key=lambda sizes: apart[sizes], reverse=True)
                before = {sizes: measured.reference_norms(sizes) for sizes in worst_first}
            measured.rewind_point.restore()  # the next comparison begins with the state with which this one began
        if moves:
            return self._compare_moved(verdict, moves)
        return self._confirm_or_explain(verdict, before) if before else verdict

    def _compare_moved(self, verdict: Verdict, moves: Literal["against", "along"]) -> Verdict:
        """The verdict with parameters that have moved, where it is that the split is not exact."""
        found, _ = replace(self, moves=moves, after_trials=True).attempt(verdict.samples)
        if found is None or found.exact or found.unchecked:
            return verdict
        return found.model_copy(update={"causes": (*found.causes[:-1], f"{found.causes[-1]}{_HIDDEN}")})

    def _judge(self, measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
        """The verdict of float32; without causes, where it is inexact and has to be confirmed."""
        samples, norm = measured.layout.count, math.hypot(*measured.scales().sizes)
        if norm == 0:
            return _unchecked(f"{samples} samples of the batch count for nothing: no gradient to compare")
        if not math.isfinite(norm):
            return _unchecked(f"the gradient of {samples} samples of the batch at once is not finite")
        return self._judge_unless_refused(measured, partitions or partitions_of(samples, 1))

    def _judge_unless_refused(self, measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
        """The same; or that a part raises an error, where all samples run.

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
            few = f"single samples cannot be run by themselves, and {samples} are too few to divide otherwise"
            return _unchecked(few)
        measured.repeat_error()  # raises, where all samples do not run any more either
        if self.after_trials or self.exact_at:  # by its type alone, as in ``attempt``
            _log.info("the step raised an error at %d samples: %s", refused, reason)
            reason = f"{reason.partition(':')[0]}; its text is in the log"
        return _unchecked(f"the step raised an error at {plural(refused, 'sample')} ({reason})")

    def _judge_partitions(self, measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
        if self.after_trials and (blamed := judge_batch_norm(measured, partitions[0])) is not None:
            return blamed
        error = _find_error(measured, partitions)
        if error > TOLERANCE and (uncontrolled := find_uncontrolled_generators(measured)) is not None:
            return _unchecked(uncontrolled)
        samples, tried = measured.layout.count, tuple(partitions)
        return Verdict(exact=error <= TOLERANCE, relative_error=error, samples=samples, partitions=tried)

    def _confirm_or_explain(self, verdict: Verdict, before: Mapping[Sizes, Sequence[float]]) -> Verdict:
        """In float64: a difference that shrinks with the rounding was rounding. If that fails float32's word stands."""
        try:
            return self._look_again(verdict, before, torch.float64)
        except Exception as error:  # noqa: BLE001 - too little memory for float64, or a step that insists on float32
            _log.info("the check was not repeated in float64: %s", describe_error(error))
        self.device.reclaim()
        return self._look_again(verdict, {}, torch.float32)

    def _look_again(self, verdict: Verdict, before: Mapping[Sizes, Sequence[float]], dtype: torch.dtype) -> Verdict:
        with self._measuring(verdict.samples, dtype, diagnoses=True) as measured:
            # A gradient of nearly 0 is nearly all rounding, so it is judged relative to that of float32 too.
            errors = (_find_error(measured, [sizes], scale) for sizes, scale in before.items())
            exact = [*takewhile(lambda error: error <= TOLERANCE, errors)]
            if before and len(exact) == len(before):
                return verdict.model_copy(update={"exact": True, "relative_error": max(exact)})
            modules = measured.find_modules(verdict.partitions)
            error = modules[0].relative_error if modules else verdict.relative_error
            causes = self._explain(measured, verdict.partitions) if self.explains else ()
            found = {"relative_error": error, "modules": modules, "causes": causes}
            return verdict.model_copy(update=found)

    def _explain(self, measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
        """The causes. Where looking for them fails, the verdict stands."""
        handled = sys.exc_info()[1]
        try:
            exact = None
            if self.exact_at and not self.is_reordered:
                few = self.layout.spread(self.exact_at)
                dtype = torch.float64
                exact = Layout(map_tensors(few.batch, lambda tensor: widen(tensor, dtype)), few.count, few.lists)
            return find_causes(measured, partitions, exact)
        except Exception as error:
            if is_oom(error, handled=handled) or isinstance(error, DoesNotFit):
                raise
            _log.exception("looking for the cause of an inexact split failed")
            return (f"its cause could not be found ({type(error).__name__}; its text is in the log)",)

    @contextmanager
    def _measuring(self, samples: int, dtype: torch.dtype, *, diagnoses: bool = False) -> Iterator[Measurement]:
        """A measurement of samples that are spread over the batch, in a deterministic step."""
        handled = sys.exc_info()[1]
        with ExitStack() as stack:
            try:
                random = stack.enter_context(deterministic(self.workload.model, self.workload.parameters(), dtype))
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
                raise _ModelDoesNotFit(f"the model does not fit in memory in float32 ({reason})") from None
            batch = map_tensors(self.layout.spread(samples).batch, lambda tensor: widen(tensor, dtype))
            layout = Layout(batch, samples, self.layout.lists)
            layout = self.trim(layout) if self.trim else layout
            if self.moves:
                mirror = stack.enter_context(stepping(self._make_measurement(layout, random)))
                if self.moves == "along":
                    mirror()
            yield self._make_measurement(layout, random, diagnoses=diagnoses)

    def _make_measurement(self, layout: Layout, random: SampleNumbers, *, diagnoses: bool = False) -> Measurement:
        rewind_point = Undo(self.workload.model, self.device.torch_device)
        modules = [module for module in self.workload.outside() if isinstance(module, nn.Module)]
        outside = ModuleState([part for module in modules for part in module.modules()])
        return Measurement(self.workload, self.device, layout, rewind_point, outside, random, diagnoses=diagnoses)


def _find_hidden(measured: Measurement) -> Literal["", "against", "along"]:
    """Where parameters have to move for the split to be inexact; "" where it is exact all the same, or does not run.

    What compares samples may be 0 with the values that they have: a policy that is equal to its reference, a new
    adapter, a gate or a last layer that begins at 0. One side alone may not show it: a mean may be kept from below 0.
    """
    samples = measured.layout.count
    half = samples // 2
    # Neighbours, and rows that are half a batch apart, in different parts.
    rows = [0, 2, 4, 1, 3, 5, half, half + 1] if samples > _MOST_HIDDEN else [*range(samples)]
    few = Layout(measured.layout.pick(rows), len(rows), measured.layout.lists)
    sizes = (first := max(1, len(rows) // 3 // 2 * 2 + 1), len(rows) - first)  # odd, as two rows may be a pair
    try:
        with stepping(measured) as mirror:
            if _is_inexact(replace(measured.anew(), layout=few), sizes):
                return "against"
            mirror()
            return "along" if _is_inexact(replace(measured.anew(), layout=few), sizes) else ""
    except Exception as error:  # noqa: BLE001 - too little memory, or a step that refuses such values
        _log.info("the check was not repeated with moved parameters: %s", describe_error(error))
    return ""


def _is_inexact(measured: Measurement, sizes: Sizes) -> bool:
    return math.isfinite(math.hypot(*measured.scales().sizes)) and measured.error([sizes]) > TOLERANCE


def _find_error(measured: Measurement, partitions: Sequence[Sizes], before: Sequence[float] = ()) -> float:
    """The error of the worst partition; if several rows a sample are drawn, with the order of rows that fits better."""
    error = measured.error(partitions, before)
    if error > TOLERANCE and measured.random.flattened:
        measured.random.samples_last = True
        measured.forget()
        if (turned := measured.error(partitions, before)) <= TOLERANCE:
            return turned
        measured.random.samples_last = False
        measured.forget()
    return error


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
