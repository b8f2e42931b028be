"""Runs a Trainer's own ``training_step`` on one micro-batch up to its loss, with its backward pass held back.

Covers what the step would do besides: wait for other ranks, add to metrics. Does not cover what the loss is a mean over
(``loss_rule``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.batch.samples import describe
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.exactness.determinism import deterministic
from autobatch.integrations.attributes import replaced
from autobatch.integrations.transformers.cuts import Cut
from autobatch.integrations.transformers.metrics import StepMetrics
from autobatch.integrations.transformers.trainer_logs import TrainerLogs
from autobatch.integrations.transformers.trainer_state import TrainerAttributes
from autobatch.memory.oom import describe_error
from autobatch.step.workload import Workload
from autobatch.undo.undo import Undo

__all__ = ["TrainerStep", "modes_of_training"]

_log = logging.getLogger("autobatch")

_FEW = 5
"""Samples that are compared with their parts: unequal ones, so that a mean over samples is not one over parts."""


@dataclass
class TrainerStep:
    """The Trainer's own ``training_step`` on one micro-batch, up to its loss.

    Attributes:
        trainer: Whose step it is.
        training_step: The Trainer's own.
        num_items: What the Trainer has counted in the whole batch, for its loss to be divided by.
        samples: Number of samples in this rank's batch.
        ranks: How many there are.
        metrics: What it adds to the Trainer's metrics.
        logs: What it logs.
    """

    trainer: Any
    training_step: Callable[..., Any]
    num_items: Any = None
    samples: int = 1
    ranks: int = 1
    metrics: StepMetrics = field(init=False)
    logs: TrainerLogs = field(init=False)

    def __post_init__(self) -> None:
        """Watch the Trainer's metrics and logs."""
        self.metrics, self.logs = StepMetrics(self.trainer, "train"), TrainerLogs(self.trainer)

    def loss_of(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """The loss that it would run its backward pass from.

        Raises:
            InvalidArgument: It ran none or several.
        """
        self.metrics.add(inputs)
        with self._hold_back() as losses, self.logs.catch(inputs):
            self.training_step(model, inputs, self.num_items)
        if len(losses) != 1:
            raise InvalidArgument(
                f"{type(self.trainer).__name__}.training_step called accelerator.backward() {len(losses)} times in a "
                f"micro-batch; it has to be called once, with the loss"
            )
        return losses[0]

    def _begin(self, model: nn.Module) -> Undo:
        """What a few passes may change, as it is now."""
        device = next(model.parameters()).device
        return Undo(model, device, keep=[TrainerAttributes(self.trainer), self.metrics.tokens])

    def learn_logs(self, model: nn.Module, cut: Cut, inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> None:
        """Find how numbers that it logs are put together, on a few samples; without it they are means over samples."""
        batch = cut.batch_of(inputs, samples)
        count = describe(batch).count
        few = min(_FEW, count)
        if few < 2:
            return
        spread = [index * (count - 1) // (few - 1) for index in range(few)]

        def run(sizes: Sequence[int]) -> None:
            with self.repeatable(model, cut, batch, spread) as (loss_of, _):
                for start, stop in pairwise([0, *accumulate(sizes)]):
                    loss_of(start, stop)

        try:
            self.logs.learn(run, (first := min(few - 1, few // 2 + 1), few - first))
        except AutobatchError:
            raise
        except Exception as error:  # noqa: BLE001 - the step itself is run later, and raises what is the user's
            _log.info("could not run a few samples to see what they log: %s", describe_error(error))

    @contextmanager
    def repeatable(
        self, model: nn.Module, cut: Cut, batch: Any, rows: Sequence[int]
    ) -> Iterator[tuple[Callable[[int, int], float], Callable[[], bool]]]:
        """Run rows of a batch without dropout and with the same random numbers for each sample.

        Yields what returns the loss of ``rows[start:stop]``, to be called with all of them first, and whether a part
        has shown how its samples draw, so that all have to be run again. Afterwards all is restored that the passes
        have changed.
        """
        before = self._begin(model)
        try:
            with deterministic(model, [*model.parameters()]) as random:

                def loss_of(start: int, stop: int) -> float:
                    def step(model: nn.Module, part: Any) -> torch.Tensor:
                        random.begin(range(start, stop), len(rows))
                        return self.loss_of(model, cut.inputs_of(part))

                    loss = Workload(model, step).call_step(cut.pick(batch, rows[start:stop]))
                    return float(loss.detach())

                def has_learned() -> bool:
                    random.end()
                    return random.take_learned()

                yield loss_of, has_learned
        finally:
            before.restore()

    @property
    def scale(self) -> float:
        """What a loss that was divided by ``num_items`` is multiplied by, to add up over the ranks."""
        return 1.0 if self.trainer.args.average_tokens_across_devices else 1 / self.ranks

    @contextmanager
    def _hold_back(self) -> Iterator[list[torch.Tensor]]:
        """While this lasts, ``accelerator.backward`` runs nothing.

        Of several ranks none waits for another: metrics are this rank's own, and the loss is not multiplied by the
        number of ranks, which would be for DistributedDataParallel to divide by.
        """
        losses: list[torch.Tensor] = []
        with ExitStack() as stack:
            accelerator = self.trainer.accelerator
            stack.enter_context(replaced(accelerator, "backward", lambda loss, **_: losses.append(loss)))
            if self.ranks > 1:
                stack.enter_context(replaced(self.trainer.args, "average_tokens_across_devices", value=False))
                gather = _return_own if self.metrics.are_there() else self._refuse_gathering
                for name in ("gather", "gather_for_metrics", "reduce"):
                    stack.enter_context(replaced(accelerator, name, gather))
            yield losses

    def _refuse_gathering(self, *_: Any, **__: Any) -> Any:
        raise InvalidArgument(
            f"{type(self.trainer).__name__} gathers over the ranks inside its step, and each rank may run another "
            f"number of micro-batches: train on one rank, or use plan.settings('huggingface')"
        )


@contextmanager
def modes_of_training(model: nn.Module) -> Iterator[None]:
    """Put a model in train mode, as the Trainer's step does, which then leaves BatchNorm's modes alone.

    Else a comparison with BatchNorm's statistics fixed would be done with those of each micro-batch.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train()
    with ExitStack() as stack:
        for module, _ in before:
            if isinstance(module, _BatchNorm):
                stack.enter_context(replaced(module, "train", partial(_switch_off, module)))
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training


def _switch_off(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - the signature of torch
    return module if mode else nn.Module.train(module, mode=False)


def _return_own(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor
