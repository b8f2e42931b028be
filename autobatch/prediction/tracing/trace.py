"""Traces the user's own training step on tensors without memory: what it allocates and frees.

Covers two optimizer steps of two micro-batches each, as the Runner does them: gradients resident from the second
micro-batch on, bfloat16 and float16 gradients summed in float32, optimizer state there in the second step. Does not
cover memory inside one kernel (workspaces), code from ``torch.compile`` (traced uncompiled), steps whose course depends
on values, nor wrappers for several devices. Model (on any device, also ``meta``), optimizer and generators are not
changed, and no value is read.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autobatch.batch.samples import Layout
from autobatch.batch.tree import holds_registered, map_tensors, tensors_of
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.memory.device import collecting_new_objects
from autobatch.prediction.child_process import begin_apart
from autobatch.prediction.parallelism import Parallelism
from autobatch.prediction.timeline import Timeline, TracedStep, align, combine, continue_as
from autobatch.prediction.tracing import autocast
from autobatch.prediction.tracing.failures import TooLong, explain
from autobatch.prediction.tracing.fake_device import DEVICE_TYPE, DeviceNames, present, register, without_waiting
from autobatch.prediction.tracing.fake_model import FakeModel, Location, modules_of
from autobatch.prediction.tracing.fake_step import Circumstances, DryRun
from autobatch.prediction.tracing.gradient_sums import sole_holder
from autobatch.prediction.tracing.recording import FakeMode, Recorder, make_fake
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import is_uninitialized
from autobatch.undo.random_state import RandomState

__all__ = [
    "SIZES",
    "Circumstances",
    "climb",
    "expect_events",
    "explain_loss",
    "find_most_events",
    "trace",
    "trace_timeline",
]

SIZES = (2, 67)
"""Views of size 1 skip copies, so one sample is another program. Two sizes give the lines. The second is odd and far
off: what pads to 8 or splits into chunks of 16 would look like a line at 2 and 3, and is none at 2 and 67. What looks
like one at both, such as padding to 128, is found at the size that counts (``retrace``)."""
_THIRD = 3
"""Traced where a line falls below 0 at no samples: ``n - 1`` does, and so does the one through two values of ``n * n``,
which two integers always leave a whole number of bytes a sample apart."""
_USUAL = Circumstances()
_LADDER = (4, 8, 16, 32, 64, 256, 1024)  # where two sizes run different operators
_MOST_EVENTS = 60_000
"""Of one more trace, unless the smallest has half as many: about 5 s (torch 2.13, one core). A step that loops over its
samples has more of them at each size."""


def trace_timeline(workload: Workload, layout: Layout, circumstances: Circumstances = _USUAL) -> Timeline:
    """What the step allocates and frees at any number of samples.

    The model may be on any device, and of the example batch only shapes, strides and dtypes are used.

    Returns:
        Lines where two sizes lie on lines, else interpolated between more sizes: as many as take a few seconds each.

    Raises:
        InvalidArgument: The step cannot run without values, or not on a fake device; it names the step's own line.
    """

    def run(size: int, now: Circumstances = circumstances) -> TracedStep:
        return trace(workload, layout, size, now)

    _load()
    near, far = SIZES
    # With gradients that are zeroed in place, the second step is no repetition of the first.
    may_repeat = circumstances.steps > 1 and not circumstances.zeroes_gradients
    beginning = circumstances.once() if may_repeat else circumstances
    # Side by side, each in a process of its own: faster, on two cores.
    with begin_apart(lambda: run(near)) as ask_near, begin_apart(lambda: run(far, beginning)) as ask_far:
        first, second = ask_near(), ask_far()

    def find_lines(other: TracedStep | None) -> Timeline | None:
        lines = None if other is None else align(first, other)
        if lines is None or min(lines.fixed, default=0) >= 0:
            return lines
        return lines if lines.begins_with(run(_THIRD, circumstances.once())) else None

    lines = find_lines(continue_as(first, second) if may_repeat else second)
    if lines is None and may_repeat:
        second = run(far)
        lines = find_lines(second)
    return lines if lines is not None else combine(climb([first, second], _LADDER, run))


def _load() -> None:
    """Load and register here what each trace needs, before processes are made for them: once in place of twice.

    ``FakeTensorMode`` loads the compiler: 0.8 s of a processor with torch 2.13, where nothing else has done so.
    """
    register()
    importlib.import_module("torch._dynamo")


def climb(traced: Sequence[TracedStep], sizes: Sequence[int], run: Callable[[int], TracedStep]) -> list[TracedStep]:
    """More sizes, in this order, until the next one has too many events, or would."""
    found = list(traced)
    for size in sizes:
        if expect_events(found, size) > find_most_events(found):
            break
        try:
            found.append(run(size))
        except TooLong:
            break
    return found


def find_most_events(traced: Sequence[TracedStep]) -> int:
    """How many events one more trace may have."""
    return max(_MOST_EVENTS, 2 * len(traced[0].order))


def expect_events(traced: Sequence[TracedStep], size: int) -> int:
    """At this size, if they grow as they have from the smallest one traced to the largest."""
    first, last = traced[0], max(traced, key=lambda step: step.samples)
    growth = (len(last.order) - len(first.order)) / (last.samples - first.samples)
    return len(first.order) + round(growth * (size - first.samples))


def trace(
    workload: Workload,
    layout: Layout,
    samples: int,
    circumstances: Circumstances = _USUAL,
    most_events: int = sys.maxsize,
) -> TracedStep:
    """Run the step on fake tensors with ``samples`` in each micro-batch; arguments and errors as ``trace_timeline``.

    Raises:
        TooLong: It has more than ``most_events``.
    """
    example = _grow_registered(layout, samples)
    homes = {parameter.device for parameter in workload.parameters()}
    is_placed = any(tensor.device in homes for tensor in tensors_of(example.batch))
    with _on_fake_model(workload, circumstances, most_events) as run:
        batch = _on_host(example, samples)
        for _ in range(circumstances.steps):
            run.step(batch, is_placed=is_placed)
        return run.recorder.log.finish(samples)


def explain_loss(workload: Workload, layout: Layout) -> str:
    """``explain_default``, of a model that is not run; errors as ``trace_timeline``."""
    example = _grow_registered(layout, SIZES[0])
    with _on_fake_model(workload, Circumstances(), sys.maxsize) as run:
        return run.explain_loss(_on_host(example, SIZES[0]))


@contextmanager
def _on_fake_model(workload: Workload, circumstances: Circumstances, most_events: int) -> Iterator[DryRun]:
    """While this lasts, the model is on the fake device; errors name their cause."""
    _check(workload.model)
    random_state = RandomState(torch.device("cpu"))
    try:
        modules = modules_of(workload.model, workload.step)
        types = {tensor.device.type for tensor in workload.parameters()} | {"cuda"}
        location = Location(workload.model)
        with torch.enable_grad(), _collected_between_steps(), present(), FakeMode() as mode:
            recorder = Recorder(mode, location.name, sole_holder(), most_events)
            fakes = _make_fakes(workload.model, recorder, circumstances.parallelism)
            with (
                recorder,
                fakes.substitute(modules),
                location.follow(),
                autocast.redirect(DEVICE_TYPE, types),
                _without_nested_tensors(),
                without_waiting(),
            ):
                workload.model.train()  # as trials and the Runner; the mode of the substitutes, which the model forgets
                yield DryRun(workload, recorder, fakes, DeviceNames(types), circumstances)
    except AutobatchError:
        raise
    except Exception as error:
        raise InvalidArgument(explain(error)) from error
    finally:
        random_state.restore()


def _make_fakes(model: nn.Module, recorder: Recorder, parallelism: Parallelism | None) -> FakeModel:
    if parallelism is None or parallelism.strategy != "fsdp2":
        return FakeModel(recorder)
    return FakeModel(recorder, [*model.parameters()], parallelism.world_size)


def _check(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_uninitialized(parameter):
            raise InvalidArgument(f"parameter {name} has no shape yet: run the model once on a sample first")
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise InvalidArgument(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: predict with the module inside it, as "
                f"one rank runs it"
            )


@contextmanager
def _collected_between_steps() -> Iterator[None]:
    """While this lasts, reference cycles are not collected at moments that differ between two traces."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        with collecting_new_objects():
            yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def _without_nested_tensors() -> Iterator[None]:
    """While this lasts, an encoder in eval mode does not pack its padded batch, which needs the mask's values.

    ``nn.TransformerEncoder``'s way without gradients takes less than the one that is traced instead.
    """
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def _grow_registered(layout: Layout, samples: int) -> Layout:
    """Where a type of the user's own is in the batch, the batch at this size: ``take`` may need values of tensors."""
    return layout.grown(samples) if holds_registered(layout.batch) else layout


def _on_host(layout: Layout, samples: int) -> Any:
    """The batch at this size on the host, without memory there either."""
    fake = map_tensors(layout.batch, lambda tensor: make_fake(tensor, "cpu").requires_grad_(tensor.requires_grad))
    return fake if layout.count == samples else Layout(fake, layout.count, layout.lists).grown(samples).batch
