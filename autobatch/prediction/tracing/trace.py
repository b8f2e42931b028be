"""Traces the user's own training step on tensors without memory: what it allocates and frees.

A trace has two optimizer steps of two micro-batches each, as the Runner runs them. Gradients are resident from the
second micro-batch on, and the second step has the optimizer's state. ``torch.compile`` is traced uncompiled.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from autobatch._user_errors import add_note, contextmanager
from autobatch._wrappers import state_of
from autobatch.batch.samples import Layout
from autobatch.batch.tree import holds_registered, map_tensors, tensors_of, with_fresh_containers
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.memory.device import collecting_new_objects
from autobatch.prediction.child_process import begin_apart
from autobatch.prediction.timeline import Timeline, TracedStep, align, combine
from autobatch.prediction.tracing import autocast
from autobatch.prediction.tracing.failures import TooLong, describe_place, explain
from autobatch.prediction.tracing.fake_device import (
    DEVICE,
    DEVICE_TYPE,
    DeviceNames,
    original_errors,
    present,
    register,
    without_waiting,
)
from autobatch.prediction.tracing.fake_model import FakeModel, Location, modules_of
from autobatch.prediction.tracing.ranks import FullySharded, OneRank, Parallelism, Replicated
from autobatch.prediction.tracing.recording import FakeMode, Recorder, make_fake, sole_holder
from autobatch.step.default_step import explain_default
from autobatch.step.losses import Mean, Sum, Term
from autobatch.step.workload import Workload, check_leaves
from autobatch.torch_internals.storages import is_uninitialized
from autobatch.training.misuse import WROTE_INTO_BATCH, GradientWatch
from autobatch.training.update import make_state
from autobatch.undo.gradients import Float32Sums
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import RandomState


class Circumstances(NamedTuple):
    """The Runner's part of a step, around the user's own code."""

    micro_batches: int = 2  # gradients are resident from the second on; ``Estimate`` adds what further ones return
    steps: int = 2  # the first makes the optimizer's state, the second begins with it
    scaler: bool = False  # whether the loss is scaled, and gradients unscaled
    parallelism: Parallelism | None = None  # None: one process

    def once(self) -> Circumstances:
        return self._replace(steps=1)


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
        for _ in range(circumstances.steps):
            run.step(batch, is_placed=is_placed)
        return run.recorder.log.finish(samples)


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
                yield DryRun(workload, recorder, fakes, DeviceNames(types), circumstances)
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


# -------------------------------------------------------------------------------------------- one step on fake tensors


class DryRun:
    """Runs one step after another on fake tensors; the recorder sees them."""

    def __init__(
        self, workload: Workload, recorder: Recorder, fakes: FakeModel, names: DeviceNames, circumstances: Circumstances
    ) -> None:
        parallelism = circumstances.parallelism
        self._rank = OneRank()
        if parallelism is not None and parallelism.strategy == "ddp":
            self._rank = Replicated(workload.model, recorder)
        elif parallelism is not None:
            self._rank = FullySharded(workload.model, recorder, fakes.shards, parallelism.world_size)
        self.recorder, self._names = recorder, names
        self._workload, self._circumstances = _without_counts(workload), circumstances
        owned = [(name, p) for name, module in workload.model.named_modules() for p in module._parameters.values()]
        self._owners = {id(self._rank.part_of(p)): name for name, p in reversed(owned) if p is not None}
        self._optimizer = None if workload.optimizer is None else fakes.optimizer(workload.optimizer)
        groups = () if self._optimizer is None else self._optimizer.param_groups
        parameters = [*workload.model.parameters(), *(p for group in groups for p in group["params"])]
        self._leaves = list({id(parameter): parameter for parameter in parameters}.values())
        self._parameters = [*map(self._rank.part_of, self._leaves)]
        for group in groups:
            group["params"] = [*map(self._rank.part_of, group["params"])]
        self._sums = Float32Sums()
        self._outputs: list[Any] = []  # losses of the step before, and what it returned beside them
        self._scale = torch.empty(1, device=DEVICE) if circumstances.scaler else None

    def step(self, batch: Any, *, is_placed: bool = False) -> None:
        """Run one optimizer step, which begins and ends without gradients.

        A batch that ``is_placed`` is where the model is, so the step must not write into it.
        """
        outputs: list[Any] = []
        self._accumulate(batch, outputs, is_placed=is_placed)
        if self._optimizer is not None:
            self._optimizer.step()
            for tensor in tensors_of([*state_of(self._optimizer).values()]):
                self.recorder.label(tensor, "optimizer state")
        for parameter in self._parameters:
            parameter.grad = None
        self._outputs = outputs  # in ``result = runner.step(batch)`` the last result lives until the next one

    def explain_loss(self, batch: Any) -> str:
        with self._names:
            return explain_default(self._workload.model, map_tensors(batch, self._place))

    def _accumulate(self, batch: Any, outputs: list[Any], *, is_placed: bool) -> None:
        # The Runner holds the tensors of modules during a step, and copies of their buffers. Aliases take no memory,
        # so no mode need see them: that took a ninth of a ResNet-50's trace.
        with torch._C._DisableTorchDispatch():
            state = ModuleState([self._workload.model])
        copies = [buffer.detach().clone() for buffer in state.buffers]
        self._sums.begin(self._parameters)
        for _ in range(self._circumstances.micro_batches):
            self._run_micro_batch(batch, outputs, is_placed=is_placed)
        self.recorder.log.phase = "optimizer"
        self._rank.reduce(self._parameters, self._sums)
        self._sums.end()
        del state, copies
        self._label_gradients()
        if self._optimizer is not None:
            make_state(self._optimizer)
            self._unscale()
            self._rank.share_buffers()

    def _run_micro_batch(self, batch: Any, outputs: list[Any], *, is_placed: bool) -> None:
        with self._names:
            first = len(self.recorder.log.sizes)
            with self.recorder.forward():
                gradients = GradientWatch(self._parameters, self._sums)
                placed = map_tensors(batch, self._place)  # held to the end of the backward pass, as in training
                versions = [tensor._version for tensor in tensors_of(placed)]
                terms, aux = self._workload.run(with_fresh_containers(placed))
                if is_placed and [tensor._version for tensor in tensors_of(placed)] != versions:
                    raise InvalidArgument(WROTE_INTO_BATCH)
                gradients.refuse_change()
                loss, factor = self._divide(terms)
                check_leaves(loss, self._leaves)
            for tensor in tensors_of(aux):
                self.recorder.label_new(tensor, "aux", first)
            with original_errors():
                if self._scale is not None:
                    (loss * self._scale).backward()
                else:
                    (loss * factor).backward()
            if outputs:
                outputs[0].add_(loss.detach(), alpha=factor)  # a running sum
            else:
                outputs.append(loss.detach() * factor)
                self.recorder.label(outputs[0], "activation")
            outputs.append(aux)
        gc.collect()
        self._label_gradients()

    def _divide(self, terms: Sequence[Term]) -> tuple[torch.Tensor, float]:
        share = 1 / self._circumstances.micro_batches
        if len(terms) == 1 and self._scale is None and not terms[0].is_narrow:
            return terms[0].loss, share
        return reduce(torch.add, [term.loss * share for term in terms]), 1.0

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = make_fake(tensor).requires_grad_(tensor.requires_grad)
        self.recorder.label(placed, "input")
        return placed

    def _unscale(self) -> None:
        if self._scale is not None:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            inverse = self._scale.double().reciprocal().float()
            found = torch.full((1,), 0.0, device=DEVICE)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)

    def _label_gradients(self) -> None:
        for parameter in self._parameters:
            gradient = self._sums.by_parameter.get(parameter) if parameter.grad is None else parameter.grad
            if gradient is not None:
                self.recorder.label(gradient, "gradient", self._owners.get(id(parameter), ""))


def _without_counts(workload: Workload) -> Workload:
    """The same step with counts of 1 for counts in tensors, which have no values here."""

    def run(_: Any, micro_batch: Any) -> Any:
        returned = workload.call_step(micro_batch)
        if isinstance(returned, tuple) and len(returned) == 2:
            return _without_count(returned[0]), returned[1]
        return _without_count(returned)

    return replace(workload, step=run, optimizer=None)


def _without_count(loss: Any) -> Any:
    if isinstance(loss, Mapping):
        return {name: _without_count(term) for name, term in loss.items()}
    if isinstance(loss, (Mean, Sum)) and isinstance(loss.count, torch.Tensor):
        return replace(loss, count=1)
    return loss
