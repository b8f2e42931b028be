"""The user's own training step, run on tensors without memory: what it allocates and frees.

Covers two optimizer steps of two micro-batches each, as the Runner does them: gradients resident from the second
micro-batch on, bfloat16 and float16 gradients summed in float32, optimizer state there in the second step. Does not
cover memory inside one kernel (workspaces), code from ``torch.compile`` (traced uncompiled), steps whose course depends
on values, nor wrappers for several devices.

Nothing of the model, the optimizer or the generators is changed, and no value is read; models on any device will do,
also ``meta``.
"""

# ruff: noqa: SLF001 - what torch keeps for those who add devices has no public names

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from autobatch.errors import AutobatchError, CannotPredict
from autobatch.prediction.timeline import Timeline, TracedStep, align, combine
from autobatch.prediction.tracing import autocast
from autobatch.prediction.tracing.device_names import DeviceNames
from autobatch.prediction.tracing.failures import explain
from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE, errors_told, present
from autobatch.prediction.tracing.location import Location
from autobatch.prediction.tracing.recording import FakeMode, Recorder, make_fake
from autobatch.prediction.tracing.twins import Twins, modules_of
from autobatch.workload.batches import Layout, map_tensors, tensors_of
from autobatch.workload.checkpoint import Checkpoint
from autobatch.workload.compilation import is_compiled
from autobatch.workload.gradients import Float32Sums
from autobatch.workload.nests import with_fresh_containers
from autobatch.workload.optimizer_state import make_state
from autobatch.workload.random_state import RandomState
from autobatch.workload.step import Workload

__all__ = ["Circumstances", "trace", "trace_timeline"]

_STEPS = 2  # the first makes the optimizer's state, the second begins with it
_SIZES = (2, 3, 67)
"""Views of size 1 skip copies, so one sample is another program. Two sizes give the lines; the third, odd and far off,
is the proof: what grows with the square, pads to a multiple or splits into chunks looks like a line at 2 and 3."""
_LADDER = (4, 8, 16, 32, 64, 256, 1024)  # where two sizes run different operators


class Circumstances(NamedTuple):
    """What a step is run in, around the user's own code; as the Runner does it, unless told otherwise.

    Attributes:
        micro_batches: Of each optimizer step. The second one runs with gradients resident; more of them need no more.
        scaler: Whether the loss is scaled, and gradients unscaled.
        keeps_gradients: Whether gradients are zeroed in place after a step; else they are dropped.
    """

    micro_batches: int = 2
    scaler: bool = False
    keeps_gradients: bool = False


def trace_timeline(
    workload: Workload,
    layout: Layout,
    circumstances: Circumstances = Circumstances(),  # noqa: B008 - immutable
) -> Timeline:
    """What the step allocates and frees at any number of samples.

    Args:
        workload: Model, step and optimizer; the model on any device.
        layout: An example batch, described; of its tensors only shapes, strides and dtypes are used.
        circumstances: What is done around the step.

    Returns:
        Exact where a third size is what two others say, else interpolated between more sizes.

    Raises:
        CannotPredict: The step cannot run without values, or not on a fake device; it names the step's own line.
    """

    def run(size: int) -> TracedStep:
        return trace(workload, layout, size, circumstances)

    first, second, third = (run(size) for size in _SIZES)
    exact = align(first, second)
    if exact is not None and exact.equals(third):
        return exact
    return combine([first, second, third, *(run(size) for size in _LADDER)])


def trace(
    workload: Workload,
    layout: Layout,
    samples: int,
    circumstances: Circumstances = Circumstances(),  # noqa: B008 - immutable
) -> TracedStep:
    """Run the step on fake tensors with ``samples`` in each micro-batch; arguments and errors as ``trace_timeline``."""
    _check(workload.model)
    random_state = RandomState.capture(torch.device("cpu"))
    try:
        with torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(_collected_between_steps())
            return _record(workload, layout, samples, stack, circumstances)
    except AutobatchError:
        raise
    except Exception as error:
        raise CannotPredict(explain(error)) from error
    finally:
        random_state.restore()


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise CannotPredict(
                f"{name or 'the model'} is wrapped in {type(module).__name__}: predict with the module inside it, as "
                f"one rank runs it"
            )


def _record(
    workload: Workload, layout: Layout, samples: int, stack: ExitStack, circumstances: Circumstances
) -> TracedStep:
    modules = modules_of(workload.model, workload.step)
    types = {tensor.device.type for tensor in workload.parameters()} | {"cuda"}
    location = Location(workload.model)
    stack.enter_context(_uncompiled(workload))
    stack.enter_context(present())
    mode = FakeMode()
    recorder = Recorder(mode, location.name)
    stack.enter_context(mode)
    stack.enter_context(recorder)
    twins = Twins(recorder)
    for context in (twins.inhabit(modules), location.follow(), autocast.redirect(DEVICE_TYPE, types)):
        stack.enter_context(context)
    workload.model.train()  # as the trials and the Runner; it is the twins' own mode that changes
    run = _Run(workload, recorder, twins, DeviceNames(types), circumstances)
    batch = _on_host(layout, samples)
    for _ in range(_STEPS):
        run.step(batch)
    return recorder.finish(samples)


