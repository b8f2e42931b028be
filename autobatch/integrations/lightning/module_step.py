"""Runs a module's own ``training_step`` on one micro-batch, and takes down what it logs.

Covers the loss, Lightning's backward pass with its hooks, and what is beside the loss: rows of several micro-batches
are put end to end, numbers are a mean, and of anything else there is a list. Does not cover what is done with all of it
when the step is whole (``training``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch.batch.layout import describe
from autobatch.errors import InvalidStep
from autobatch.integrations.attributes import replaced
from autobatch.integrations.lightning.logs import LogCall, combine, read_call
from autobatch.integrations.lightning.metrics import metrics_in
from autobatch.step.workload import Weigh

__all__ = ["MicroBatchOutput", "ModuleStep", "StepOutputs", "hook_name", "join_outputs"]


@dataclass(frozen=True)
class MicroBatchOutput:
    """What one micro-batch has left.

    Attributes:
        loss: Detached.
        size: Samples.
        weight: What it counts for in a mean.
        logged: In order.
        beside: What ``training_step`` returned beside the loss.
    """

    loss: torch.Tensor
    size: int
    weight: float
    logged: tuple[LogCall, ...]
    beside: Mapping[str, Any]


@dataclass
class ModuleStep:
    """``training_step`` of one module.

    Attributes:
        trainer: Whose strategy runs the passes.
        module: Whose step it is.
        loop: Lightning's automatic optimization.
        weigh: What the loss is a mean over; ``None``: samples.
        arguments: Of ``training_step``, for the running batch.
        outputs: Of the micro-batches that stay; a Runner puts it back when one is undone.
    """

    trainer: Any
    module: Any
    loop: Any
    weigh: Weigh | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    outputs: list[MicroBatchOutput] = field(default_factory=list)

    def run(self, _: Any, micro_batch: Any) -> torch.Tensor:
        """The loss of one micro-batch, with its graph.

        Raises:
            InvalidStep: ``training_step`` returned none.
        """
        logged: list[LogCall] = []
        log, metrics = self.module.log, [*metrics_in(self.module).values()]
        arguments = {**self.arguments, "batch": micro_batch}
        with (
            hook_name(self.module, "training_step"),
            replaced(
                self.module, "log", lambda *given, **named: logged.append(read_call(log, metrics, *given, **named))
            ),
            self.trainer.profiler.profile(f"[Strategy]{type(self.trainer.strategy).__name__}.training_step"),
            self.trainer.precision_plugin.train_step_context(),
        ):
            returned = self.module.training_step(*arguments.values())
        result = self.loop.output_result_cls.from_training_step_output(returned)
        if result.closure_loss is None:
            raise InvalidStep(
                f"{type(self.module).__name__}.training_step returned None for a part of a batch: a step is skipped as "
                f"a whole or not at all; return a loss"
            )
        size = describe(micro_batch).count
        weight = float(size) if self.weigh is None else _sum_of(self.weigh(micro_batch))
        self.outputs.append(MicroBatchOutput(result.loss, size, weight, tuple(logged), result.extra))
        loss: torch.Tensor = result.closure_loss
        return loss

    def backward_with(self, optimizer: Any) -> Callable[[torch.Tensor], None]:
        """Lightning's backward pass: its hooks, precision and ``LightningModule.backward``."""
        backward = self.loop._make_backward_fn(optimizer)  # noqa: SLF001 - what Lightning's own closure is made with

        def run(loss: torch.Tensor) -> None:
            with hook_name(self.module, None), replaced(self.module, "log", self._refuse_logging):
                backward(loss)

        return run

    def _refuse_logging(self, name: str, *_: Any, **__: Any) -> None:
        raise InvalidStep(
            f"self.log({name!r}) in {self.module._current_fx_name}, which runs once a micro-batch: log it in "  # noqa: SLF001 - Lightning's own word for where it is
            f"on_before_optimizer_step, where the gradient is the whole batch's"
        )


def _sum_of(counted: Any) -> float:
    return math.fsum(map(float, counted.values())) if isinstance(counted, Mapping) else float(counted)


class StepOutputs:
    """The outputs of the micro-batches that stay, as an object that a Runner keeps: references, not copies."""

    def __init__(self, step: ModuleStep) -> None:
        self._step = step

    def take(self) -> list[Any]:
        """Those that are there."""
        return [*self._step.outputs]

    def put(self, taken: list[Any]) -> None:
        """Make it these again."""
        self._step.outputs[:] = taken


@contextmanager
def hook_name(module: Any, name: str | None) -> Iterator[None]:
    """While this lasts, Lightning takes what is logged for that hook's; it does not so itself where one raises."""
    earlier = module._current_fx_name  # noqa: SLF001 - what Lightning itself sets around each hook
    if name is not None:
        module._current_fx_name = name  # noqa: SLF001 - the same
    try:
        yield
    finally:
        module._current_fx_name = earlier  # noqa: SLF001 - the same


def join_outputs(
    outputs: Sequence[Mapping[str, Any]], sizes: Sequence[int], weights: Sequence[float]
) -> dict[str, Any]:
    """What ``training_step`` returned beside its losses, for ``on_train_batch_end``: one dict for all micro-batches.

    Args:
        outputs: Without the loss.
        sizes: Samples of each.
        weights: What each counts for.
    """
    names = [name for name in outputs[0] if all(name in output for output in outputs)] if outputs else []
    return {name: _join([output[name] for output in outputs], sizes, weights) for name in names}


def _join(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if len(values) == 1:
        return values[0]
    if not all(isinstance(value, torch.Tensor) for value in values):
        is_number = all(isinstance(value, float) for value in values)
        return combine("mean", values, weights) if is_number else [*values]
    if all(value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat([*values])
    if all(not value.dim() and value.is_floating_point() for value in values):
        return combine("mean", values, weights).to(values[0].dtype)
    return [*values]
