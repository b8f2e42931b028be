"""Compares the gradient of some samples with that of their parts, by the code that trains.

1. First cheaply, in float32: the step as it is, or repeatable if it draws. If that is exact, it is all.
2. Otherwise in float64, in a repeatable step, in every kind of partition: there rounding is gone.
3. If that is exact and the cheap comparison was not, a difference may be hidden by the values of the parameters. So
   float64 looks again, with parameters moved as the cheap comparison had moved them.
4. If it differs, causes are looked for.

An error of the step ends no ``fit``: trials have run it, so the verdict says why nothing was compared.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from autobatch._formatting import plural
from autobatch._user_errors import contextmanager
from autobatch.batch.samples import Layout
from autobatch.batch.tree import is_array, leaves_of, tensors_of
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.determinism import deterministic, full_precision, widened
from autobatch.exactness.diagnosis import find_causes, find_uncontrolled_generators, judge_batch_norm
from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.measurement import Measurement, Parts, Side, Sizes, ranges_of
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.step.model_info import batch_norms_in_train_mode
from autobatch.step.workload import Workload
from autobatch.undo.gradients import NARROW
from autobatch.undo.random_state import RandomState

_log = logging.getLogger("autobatch")

_SURELY = 0.1  # an error of float32 that no rounding has, not even of bfloat16. It is believed if no cause is asked for
_HIDDEN = " (it makes no difference with the values that parameters have now, and does once they have moved)"


@dataclass
class SplitComparison:
    """Compares samples of one workload whole against split. The model is changed: the caller restores it.

    Attributes:
        layout: Samples, of which some are taken from first to last (``Layout.spread``).
        after_trials: Whether the step is known to run, so that its errors make the result "unchecked".
        explains: Whether causes are looked for.
        order: Rows in the order in which steps take them, if it differs from the batch's order.
        exact_at: Number of samples for which a smaller comparison has found the split exact; 0 if none has.
        is_free: Whether the step draws nothing and is not in half precision; ``None`` before it has run.
        writes: Whether the step writes into memory that has to be put back; ``None`` before it has run.
    """

    workload: Workload
    layout: Layout
    device: Device
    after_trials: bool = False
    explains: bool = True
    order: Sequence[int] | None = None
    exact_at: int = 0
    is_free: bool | None = None
    writes: bool | None = None

    @torch.enable_grad()
    def attempt(self, samples: int, partitions: Sequence[Sizes] = ()) -> tuple[Verdict | None, str]:
        """Return the verdict on these partitions, or on the usual ones; or ``None``, and why memory ran out."""
        handled = sys.exc_info()[1]
        try:
            return self._compare(self.layout.spread(samples, self.order), partitions), ""
        except Exception as error:
            reason, is_ours = describe_error(error, handled=handled), isinstance(error, AutobatchError)
            if isinstance(error, DoesNotFit) or is_oom(error, handled=handled):
                return None, str(error) if is_ours else reason
            if not self.after_trials and (is_ours or self.is_free is None):
                raise
        if self.exact_at:
            return unchecked(f"more of them raise {self._show(reason)}"), ""
        if not self.after_trials:
            with self._measure(self.layout.spread(samples, self.order)) as measured:
                measured.whole()  # raises the step's own error if it is raised without our changes too
        return unchecked(reason if is_ours else f"the step cannot be made deterministic ({self._show(reason)})"), ""

    def _compare(self, few: Layout, partitions: Sequence[Sizes]) -> Verdict:
        if not partitions and not samples_differ(few):
            return unchecked(f"{few.count} samples of the batch are all alike: pass a batch of samples that differ")
        # 1. A rounding error of float32 is no proof, so only an exact split is believed.
        quick, moved = self._look_quickly(few, partitions)
        if quick is not None:
            return quick
        # 2. float64 decides.
        verdict = self._look_closely(few, partitions or partitions_of(few.count, 1))
        if not (verdict.exact and moved):
            return verdict
        # 3. With the parameters that the quick look had moved.
        try:
            hidden = self._look_closely(few, partitions_of(few.count, 1), moved)
        except Exception as error:  # noqa: BLE001 - a step that does not run with other values
            _log.info("the check was not repeated with moved parameters: %s", describe_error(error))
            return verdict
        if hidden.exact or hidden.unchecked:
            return verdict
        causes = (*hidden.causes[:-1], *(f"{cause}{_HIDDEN}" for cause in hidden.causes[-1:]))
        return hidden.model_copy(update={"causes": causes})

    def _look_quickly(self, few: Layout, partitions: Sequence[Sizes]) -> tuple[Verdict | None, Side]:
        """Compare the step as it is; a repeatable one in float32 if it draws, or is in half precision.

        Returns the verdict if that shows it, and how parameters had moved.
        """
        try:
            for dtype in (torch.float32,) if self.is_free is False else (None, torch.float32):
                with self._measure(few, dtype) as measured:
                    if dtype is not None or self._find_free(measured):
                        return self._judge_quickly(measured, partitions)
        except Exception as error:
            if isinstance(error, AutobatchError) or self.is_free is None:
                raise
            # A step that refuses single samples, or such values.
            _log.debug("the quick comparison was left: %s", describe_error(error))
        return None, ""

    def _find_free(self, measured: Measurement) -> bool:
        """Return whether the step draws nothing and is not in half precision; the first run of all shows it."""
        if self.is_free is None:
            before = _read_generators(self.device.torch_device)
            measured.whole()
            self.writes = measured.writes
            is_still = _read_generators(self.device.torch_device) == before
            tensors = [*self.workload.parameters(), *tensors_of(measured.layout.batch)]
            self.is_free = is_still and not any(tensor.dtype in NARROW for tensor in tensors)
        return self.is_free

    def _judge_quickly(self, measured: Measurement, partitions: Sequence[Sizes]) -> tuple[Verdict | None, Side]:
        count = measured.layout.count
        moved: Side = ""
        if not 0 < measured.norm() < math.inf:
            return None, ""
        if batch_norms_in_train_mode(self.workload.model):
            sizes = (partitions or partitions_of(count, 2) or partitions_of(count, 1))[0]
            return (judge_batch_norm(measured, ranges_of(sizes)) if self.after_trials else None), ""
        if partitions:
            error = measured.error([ranges_of(sizes) for sizes in partitions])
        else:
            sides = crossings(count)
            partitions = [*dict.fromkeys(tuple(map(len, parts)) for parts in sides)]
            error, moved = measured.error_after_moves(*sides)
        if error <= TOLERANCE or (error > _SURELY and not self.explains):
            return _verdict(error, count, partitions), moved
        return None, moved

    def _look_closely(self, few: Layout, partitions: Sequence[Sizes], moved: Side = "") -> Verdict:
        """Return the verdict of float64, in which a difference of rounding is gone; of float32 if that fails."""
        handled = sys.exc_info()[1]
        try:
            with self._measure(few, torch.float64, moved) as measured:
                return self._judge(measured, partitions)
        except Exception as error:  # noqa: BLE001 - too little memory for float64, or a step that insists on float32
            _log.info("the check was not repeated in float64: %s", describe_error(error, handled=handled))
        self.device.reclaim()
        with self._measure(few, torch.float32, moved) as measured:
            return self._judge(measured, partitions)

    def _judge(self, measured: Measurement, sizes: Sequence[Sizes]) -> Verdict:
        """Return the verdict of these partitions; of larger parts if a single sample cannot run."""
        handled, samples, partitions = sys.exc_info()[1], measured.layout.count, [ranges_of(one) for one in sizes]
        if not 0 < measured.norm() < math.inf:
            nothing = f"{samples} samples of the batch count for nothing: no gradient to compare"
            infinite = f"the gradient of {samples} samples of the batch at once is not finite"
            return unchecked(infinite if measured.norm() else nothing)
        measured.keeps_values, refused = self.explains, 0
        try:
            error = measured.error(partitions)
        except Exception as raised:
            refused, reason = measured.running, describe_error(raised, handled=handled)
            if refused == samples or isinstance(raised, AutobatchError) or is_oom(raised, handled=handled):
                raise
        larger = partitions_of(samples, 2) if refused == 1 and sizes == partitions_of(samples, 1) else None
        if larger:  # as BatchNorm does, or a model that squeezes its batch
            return self._judge(measured, larger)
        if larger is not None:
            return unchecked(f"single samples cannot be run, and {samples} are too few to divide otherwise")
        if refused:
            measured.repeat_error()  # raises if all samples do not run any more either
            return unchecked(f"the step raised an error at {plural(refused, 'sample')} ({self._show(reason)})")
        verdict = _verdict(error, samples, sizes)
        return verdict if verdict.exact else self._judge_difference(measured, partitions, verdict)

    def _judge_difference(self, measured: Measurement, partitions: Sequence[Parts], verdict: Verdict) -> Verdict:
        """Add the modules and causes; nothing is compared if generators that nobody controls may be the reason."""
        if uncontrolled := find_uncontrolled_generators(measured):
            return unchecked(uncontrolled)
        modules = measured.find_modules(partitions)
        error = modules[0].relative_error if modules else verdict.relative_error
        causes = self._explain(measured, partitions) if self.explains else ()
        return verdict.model_copy(update={"relative_error": error, "modules": modules, "causes": causes})

    def _explain(self, measured: Measurement, partitions: Sequence[Parts]) -> tuple[str, ...]:
        """Return the causes. If looking for them fails, the verdict stands."""
        handled = sys.exc_info()[1]
        try:
            is_by_number = self.exact_at and self.order is None
            exact = widened(self.layout.spread(self.exact_at), torch.float64) if is_by_number else None
            return find_causes(measured, partitions, exact)
        except Exception as error:
            if is_oom(error, handled=handled) or isinstance(error, DoesNotFit):
                raise
            _log.exception("looking for the cause of an inexact split failed")
            return (f"its cause could not be found ({type(error).__name__}; its text is in the log)",)

    @contextmanager
    def _measure(self, few: Layout, dtype: torch.dtype | None = None, moved: Side = "") -> Iterator[Measurement]:
        """Yield a measurement of the step as it is, or of a repeatable one, after parameters have moved."""
        model, random = self.workload.model, None
        with ExitStack() as stack:
            if dtype is None:
                stack.enter_context(full_precision())
            else:
                random = stack.enter_context(deterministic(model, self.workload.parameters(), dtype))
                few = widened(few, dtype)
            if moved:
                mirror = stack.enter_context(Measurement(self.workload, self.device, few, random).moved())
                if moved == "along":
                    mirror()
            measured = Measurement(self.workload, self.device, few, random, writes=self.writes)
            stack.callback(measured.start.restore)  # the next comparison begins with the state of this one
            yield measured

    def _show(self, reason: str) -> str:
        """Return an error's text; its type alone if the verdict is stored with a plan, as the text may be anything."""
        if not (self.after_trials or self.exact_at):
            return reason
        _log.info("the split could not be checked: %s", reason)
        return f"{reason.partition(':')[0]}; its text is in the log"


