"""The user's step: what is called, what it may return, and what a micro-batch counts for.

Covers a step that returns a scalar mean, alone or as ``(loss, aux)``, and weights by ``weigh``. Does not cover how the
parts of a batch are added up (``accumulation``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autobatch.errors import InvalidArgument, InvalidBatch, InvalidStep
from autobatch.workload.batches import map_tensors, tensors_of

__all__ = ["Step", "StepOutput", "Weigh", "Workload"]

Step = Callable[[nn.Module, Any], Any]
Weigh = Callable[[Any], "float | torch.Tensor"]


@dataclass(frozen=True)
class StepOutput:
    """What one call of the step gave: the mean loss of its micro-batch, and whatever the user put beside it."""

    loss: torch.Tensor
    aux: Any = None


@dataclass(frozen=True)
class Workload:
    """What is run: a model, the user's step on it, what a mean is over, and the optimizer beside it."""

    model: nn.Module
    step: Step
    weigh: Weigh | None = None
    optimizer: Any | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run, or not exactly.

        Raises:
            InvalidArgument: A part is of the wrong kind; the optimizer needs a closure; a parameter has no shape yet,
                or is updated inside the backward pass.
        """
        _check_kinds(self.model, self.step, self.weigh, self.optimizer)
        for name, parameter in self.model.named_parameters():
            _check_parameter(name, parameter)

    def parameters(self) -> list[nn.Parameter]:
        """The model's and the optimizer's parameters, each once."""
        found = {id(parameter): parameter for parameter in self.model.parameters()}
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            found.update((id(parameter), parameter) for parameter in group["params"])
        return list(found.values())

    def resident_tensors(self) -> Iterator[torch.Tensor]:
        """Everything that lives on the device between two steps, except batches."""
        for parameter in self.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        yield from self._state_tensors()

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state as it is now: none before its first step."""
        return sum(tensor.nbytes for tensor in self._state_tensors())

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from tensors_of(dict(state))  # nested in some, which keep lists of directions

    def weight_of(self, micro_batch: Any, samples: int) -> float:
        """What the micro-batch counts for in the mean: ``weigh`` of it, or its samples.

        Raises:
            InvalidBatch: The weight is no number, negative or not finite.
        """
        if self.weigh is None:
            return float(samples)
        returned = self.weigh(micro_batch)
        try:
            weight = float(returned.detach() if isinstance(returned, torch.Tensor) else returned)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidBatch(f"weigh() returned {type(returned).__name__}; it must return one number") from None
        if not math.isfinite(weight) or weight < 0:
            raise InvalidBatch(f"weigh() gave {weight} for a micro-batch of {samples}; it must be a finite number >= 0")
        return weight

    def run(self, micro_batch: Any) -> StepOutput:
        """Call the user's step and check that a gradient can come from what it returned.

        Raises:
            InvalidStep: The loss is no tensor, has more than one element, or has no graph.
        """
        returned = self.step(self.model, micro_batch)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        _check_loss(loss)
        return StepOutput(loss.reshape(()), map_tensors(aux, torch.Tensor.detach))


def _check_kinds(model: Any, step: Any, weigh: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model={_show(model)} is no torch.nn.Module")
    if not callable(step):
        raise InvalidArgument(f"step={_show(step)} cannot be called; pass step(model, micro_batch) -> loss")
    if weigh is not None and not callable(weigh):
        raise InvalidArgument(f"weigh={_show(weigh)} cannot be called; pass weigh(micro_batch) -> number")
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise InvalidArgument(
            f"optimizer={_show(optimizer)} is no optimizer; with several, use Runner(..., optimizer=None).accumulate() "
            f"and step them yourself"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument("LBFGS calls a closure several times a step, which cannot be split exactly; use another")


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise InvalidArgument(f"parameter {name} has no shape yet: run the model once on a sample first")
    if parameter._post_accumulate_grad_hooks:  # noqa: SLF001 - no public twin
        raise InvalidArgument(
            f"parameter {name} has a post-accumulate-grad hook: an update inside the backward pass happens at every "
            f"micro-batch and cannot be undone; remove the hook"
        )


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InvalidStep(
            f"step() returned {type(loss).__name__}; it must return a scalar tensor, the mean loss, or (loss, aux)"
        )
    if loss.numel() != 1:
        raise InvalidStep(
            f"step() returned a loss of shape {tuple(loss.shape)}; take its mean first: a scalar is needed"
        )
    if not loss.requires_grad:
        raise InvalidStep(
            "step() returned a loss without a graph (detached, under no_grad, or every parameter is frozen)"
        )
