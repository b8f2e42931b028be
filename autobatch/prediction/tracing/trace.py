"""Traces the user's own training step on tensors without memory: what it allocates and frees.

A trace has two optimizer steps of two micro-batches each, as the Runner runs them. Gradients are resident from the
second micro-batch on, and the second step has the optimizer's state. ``torch.compile`` is traced uncompiled.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autobatch._user_errors import add_note, contextmanager
from autobatch.batch.samples import Layout
from autobatch.batch.tree import holds_registered, map_tensors, tensors_of
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.memory.device import collecting_new_objects
from autobatch.prediction.child_process import begin_apart
from autobatch.prediction.timeline import Timeline, TracedStep, align, combine
from autobatch.prediction.tracing import autocast
from autobatch.prediction.tracing.dry_run import Circumstances as Circumstances  # noqa: PLC0414 - callers take it from here
from autobatch.prediction.tracing.dry_run import DryRun
from autobatch.prediction.tracing.failures import TooLong, describe_place, explain
from autobatch.prediction.tracing.fake_device import (
    DEVICE_TYPE,
    DeviceNames,
    present,
    register,
    without_waiting,
)
from autobatch.prediction.tracing.fake_model import FakeModel, Location, modules_of
from autobatch.prediction.tracing.recording import FakeMode, Recorder, make_fake, sole_holder
from autobatch.prediction.tracing.whole_batch_run import WholeBatchRun
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import is_uninitialized
from autobatch.undo.random_state import RandomState

SIZES = (2, 67)
"""Two sizes give the lines. One sample is another program, as views of size 1 skip copies. Padding to 8 and chunks of
16 are a line at 2 and 3, and none at 2 and 67. ``sizing`` finds what is a line at both, such as padding to 128."""
_THIRD = 3  # traced if a line falls below 0 at no samples: n - 1 does, and the line through two values of n * n
_USUAL = Circumstances()
_LADDER = (4, 8, 16, 32, 64, 256, 1024)  # if two sizes run different operators
_MOST_EVENTS = 60_000  # of one more trace, unless the smallest has half as many: about 5 s (torch 2.13, one core)


def trace_timeline(workload: Workload, layout: Layout, circumstances: Circumstances = _USUAL) -> Timeline:
    """Trace what the step allocates and frees at any number of samples.

    Two sizes give lines; if they run different operators, more sizes are traced, as long as each takes a few seconds.
    Raises ``InvalidArgument`` if the step cannot run on tensors without values.
    """

    def run(size: int, now: Circumstances = circumstances) -> TracedStep:
        return trace(workload, layout, size, now)

    # Both traces need these before their processes fork: the compiler alone takes 0.8 s (torch 2.13).
    register()
    importlib.import_module("torch._dynamo")
    near, far = SIZES
    # Side by side in two processes.
    with begin_apart(lambda: run(near)) as ask_near, begin_apart(lambda: run(far)) as ask_far:
        first, second = ask_near(), ask_far()
    lines = align(first, second)
    if lines is not None and (min(lines.fixed, default=0) >= 0 or lines.begins_with(run(_THIRD, circumstances.once()))):
        return lines
    return combine(climb([first, second], _LADDER, run))


def climb(traced: Sequence[TracedStep], sizes: Sequence[int], run: Callable[[int], TracedStep]) -> list[TracedStep]:
    """Trace more sizes, in this order, until one has too many events, or would have."""
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
    return max(_MOST_EVENTS, 2 * len(traced[0].order))


def expect_events(traced: Sequence[TracedStep], size: int) -> int:
    """Events at this size, if they grow as from the smallest trace to the largest."""
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
    """Run the step on fake tensors with ``samples`` in each micro-batch; ``TooLong`` after ``most_events``."""
    # Types of the user grow here: their ``take`` may need values of tensors.
    example = layout.grown(samples) if holds_registered(layout.batch) else layout
    homes = {parameter.device for parameter in workload.parameters()}
    is_placed = any(tensor.device in homes for tensor in tensors_of(example.batch))
    with _on_fake_model(workload, samples, circumstances, most_events) as run:
        batch = _on_host(example, samples)
        if isinstance(run, WholeBatchRun):
            run.samples, run.whole = samples, _on_host(example, circumstances.whole)
        for _ in range(circumstances.steps):
            run.step(batch, is_placed=is_placed)
        return run.recorder.log.finish(samples)


def trace_whole(workload: Workload, layout: Layout, circumstances: Circumstances) -> TracedStep | None:
    """Trace a step of ``WholeBatch`` that runs whole, in one pass: another program; ``None`` for other steps."""
    if not circumstances.whole:
        return None
    return trace(workload, layout, circumstances.whole, circumstances._replace(micro_batches=1, whole=0))


def explain_loss(workload: Workload, layout: Layout) -> str:
    example = layout.grown(SIZES[0]) if holds_registered(layout.batch) else layout
    with _on_fake_model(workload, SIZES[0], Circumstances()) as run:
        return run.explain_loss(_on_host(example, SIZES[0]))


@contextmanager
def _on_fake_model(
    workload: Workload, samples: int, circumstances: Circumstances, most_events: int = sys.maxsize
) -> Iterator[DryRun]:
    """Put the model on the fake device within this block; errors of the user's step leave it as they were raised."""
    for name, parameter in workload.model.named_parameters():
        if is_uninitialized(parameter):
            raise InvalidArgument(f"parameter {name} has no shape yet: run the model once on a sample first")
    for name, module in workload.model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise InvalidArgument(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: predict with the module inside it, as "
                f"one rank runs it"
            )
    random_state = RandomState(torch.device("cpu"))
    try:
        modules = modules_of(workload.model, workload.step)
        types = {tensor.device.type for tensor in workload.parameters()} | {"cuda"}
        location = Location(workload.model)
        with torch.enable_grad(), _comparable(), present(), FakeMode() as mode:
            recorder = Recorder(mode, location.name, sole_holder(), most_events)
            parallelism = circumstances.parallelism
            is_sharded = parallelism is not None and parallelism.strategy == "fsdp2"
            sharded = [*workload.model.parameters()] if is_sharded else []
            fakes = FakeModel(recorder, sharded, parallelism.world_size if parallelism else 1)
            with (
                recorder,
                fakes.substitute(modules),
                location.follow(),
                autocast.redirect(DEVICE_TYPE, types),
                without_waiting(),
            ):
                workload.model.train()  # as trials and the Runner; the model forgets the mode afterwards
                kind = WholeBatchRun if circumstances.whole else DryRun
                yield kind(workload, recorder, fakes, DeviceNames(types), circumstances)
    except AutobatchError:
        raise
    except BaseException as error:
        if cause := explain(error):
            raise InvalidArgument(cause) from error
        add_note(error, describe_place(error, samples))
        raise
    finally:
        random_state.restore()


@contextmanager
def _comparable() -> Iterator[None]:
    """Stop what differs between traces, and an encoder that packs its padded batch, which needs the mask's values."""
    is_enabled, packs = gc.isenabled(), torch.backends.mha.get_fastpath_enabled()
    gc.disable()  # it frees reference cycles at different moments of two traces
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with collecting_new_objects():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(packs)
        if is_enabled:
            gc.enable()


def _on_host(layout: Layout, samples: int) -> Any:
    fake = map_tensors(layout.batch, lambda tensor: make_fake(tensor, "cpu").requires_grad_(tensor.requires_grad))
    return fake if layout.count == samples else Layout(fake, layout.count, layout.lists).grown(samples).batch