def unchecked(reason: str) -> Verdict:
    """Return a verdict that says why there is none."""
    return Verdict(exact=False, relative_error=0.0, unchecked=reason)


def _verdict(error: float, samples: int, partitions: Sequence[Sizes]) -> Verdict:
    return Verdict(exact=error <= TOLERANCE, relative_error=error, samples=samples, partitions=tuple(partitions))


def _read_generators(device: torch.device) -> bytes:
    """Return the states of all generators that a step may draw from."""
    state = RandomState(device)
    of_device = None if state.of_device is None else state.of_device.tolist()
    return pickle.dumps((state.cpu.tolist(), of_device, state.python, state.numpy))


# ------------------------------------------------------------------------------------- the partitions of a few samples


def crossings(samples: int) -> tuple[Parts, Parts]:
    """Return two partitions in few parts of unlike sizes: the first sample, then rows, or columns, of a square.

    Each two samples are in different parts once.
    """
    width = max(1, math.ceil(math.sqrt(samples - 1)))
    others = range(1, samples)
    rows = [others[start : start + width] for start in range(0, len(others), width)]
    columns = [[0, *others[::width]], *([*others[start::width]] for start in range(1, width))]
    by_row = (range(1), *rows)
    return by_row, tuple(columns) if len(columns) > 1 else by_row


