"""The steps of a trace: on the twins, as the Runner does them on a card.

Covers micro-batches, what is kept between them, sums of gradients, scaling and the optimizer's step. Does not cover
what is written down meanwhile (``recording``), nor what makes the twins (``twins``).
"""

# ruff: noqa: SLF001 - what torch keeps for those who add devices has no public names

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autobatch.batch.layout import map_tensors, tensors_of
from autobatch.batch.tree import with_fresh_containers
from autobatch.errors import InvalidStep
from autobatch.prediction.timeline import TracedStep
from autobatch.prediction.tracing.device_names import DeviceNames
from autobatch.prediction.tracing.fake_device import DEVICE, errors_told
from autobatch.prediction.tracing.fake_model import FakeModel
from autobatch.prediction.tracing.recording import Recorder, make_fake
from autobatch.state.gradients import Float32Sums, GradientStamps
from autobatch.state.optimizer_state import make_state
from autobatch.state.rewind_point import RewindPoint
from autobatch.step.default_step import explain_default
from autobatch.step.losses import Mean, Sum
from autobatch.step.workload import Workload, check_leaves
from autobatch.training.batch_mutation import WROTE_INTO_BATCH

__all__ = ["Circumstances", "DryRun"]


class Circumstances(NamedTuple):
    """What a step is run in, around the user's own code; as the Runner does it, unless told otherwise.

    Attributes:
        micro_batches: Of each optimizer step. The second one runs with gradients resident; more of them need no more,
            but for what stands beside their losses, which ``Estimate`` adds.
        steps: The first makes the optimizer's state, the second begins with it.
        scaler: Whether the loss is scaled, and gradients unscaled.
        keeps_gradients: Whether gradients are zeroed in place after a step; else they are dropped.
    """

    micro_batches: int = 2
    steps: int = 2
    scaler: bool = False
    keeps_gradients: bool = False

    def once(self) -> Circumstances:
        """The same with one step, whose trace is where one of two begins and takes half as long."""
        return self._replace(steps=1)


class DryRun:
    """One step after another on the twins, as the Runner does them."""

    def __init__(
        self, workload: Workload, recorder: Recorder, twins: FakeModel, names: DeviceNames, circumstances: Circumstances
    ) -> None:
        self._uncounted, self._recorder, self._names = _without_counts(workload), recorder, names
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
        self._is_placed = False

    def step(self, batch: Any, *, is_placed: bool = False) -> None:
        """One optimizer step; it begins and ends without gradients.

        Args:
            batch: Tensors without memory.
            is_placed: Whether the user's batch is where the model is, so that training would write into it, too.

        Raises:
            InvalidStep: The step changes gradients, or writes into a batch that is placed.
        """
        self._is_placed = is_placed
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

    def finish(self, samples: int) -> TracedStep:
        """All that was written down; from here on nothing is."""
        return self._recorder.finish(samples)

    def explain_loss(self, batch: Any) -> str:
        """What the default step takes for a loss."""
        with self._names:
            return explain_default(self._uncounted.model, map_tensors(batch, self._place))

    def _accumulate(self, batch: Any, kept: list[Any]) -> None:
        """All micro-batches, and what comes before the optimizer's own step; ``kept`` is what outlives that."""
        before = RewindPoint(self._modules, torch.device("cpu"))
        self._sums.begin(self._parameters)
        for index in range(self._micro_batches):
            here = RewindPoint(self._modules, torch.device("cpu")) if index else before
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
            first = len(self._recorder.sizes)
            with self._recorder.forward():
                stamps = GradientStamps(self._parameters, self._sums)
                placed = map_tensors(batch, self._place)
                versions = [tensor._version for tensor in tensors_of(placed)]
                losses, aux = self._forward(with_fresh_containers(placed))
                if self._is_placed and [tensor._version for tensor in tensors_of(placed)] != versions:
                    raise InvalidStep(WROTE_INTO_BATCH)
                del placed  # as in training, where the step alone holds it
                stamps.refuse_change()
                loss = self._share(losses)
                check_leaves(loss, self._parameters)
            for tensor in tensors_of(aux):
                self._recorder.label_new(tensor, "aux", first)
            kept.append((loss.detach().float(), aux))
            with errors_told():
                (loss if self._scale is None else loss * self._scale).backward()
        gc.collect()
        self._label_gradients()

    def _forward(self, micro_batch: Any) -> tuple[list[torch.Tensor], Any]:
        output = self._uncounted.run(micro_batch)
        return [term.loss for term in output.terms], output.aux

    def _share(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [loss * (1 / self._micro_batches) for loss in losses]
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


def _without_counts(workload: Workload) -> Workload:
    """The same step, but where a term states its count in a tensor: counts have no values here, and weigh no bytes."""

    def run(_: Any, micro_batch: Any) -> Any:
        returned = workload.call_step(micro_batch)
        if isinstance(returned, tuple) and len(returned) == 2:
            return _uncounted(returned[0]), returned[1]
        return _uncounted(returned)

    return replace(workload, step=run, optimizer=None)


def _uncounted(loss: Any) -> Any:
    if isinstance(loss, Mapping):
        return {name: _uncounted(term) for name, term in loss.items()}
    if isinstance(loss, Mean) and isinstance(loss.over, torch.Tensor):
        return replace(loss, over=1)
    if isinstance(loss, Sum) and isinstance(loss.count, torch.Tensor):
        return replace(loss, count=1)
    return loss
