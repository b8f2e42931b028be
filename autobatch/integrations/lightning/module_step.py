"""Runs a module's own ``training_step`` on one micro-batch, and takes down what it logs.

It also runs Lightning's backward pass with its hooks. ``training`` uses what the micro-batches leave when the step is
whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.integrations.attributes import replaced
from autobatch.integrations.lightning.logs import LogCall, read_call
from autobatch.integrations.lightning.metrics import metrics_in
from autobatch.step.losses import Sum
from autobatch.step.workload import Weigh

__all__ = ["MicroBatchOutput", "ModuleStep", "StepOutputs", "hook_name"]


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
        is_summed: Whether the loss is the sum over a micro-batch's samples, and not their mean.
        refusal: Why a micro-batch of the running batch has no loss; empty where all have one.
    """

    trainer: Any
    module: Any
    loop: Any
    weigh: Weigh | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    outputs: list[MicroBatchOutput] = field(default_factory=list)
    is_summed: bool = False
    refusal: str = ""

    def run(self, _: Any, micro_batch: Any) -> torch.Tensor | Sum:
        """Return the loss of one micro-batch, with its graph.

        Raises:
            InvalidArgument: ``training_step`` returned none.
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
            self.refusal = (
                f"{type(self.module).__name__}.training_step returned None for a part of a batch, but a step can be "
                f"skipped only as a whole: return a loss"
            )
            raise InvalidArgument(self.refusal)
        size = describe(micro_batch).count
        weight = float(size) if self.weigh is None else _sum_of(self.weigh(micro_batch))
        self.outputs.append(MicroBatchOutput(result.loss, size, weight, tuple(logged), result.extra))
        loss: torch.Tensor = result.closure_loss
        # Lightning's DDP takes the mean over the ranks. Counts add up to 1, so nothing is divided twice.
        return Sum(loss / self.trainer.world_size, self.share_of(micro_batch)) if self.is_summed else loss

    def share_of(self, micro_batch: Any) -> float:
        """Return the micro-batch's part of the samples of all ranks."""
        of_all = describe(self.arguments["batch"]).count * int(self.trainer.world_size)
        return describe(micro_batch).count / of_all

    def backward_with(self, optimizer: Any) -> Callable[[torch.Tensor], None]:
        """Lightning's backward pass: its hooks, precision and ``LightningModule.backward``."""
        backward = self.loop._make_backward_fn(optimizer)  # noqa: SLF001 - what Lightning's own closure is made with

        def run(loss: torch.Tensor) -> None:
            with hook_name(self.module, None), replaced(self.module, "log", self._refuse_logging):
                backward(loss)

        return run

    def _refuse_logging(self, name: str, *_: Any, **__: Any) -> None:
        raise InvalidArgument(
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
