"""``verify``: is splitting this step exact, and if not, why?

Covers the comparison of a few samples whole against split, by the code that trains, on a step that is held still. Does
not cover a count that is consistent but not the intended one: class weights with samples as their count split exactly.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.diagnosis import TOLERANCE, find_causes
from autobatch.exactness.measurement import Measurement, Sizes, partitions_of, size_of
from autobatch.exactness.stillness import still, widen
from autobatch.memory.container import read_host_memory
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict
from autobatch.request import find_device
from autobatch.workload.batches import Layout, map_tensors
from autobatch.workload.checkpoint import Checkpoint
from autobatch.workload.default_step import default_step
from autobatch.workload.example import find_example
from autobatch.workload.nests import is_array, leaves_of
from autobatch.workload.step import Step, Weigh, Workload
from autobatch.workload.training_state import TrainingState

__all__ = ["check_split", "verify"]

_MOST_SAMPLES = 16
"""Enough for four quarters of four, which is what telling the causes apart takes; few enough to be quick."""


def verify(
    model: nn.Module,
    batch: Any,
    step: Step | None = None,
    weigh: Weigh | None = None,
    *,
    device: torch.device | str | Device | None = None,
) -> Verdict:
    """Whether splitting a step into micro-batches gives the whole batch's gradient; if not, why.

    At most 16 samples are run whole and in several divisions, in float32 or wider, with dropout and random draws held
    still, in train mode. Afterwards everything is bit for bit as before.

    Args:
        model: The model, on its device.
        batch: An example batch of at least 2 samples that differ, or a Dataset or DataLoader; as for ``fit``.
        step: ``step(model, micro_batch)``; as for ``fit``.
        weigh: What the mean is over; as for ``fit``.
        device: Where the model is; default: where its parameters are.

    Returns:
        The verdict; ``unchecked`` says why, where there is none.

    Raises:
        InvalidArgument: An argument cannot mean anything.
        InvalidBatch: The batch cannot be counted, or ``weigh`` does not count.
        InvalidStep: What the step returns is no loss. Whatever the step itself raises comes out unchanged.
    """
    workload = Workload(model, step or default_step, weigh)
    memory = find_device(workload.parameters(), type(model).__name__, device)
    layout = find_example(model, batch, _MOST_SAMPLES).layout
    host_bytes = read_host_memory().available_bytes // 2
    with TrainingState(model, None, memory.torch_device, host_bytes=host_bytes):
        if not model.training:
            model.train()
        verdict = check_split(workload, layout, memory)
    memory.reclaim()
    return verdict


def check_split(workload: Workload, layout: Layout, device: Device) -> Verdict:
    """``verify`` for whoever holds a ``TrainingState`` of the workload and puts it back: the model is changed here.

    Args:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which the first 16 are taken; fewer where memory ends.
        device: Where.
    """
    started = time.perf_counter()
    check = _Check(workload, layout, device, widened=_is_widened(workload))
    for parameter in workload.parameters():
        parameter.grad = None
    with torch.enable_grad(), still(workload.model, workload.parameters()):
        verdict = check.run()
    return verdict.model_copy(update={"seconds": time.perf_counter() - started})


def _is_widened(workload: Workload) -> bool:
    tensors = (*workload.parameters(), *workload.model.buffers())
    return any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)


@dataclass(frozen=True)
class _Check:
    workload: Workload
    layout: Layout
    device: Device
    widened: bool

    def run(self) -> Verdict:
        samples, reason = min(self.layout.count, _MOST_SAMPLES), ""
        while samples >= 2:
            if not _differ(self.layout, samples):
                return _unchecked(f"the first {samples} samples are all alike: pass a batch of samples that differ")
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
            return self._compare(samples), ""
        except DoesNotFit as ended:
            return None, str(ended)
        except Exception as error:
            if is_oom(error, handled=handled):
                return None, describe_error(error, handled=handled)
            if self.widened and isinstance(error, RuntimeError) and "dtype" in str(error):
                return _unchecked(f"the model was run in float32, where the step does not run ({error})"), ""
            raise

    def _compare(self, samples: int) -> Verdict:
        measured = self._measure(samples)
        whole = measured.whole()
        if all(tensor is None for tensor in whole.tensors):
            return _unchecked(f"the first {samples} samples count for nothing: no gradient to compare")
        if not math.isfinite(size_of(whole)):
            return _unchecked(f"the gradient of the first {samples} samples at once is not finite")
        partitions, errors = _divide(measured)
        if not partitions:
            return _unchecked(
                f"single samples cannot be run by themselves, and {samples} are too few to divide otherwise"
            )
        exact = max(errors) <= TOLERANCE
        return Verdict(
            exact=exact,
            relative_error=max(errors),
            causes=() if exact else find_causes(measured, partitions),
            samples=samples,
            partitions=tuple(partitions),
        )

    def _measure(self, samples: int) -> Measurement:
        layout = Layout(map_tensors(self.layout.take(0, samples), widen), samples, self.layout.lists)
        checkpoint = Checkpoint([*self.workload.model.modules()], self.device.torch_device)
        return Measurement(self.workload, self.device, layout, checkpoint)


def _divide(measured: Measurement) -> tuple[list[Sizes], list[float]]:
    """Divisions that run, and their errors: BatchNorm refuses a single sample with a ValueError."""
    partitions = partitions_of(measured.layout.count, 1)
    try:
        return partitions, measured.errors(partitions)
    except AutobatchError:
        raise
    except ValueError:
        partitions = partitions_of(measured.layout.count, 2)
    return partitions, measured.errors(partitions)


def _differ(layout: Layout, samples: int) -> bool:
    rows = [[*leaves_of(layout.take(index, index + 1))] for index in range(samples)]
    return any(not all(map(_same, first, second)) for first, second in pairwise(rows))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if is_array(first) and is_array(second):
        return first.shape == second.shape and bool((first == second).all())
    return bool(first is second or type(first) is not type(second) or first == second)


def _unchecked(reason: str) -> Verdict:
    return Verdict(exact=False, relative_error=0.0, unchecked=reason)
