"""Compares one optimizer step after a whole batch with one after its parts, both on the same gradient.

DP-SGD reads the gradients of single samples, K-FAC reads statistics that hooks gather in each pass. If the batch is
split they read something else, though ``.grad`` is exact. So ``.grad`` gets the first run's numbers in all runs, and
only what the optimizer reads beside it can make the parameters differ. Optimizers of torch read ``.grad`` alone.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence

import torch

from autobatch._wrappers import members_of
from autobatch.batch.samples import Layout
from autobatch.errors import DoesNotFit
from autobatch.exactness.determinism import deterministic, widened
from autobatch.exactness.gradients import relate
from autobatch.exactness.measurement import Measurement, Parts, ranges_of
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.step.model_info import name_optimizer
from autobatch.step.workload import Workload
from autobatch.undo.training_state import TrainingState

_log = logging.getLogger("autobatch")

# Relative to the update of a parameter. An optimizer that reads ``.grad`` alone makes the same update bit for bit.
_TOLERANCE = 1e-3
_REPEATS = 3.0  # the parts are blamed if they differ this many times more than the whole does when it runs again
_VALUES = 4096  # number of values of each parameter that are compared: they are held in host memory
_RATE = 1e-3  # learning rate of the compared step if a warmup begins at 0: nothing would move


def check_update(verdict: Verdict, workload: Workload, layout: Layout, device: Device, state: TrainingState) -> Verdict:
    """Return the verdict of a split whose gradient is exact; inexact if the optimizer makes another update of it.

    It runs two optimizer steps, each from ``state``, and a third one if they differ.
    """
    members = [] if workload.optimizer is None else members_of(workload.optimizer)
    if all(type(member).__module__.startswith("torch.optim") for member in members):
        return verdict
    # One sample and the others: if DP-SGD clips all samples of two halves, it hides that their shares scale them.
    handled = sys.exc_info()[1]
    sizes: tuple[int, ...] = (1, verdict.samples - 1)
    if all(sizes[0] != parts[0] for parts in verdict.partitions):  # the model cannot run one sample
        sizes = verdict.partitions[0]
    try:
        error = _compare(workload, layout.spread(verdict.samples), device, state, ranges_of(sizes))
    except Exception as raised:  # noqa: BLE001 - trials have stepped it: the comparison fails, not the user's step
        reason = describe_error(raised, handled=handled)
        if not is_oom(raised, handled=handled) and not isinstance(raised, DoesNotFit):
            _log.info("the optimizer's update was not compared: %s", reason)
        error = 0.0
    _rewind(state, device)  # only now, after the ``except`` block, are the failed run's frames gone
    if error <= _TOLERANCE:
        return verdict
    cause = (
        f"the update differs though the gradient does not: the optimizer ({name_optimizer(workload.optimizer)}) reads "
        f"more than .grad (such as gradients of single samples, or what hooks gather in each pass), which is another "
        f"for each micro-batch: use an optimizer that reads .grad alone, or a target_batch that fits at once"
    )
    found = {"exact": False, "relative_error": error, "causes": (cause,), "partitions": (sizes,)}
    return verdict.model_copy(update=found)


def _rewind(state: TrainingState, device: Device) -> None:
    state.reset_optimizer()
    state.rewind()
    device.reclaim()


@torch.enable_grad()
def _compare(workload: Workload, layout: Layout, device: Device, state: TrainingState, parts: Parts) -> float:
    """Return the error of the worst parameter's update; 0 if the update is another each time."""
    whole, optimizer, random = ranges_of((layout.count,)), workload.optimizer, SampleNumbers()
    gradients: list[torch.Tensor | None] = []
    before: list[torch.Tensor] = []

    def values_after(parts: Parts) -> list[torch.Tensor]:
        """Return values of each parameter after one step on the samples in these parts."""
        _rewind(state, device)
        parameters: Sequence[torch.Tensor] = workload.parameters()
        # Inside it the optimizer too draws the same numbers, whatever the passes drew.
        with deterministic(workload.model, parameters, random=random):
            before[:] = _values_of(parameters)
            Measurement(workload, device, widened(layout), random).accumulate(parts)
            parameters = workload.parameters()  # a forward pass may have made some
            if not gradients:
                gradients.extend(None if one.grad is None else one.grad.to("cpu", copy=True) for one in parameters)
            # Gradients of whole and parts differ by rounding, which Adam makes large if a gradient is nearly 0.
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
            for group in optimizer.param_groups:  # type: ignore[union-attr]
                if isinstance(group.get("lr"), float | int | torch.Tensor) and not group["lr"]:
                    group["lr"] = group["lr"] + _RATE
            optimizer.step()  # type: ignore[union-attr]
            values = _values_of(parameters)
            workload.drop_gradients()  # before the block ends: their dtype may be another than the parameter's then
        return values

    once, divided = values_after(whole), values_after(parts)
    error = max(map(_error_of, divided, once, before), default=0.0)
    if error > _TOLERANCE and _distance(divided, once) <= _REPEATS * _distance(values_after(whole), once):
        _log.info("the optimizer's update was not compared: it is another each time")
        return 0.0
    return error


@torch.no_grad()
def _values_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return some values of each parameter, in host memory, float64."""
    found = []
    for parameter in parameters:
        values = (torch.view_as_real(parameter) if parameter.is_complex() else parameter).reshape(-1)
        found.append(values[:: -(-values.numel() // _VALUES) or 1].to("cpu", torch.float64, copy=True))
    return found


def _error_of(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> float:
    """Return the error of a parameter's update, relative to its length."""
    apart = float((found - expected).norm())
    error = relate(apart, max(float((expected - before).norm()), float((found - before).norm())))
    return error if math.isfinite(error) else 0.0


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    return math.hypot(*(float((one - other).norm()) for one, other in zip(first, second, strict=True)))
