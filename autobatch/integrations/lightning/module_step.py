"""Runs a module's own ``training_step`` on one micro-batch, and records what it logs and returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.integrations.attributes import replaced
from autobatch.integrations.lightning.logs import BatchSizes, LogCall, metrics_in, read_call
from autobatch.step.losses import Mean, Sum, Weigh, counts_of


@dataclass(frozen=True)
class MicroBatchOutput:
    """Output of one micro-batch."""

    loss: torch.Tensor  # the mean, detached
    size: int  # number of samples
    weight: float  # its weight in a mean
    logged: Sequence[LogCall]
    beside: dict[str, Any]  # other entries of the returned dict


class ModuleStep:
    """The step of a Runner, which keeps ``outputs`` by ``take`` and ``put``."""

    def __init__(self, trainer: Any, module: Any, loop: Any, weigh: Weigh | None) -> None:
        self.arguments: Mapping[str, Any] = {}  # of ``training_step`` for the running batch
        self.outputs: list[MicroBatchOutput] = []  # of the finished micro-batches
        self.batch_sizes = BatchSizes()
        self.refusal = ""  # why a micro-batch of the running batch has no loss
        self._trainer, self._module, self._loop, self._weigh = trainer, module, loop, weigh

    def run(self, _: Any, micro_batch: Any) -> torch.Tensor | Mean | Sum:
        """Return the loss of one micro-batch, with its graph."""
        logged: list[LogCall] = []
        trainer, log, metrics = self._trainer, self._module.log, metrics_in(self._module)
        with (
            hook_name(self._module, "training_step"),
            replaced(
                self._module, "log", lambda *given, **named: logged.append(read_call(log, metrics, *given, **named))
            ),
            trainer.profiler.profile(f"[Strategy]{type(trainer.strategy).__name__}.training_step"),
            trainer.precision_plugin.train_step_context(),
        ):
            returned = self._module.training_step(*{**self.arguments, "batch": micro_batch}.values())
        # Lightning reads a tensor. Mean and Sum say what it was divided by.
        stated = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(stated, Mean | Sum):
            returned = {**returned, "loss": stated.loss} if isinstance(returned, Mapping) else stated.loss
        result = self._loop.output_result_cls.from_training_step_output(returned)
        if result.closure_loss is None:
            self.refusal = (
                f"{type(self._module).__name__}.training_step returned None for a part of a batch, but a step can be "
                f"skipped only as a whole: return a loss"
            )
            raise InvalidArgument(self.refusal)
        loss, size = result.loss, describe(micro_batch).count
        self.batch_sizes.note(logged, size)
        counted = size if self._weigh is None else self._weigh(micro_batch)
        weight = math.fsum(map(float, counted.values())) if isinstance(counted, Mapping) else float(counted)
        if isinstance(stated, Mean | Sum):
            weight = counts_of(stated)[""]
        if isinstance(stated, Sum) and weight:
            loss = loss / weight
        self.outputs.append(MicroBatchOutput(loss, size, weight, logged, result.extra))
        return stated if isinstance(stated, Mean | Sum) else result.closure_loss

    def backward_with(self, optimizer: Any) -> Callable[[torch.Tensor], None]:
        """Return Lightning's backward pass: its hooks, precision and ``LightningModule.backward``."""
        backward = self._loop._make_backward_fn(optimizer)  # noqa: SLF001 - what Lightning's own closure is made with

        def refuse_logging(name: str, *_: Any, **__: Any) -> None:
            raise InvalidArgument(
                f"self.log({name!r}) in {self._module._current_fx_name}, which runs once a micro-batch: log it in "  # noqa: SLF001 - Lightning's own word for where it is
                f"on_before_optimizer_step, where the gradient is the whole batch's"
            )

        def run(loss: torch.Tensor) -> None:
            with hook_name(self._module, None), replaced(self._module, "log", refuse_logging):
                backward(loss)

        return run

    def take(self) -> list[MicroBatchOutput]:
        return [*self.outputs]

    def put(self, taken: list[MicroBatchOutput]) -> None:
        self.outputs[:] = taken


@contextmanager
def hook_name(module: Any, name: str | None) -> Iterator[None]:
    """Let Lightning log under a hook's name, and restore the earlier one, which it does not do after an error."""
    earlier = module._current_fx_name  # noqa: SLF001 - what Lightning itself sets around each hook
    if name is not None:
        module._current_fx_name = name  # noqa: SLF001 - the same
    try:
        yield
    finally:
        module._current_fx_name = earlier  # noqa: SLF001 - the same