def partitions_of(samples: int, smallest: int) -> list[Sizes]:
    """Return the partitions of a few samples: a small part first, halves, and the smallest parts there can be.

    All are needed. A mean that is stated with a wrong count looks right in two halves, and fails only in uneven parts.
    Two samples that depend on each other show it only if they are in different parts. If two samples are the fewest
    that can run, cuts are after 3, 5, 7 and so on: rows 2i and 2i + 1 may be a pair.
    """
    if samples < 2 * smallest:
        return []
    first = smallest if smallest == 1 or samples < 2 * smallest + 1 else smallest + 1
    parts, rest = divmod(samples - first, smallest)
    finest = (first, *[smallest] * (parts - 1), smallest + rest)
    return [*dict.fromkeys([(smallest, samples - smallest), (samples - samples // 2, samples // 2), finest])]


def samples_differ(layout: Layout) -> bool:
    rows = [[*leaves_of(layout.take(range(index, index + 1)))] for index in range(layout.count)]
    return not all(_same(*pair) for first, second in pairwise(rows) for pair in zip(first, second, strict=False))


def _same(first: Any, second: Any) -> bool:
    try:
        if isinstance(first, torch.Tensor) or is_array(first):
            return bool(first.shape == second.shape and (first == second).all())
        return bool(first is second or type(first) is not type(second) or first == second)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # objects that compare their arrays value by value
        return False
