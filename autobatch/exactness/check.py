"""One check of a split: a few samples whole against divided, by the code that trains, on a step that is held still.

Covers the order of things: float32 first; where that says inexact, float64, and then the causes. And what becomes of
errors and of memory that ends. Does not cover measuring (``measurement``) nor telling causes apart (``diagnosis``).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from autobatch.batch.layout import Layout, map_tensors
from autobatch.batch.tree import is_array, leaves_of
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.diagnosis import find_causes, find_unruly_generators, fixed_statistics
from autobatch.exactness.gradients import total
from autobatch.exactness.measurement import Measurement, Sizes, partitions_of
from autobatch.exactness.numbering import Numbering
from autobatch.exactness.rounding import TOLERANCE
from autobatch.exactness.stillness import still, widen
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import ModuleError, Verdict
from autobatch.state.rewind_point import RewindPoint
from autobatch.step.batch_norm import blame_batch_norms
from autobatch.step.workload import Workload

__all__ = ["Check"]

_log = logging.getLogger("autobatch")


class _NoRoomError(Exception):
    """Memory ended before a sample was run, so fewer of them do not help."""


@dataclass(frozen=True)
class _Doubt:
    """A verdict of float32 that a split is not exact, and what is to be looked at again."""

    verdict: Verdict
    sizes: Sequence[float]
    apart: dict[Sizes, list[float]]


@dataclass(frozen=True)
class Check:
    """Compares samples of one workload whole against split. Whoever runs it puts the model back.

    Attributes:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which some are taken, evenly from first to last.
        device: Where.
        most: How many are taken; fewer where memory ends.
        after_trials: Whether the step is known to run as it is: then what it raises here comes from being held still or
            divided, and is a reason for no verdict. And then it is quick: where BatchNorm explains why the first
            division is not exact, nothing else is looked for.
    """

    workload: Workload
    layout: Layout
    device: Device
    most: int
    after_trials: bool = False

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
        except _NoRoomError as ended:
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
        with self._hold_still(torch.float32) as draws:
            measured = self._measure(samples, torch.float32, draws)
            obstacle = _find_obstacle(measured)
            found = self._compare(measured) if obstacle is None else _unchecked(obstacle)
        return found if isinstance(found, Verdict) else self._look_again(found)

    def _compare(self, measured: Measurement) -> Verdict | _Doubt:
        partitions = _divide(measured)
        if not partitions:
            samples = measured.layout.count
            return _unchecked(
                f"single samples cannot be run by themselves, and {samples} are too few to divide otherwise"
            )
        if self.after_trials and (blamed := _blame_batch_norm(measured, partitions[0])) is not None:
            return blamed
        verdict = _conclude(measured, partitions)
        if verdict.exact:
            return verdict
        unruly = find_unruly_generators(measured)
        if unruly is not None:
            return _unchecked(unruly)
        return _Doubt(verdict, measured.scales().sizes, {sizes: measured.apart(sizes) for sizes in partitions})

    def _look_again(self, doubt: _Doubt) -> Verdict:
        """In float64: a difference that shrinks with the rounding was rounding. float32's word stands if that fails."""
        try:
            return self._confirm(doubt, torch.float64)
        except Exception as error:  # noqa: BLE001 - no room for float64, or a step that insists on float32
            _log.info("autobatch: the check was not repeated in float64: %s", describe_error(error))
        self.device.reclaim()
        return self._confirm(doubt, torch.float32)

    def _confirm(self, doubt: _Doubt, dtype: torch.dtype) -> Verdict:
        verdict = doubt.verdict
        with self._hold_still(dtype) as draws:
            measured = self._measure(verdict.samples, dtype, draws, diagnoses=True)
            if dtype is torch.float64:
                confirmed = _absolve(doubt, measured)
                if confirmed is not None:
                    return confirmed
            modules = _find_modules(measured, verdict.partitions)
            error = modules[0].relative_error if modules else verdict.relative_error
            found = {"relative_error": error, "modules": modules, "causes": self._explain(measured, verdict.partitions)}
            return verdict.model_copy(update=found)

    def _explain(self, measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
        """The causes. That none could be found changes nothing of the verdict."""
        handled = sys.exc_info()[1]
        try:
            return find_causes(measured, partitions)
        except Exception as error:
            if is_oom(error, handled=handled) or isinstance(error, DoesNotFit):
                raise
            _log.exception("autobatch: looking for the cause of an inexact split failed")
            return (f"its cause could not be found ({type(error).__name__}; its text is in the log)",)

    @contextmanager
    def _hold_still(self, dtype: torch.dtype) -> Iterator[Numbering]:
        handled = sys.exc_info()[1]
        with ExitStack() as stack:
            try:
                draws = stack.enter_context(still(self.workload.model, self.workload.parameters(), dtype))
            except Exception as error:
                if not is_oom(error, handled=handled):
                    raise
                reason = describe_error(error, handled=handled)
                raise _NoRoomError(f"there is no room for the model in float32 ({reason})") from None
            yield draws

    def _measure(self, samples: int, dtype: torch.dtype, draws: Numbering, *, diagnoses: bool = False) -> Measurement:
        batch = map_tensors(self.layout.spread(samples).batch, lambda tensor: widen(tensor, dtype))
        layout = Layout(batch, samples, self.layout.lists)
        checkpoint = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        return Measurement(self.workload, self.device, layout, checkpoint, draws, diagnoses=diagnoses)

    def _run_as_it_is(self, samples: int) -> None:
        """Let what the step raises out, where it raises without being held still as well."""
        batch = self.layout.spread(samples).batch
        layout = Layout(batch, samples, self.layout.lists)
        checkpoint = RewindPoint([*self.workload.model.modules()], self.device.torch_device)
        Measurement(self.workload, self.device, layout, checkpoint, Numbering()).whole()


def _find_obstacle(measured: Measurement) -> str | None:
    """Why there is nothing to compare with."""
    samples = measured.layout.count
    if all(tensor is None for tensor in measured.whole().tensors) or measured.size() == 0:
        return f"{samples} samples of the batch count for nothing: no gradient to compare"
    if not math.isfinite(measured.size()):
        return f"the gradient of {samples} samples of the batch at once is not finite"
    return None


def _divide(measured: Measurement) -> list[Sizes]:
    """Divisions that run: BatchNorm refuses a single sample, and so does what squeezes its batch."""
    partitions = partitions_of(measured.layout.count, 1)
    handled = sys.exc_info()[1]
    try:
        measured.apart(partitions[0])
    except Exception as error:
        if isinstance(error, AutobatchError) or is_oom(error, handled=handled):
            raise
        return partitions_of(measured.layout.count, 2)
    return partitions


def _blame_batch_norm(measured: Measurement, sizes: Sizes) -> Verdict | None:
    error = measured.error(sizes)
    if error <= TOLERANCE:
        return None
    with fixed_statistics(measured) as (names, fixed):
        if not names or fixed.error(sizes) > TOLERANCE:
            return None
    modules = _find_modules(measured, (sizes,))
    return Verdict(
        exact=False,
        relative_error=modules[0].relative_error if modules else error,
        causes=(blame_batch_norms(names),),
        samples=measured.layout.count,
        partitions=(sizes,),
        modules=modules,
    )


def _conclude(measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
    error, samples = _find_error(measured, partitions), measured.layout.count
    return Verdict(exact=error <= TOLERANCE, relative_error=error, samples=samples, partitions=tuple(partitions))


def _find_error(measured: Measurement, partitions: Sequence[Sizes]) -> float:
    """The worst division's, where draws of several rows a sample are read in the way in which that is smaller."""
    error = max(measured.errors(partitions))
    if error > TOLERANCE and measured.draws.flattened:
        measured.draws.samples_last = True
        measured.forget_parts()
        if (turned := max(measured.errors(partitions))) <= TOLERANCE:
            return turned
        measured.draws.samples_last = False
        measured.forget_parts()
    return error


def _absolve(doubt: _Doubt, measured: Measurement) -> Verdict | None:
    """Exact, where nothing is left of the difference.

    Relative to what was there in float32: where a whole gradient is next to nothing, so is its rounding.
    """
    verdict, errors = doubt.verdict, []
    for sizes in sorted(verdict.partitions, key=lambda sizes: total(doubt.apart[sizes]), reverse=True):
        pairs = zip(doubt.sizes, doubt.apart[sizes], strict=True)
        measured.judge_against([max((size for size in pair if math.isfinite(size)), default=0.0) for pair in pairs])
        errors.append(_find_error(measured, [sizes]))
        if errors[-1] > TOLERANCE:
            measured.judge_against(())
            return None
    return verdict.model_copy(update={"exact": True, "relative_error": max(errors)})


def _find_modules(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[ModuleError, ...]:
    """Modules with parameters that differ, and by how much in the worst division, the worst first."""
    measured.errors(partitions)
    names = {id(parameter): name for name, parameter in measured.workload.model.named_parameters()}
    parameters, worst = measured.workload.parameters(), dict[str, float]()
    for sizes in partitions:
        for index, error in measured.scales().report(measured.apart(sizes)).items():
            module = _module_of(names.get(id(parameters[index])), measured.workload.model)
            worst[module] = max(worst.get(module, 0.0), error)
    ordered = sorted(worst.items(), key=lambda found: -found[1])
    return tuple(ModuleError(module=module, relative_error=error) for module, error in ordered)


def _module_of(name: str | None, model: nn.Module) -> str:
    if name is None:
        return "a parameter of the optimizer alone"
    return name.rpartition(".")[0] or type(model).__name__


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
