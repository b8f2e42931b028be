"""Runs optimizer steps on fake tensors, as the Runner runs them on real ones; a recorder sees them."""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch

from autobatch._wrappers import state_of
from autobatch.batch.tree import map_tensors, tensors_of, with_fresh_containers
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.fake_device import DEVICE, DeviceNames, original_errors
from autobatch.prediction.tracing.fake_model import FakeModel
from autobatch.prediction.tracing.ranks import FullySharded, OneRank, Parallelism, Replicated
from autobatch.prediction.tracing.recording import Recorder, make_fake
from autobatch.step.default_step import explain_default
from autobatch.step.losses import Mean, Sum, Term
from autobatch.step.workload import Workload, check_leaves
from autobatch.training.misuse import WROTE_INTO_BATCH, GradientWatch
from autobatch.training.update import make_state
from autobatch.undo.gradients import Float32Sums
from autobatch.undo.module_state import ModuleState


class Circumstances(NamedTuple):
    """The Runner's part of a step, around the user's own code."""

    micro_batches: int = 2  # gradients are resident from the second on; ``Estimate`` adds what further ones return
    steps: int = 2  # the first makes the optimizer's state, the second begins with it
    scaler: bool = False  # whether the loss is scaled, and gradients unscaled
    parallelism: Parallelism | None = None  # None: one process
    whole: int = 0  # samples in the loss of ``WholeBatch``, in two passes; 0: each micro-batch is a whole batch

    def once(self) -> Circumstances:
        return self._replace(steps=1)


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
        self._user, self._workload, self._circumstances = workload, _without_counts(workload), circumstances
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
        self._run_micro_batches(batch, outputs, is_placed=is_placed)
        self.recorder.log.phase = "optimizer"
        self._rank.reduce(self._parameters, self._sums)
        self._sums.end()
        del state, copies
        self._label_gradients()
        if self._optimizer is not None:
            make_state(self._optimizer)
            self._unscale()
            self._rank.share_buffers()

    def _run_micro_batches(self, batch: Any, outputs: list[Any], *, is_placed: bool) -> None:
        for _ in range(self._circumstances.micro_batches):
            self._run_micro_batch(batch, outputs, is_placed=is_placed)

    def _call(self, function: Callable[[Any], Any], placed: Any, *, is_placed: bool) -> Any:
        """Call a part of the step with a batch, and refuse what the Runner refuses."""
        gradients = GradientWatch(self._parameters, self._sums)
        versions = [tensor._version for tensor in tensors_of(placed)]
        returned = function(with_fresh_containers(placed))
        if is_placed and [tensor._version for tensor in tensors_of(placed)] != versions:
            raise InvalidArgument(WROTE_INTO_BATCH)
        gradients.refuse_change()
        return returned

    def _run_micro_batch(self, batch: Any, outputs: list[Any], *, is_placed: bool) -> None:
        with self._names:
            first = len(self.recorder.log.sizes)
            with self.recorder.forward():
                placed = map_tensors(batch, self._place)  # held to the end of the backward pass, as in training
                terms, aux = self._call(self._workload.run, placed, is_placed=is_placed)
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
