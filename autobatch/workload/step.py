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

from autobatch.errors import InvalidBatch, InvalidStep
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
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            yield from tensors_of(dict(state))  # nested in some: LBFGS keeps lists of directions

    def weight_of(self, micro_batch: Any, samples: int) -> float:
        """What the micro-batch counts for in the mean: ``weigh`` of it, or its samples.

        Raises:
            InvalidBatch: The weight is negative or not a finite number.
        """
        if self.weigh is None:
            return float(samples)
        weight = float(self.weigh(micro_batch))
        if not math.isfinite(weight) or weight < 0:
            raise InvalidBatch(f"weigh() gave {weight} for a micro-batch of {samples}; it must be a finite number >= 0")
        return weight

    def run(self, micro_batch: Any) -> StepOutput:
        """Call the user's step and check that a gradient can come from what it returned.

        Raises:
            InvalidStep: The loss is no tensor, has more than one element, or hangs on no parameter.
        """
        returned = self.step(self.model, micro_batch)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        _check_loss(loss)
        return StepOutput(loss.reshape(()), map_tensors(aux, torch.Tensor.detach))


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