@contextmanager
def _collected_between_steps() -> Iterator[None]:
    """While this lasts, reference cycles are not collected at random moments, which would differ between two traces."""
    is_enabled, is_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    if not is_frozen:
        gc.freeze()  # so that a collection looks at what the trace has made, and at nothing else
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
        if is_enabled:
            gc.enable()


def _uncompiled(workload: Workload) -> AbstractContextManager[Any]:
    if not is_compiled(workload.model, workload.step):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _on_host(layout: Layout, samples: int) -> Any:
    """The batch at this size, without memory there either."""
    fake = map_tensors(layout.batch, lambda tensor: make_fake(tensor, "cpu").requires_grad_(tensor.requires_grad))
    return Layout(fake, layout.count, layout.lists).grow(samples)


class _Run:
    """One step after another on the twins, as the Runner does them."""

    def __init__(
        self, workload: Workload, recorder: Recorder, twins: Twins, names: DeviceNames, circumstances: Circumstances
    ) -> None:
        self._workload, self._recorder, self._names = workload, recorder, names
        self._modules = [*workload.model.modules()]
        owned = [(name, p) for name, module in workload.model.named_modules() for p in module._parameters.values()]
        self._owners = {id(parameter): name for name, parameter in reversed(owned)}
        self._optimizer = None if workload.optimizer is None else twins.optimizer(workload.optimizer)
        groups = () if self._optimizer is None else self._optimizer.param_groups
        parameters = [*workload.model.parameters(), *(p for group in groups for p in group["params"])]
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        self._sums = Float32Sums()
        self._scale = torch.empty(1, device=DEVICE) if circumstances.scaler else None
        self._keeps_gradients = circumstances.keeps_gradients
        self._micro_batches = circumstances.micro_batches

    def step(self, batch: Any) -> None:
        """One optimizer step; it begins and ends without gradients."""
        kept: list[Any] = []
        self._accumulate(batch, kept)
        self._recorder.phase = "optimizer"
        if self._optimizer is not None:
            self._optimizer.step()
            for tensor in tensors_of([dict(state) for state in self._optimizer.state.values()]):
                self._recorder.label(tensor, "optimizer state")
        for parameter in self._parameters:
            if not self._keeps_gradients:
                parameter.grad = None

    def _accumulate(self, batch: Any, kept: list[Any]) -> None:
        """All micro-batches, and what comes before the optimizer's own step; ``kept`` is what outlives that."""
        before = Checkpoint(self._modules, torch.device("cpu"))
        self._sums.begin(self._parameters)
        for index in range(self._micro_batches):
            here = Checkpoint(self._modules, torch.device("cpu")) if index else before
            self._run_micro_batch(batch, kept)
            del here
        self._recorder.phase = "optimizer"
        self._sums.write()
        self._sums.end()
        self._label_gradients()
        if self._optimizer is not None:
            make_state(self._optimizer)
            self._unscale()

    def _run_micro_batch(self, batch: Any, kept: list[Any]) -> None:
        with self._names:
            with self._recorder.forward():
                losses, aux = self._forward(with_fresh_containers(map_tensors(batch, self._place)))
                loss = self._share(losses)
            kept.append((loss.detach().float(), aux))
            with errors_told():
                (loss if self._scale is None else loss * self._scale).backward()
        gc.collect()
        self._label_gradients()

    def _forward(self, micro_batch: Any) -> tuple[list[torch.Tensor], Any]:
        """As ``Workload.run``, without reading counts: they have no values here."""
        returned = self._workload.step(self._workload.model, micro_batch)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        named = list(loss.values()) if hasattr(loss, "values") and not isinstance(loss, torch.Tensor) else [loss]
        return [_bare(term) for term in named], map_tensors(aux, torch.Tensor.detach)

    def _share(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [loss.reshape(()) * (1 / self._micro_batches) for loss in losses]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = make_fake(tensor).requires_grad_(tensor.requires_grad)
        self._recorder.label(placed, "input")
        return placed

    def _unscale(self) -> None:
        if self._scale is None:
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        inverse = self._scale.double().reciprocal().float()
        found = torch.full((1,), 0.0, device=DEVICE)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)

    def _label_gradients(self) -> None:
        sums = self._sums._sums
        for parameter in self._parameters:
            gradient = sums.get(parameter) if parameter.grad is None else parameter.grad
            if gradient is not None:
                self._recorder.label(gradient, "gradient", self._owners.get(id(parameter), ""))


def _bare(term: Any) -> torch.Tensor:
    loss = getattr(term, "loss", term)
    if not isinstance(loss, torch.Tensor):
        raise CannotPredict(f"step() returned {type(term).__name__}; it must return a scalar tensor, the mean loss")
    return loss
