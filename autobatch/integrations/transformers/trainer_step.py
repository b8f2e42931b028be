"""Runs a Trainer's own ``training_step`` on one micro-batch up to its loss, and records what it changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.errors import InvalidArgument
from autobatch.integrations.attributes import replaced
from autobatch.integrations.transformers.logs import TABLES, StepMetrics, TrainerLogs
from autobatch.integrations.transformers.whole_loss import find_whole_loss
from autobatch.step.workload import Weigh
from autobatch.undo.contents import Contents
from autobatch.undo.undo import Undo

_MOST_ENTRIES = 1000  # of a container in an attribute; a larger one is data, not a count
_MOST_METRICS = 10**6  # of TRL's lists, which have an entry for each step since the last log
_PLAIN = (int, float, bool, complex, str, bytes, type(None))


class TrainerStep:
    """The Trainer's own ``training_step`` on one micro-batch, up to its loss."""

    def __init__(self, trainer: Any, weigh: Weigh | None = None) -> None:
        self.trainer, self.training_step, self.weigh = trainer, trainer.training_step, weigh
        self.num_items: Any = None  # the Trainer's count of the whole batch, by which its loss may be divided
        self.samples, self.ranks = 1, trainer.args.world_size  # samples of this rank's batch
        self.metrics, self.logs = StepMetrics(trainer, "train"), TrainerLogs(trainer, weigh)
        self.whole = find_whole_loss(trainer, self.loss_of)

    def loss_of(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Return the loss that the step would run its backward pass from; refuse a step with none or several."""
        self.metrics.add(inputs)
        with self._hold_back() as losses, self.logs.catch(inputs):
            self.training_step(model, inputs, self.num_items)
        if len(losses) != 1:
            raise InvalidArgument(
                f"{type(self.trainer).__name__}.training_step called accelerator.backward() {len(losses)} times in a "
                f"micro-batch; it has to be called once, with the loss"
            )
        return losses[0]

    @property
    def scale(self) -> float:
        """Factor with which losses that were divided by ``num_items`` add up over the ranks."""
        return 1.0 if self.trainer.args.average_tokens_across_devices else 1 / self.ranks

    @contextmanager
    def _hold_back(self) -> Iterator[list[torch.Tensor]]:
        """Collect what ``accelerator.backward`` gets inside the block.

        The step waits for no other rank, and its metrics are this rank's own. The Trainer does not multiply the loss by
        the number of ranks: only DistributedDataParallel would divide it again.
        """
        losses: list[torch.Tensor] = []
        accelerator = self.trainer.accelerator
        with ExitStack() as stack:
            stack.enter_context(replaced(accelerator, "backward", lambda loss, **_: losses.append(loss)))
            if self.ranks > 1:
                stack.enter_context(replaced(self.trainer.args, "average_tokens_across_devices", value=False))
                gather = (lambda tensor, *_, **__: tensor) if self.metrics.are_there() else self._refuse_gathering
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
    """Put a model in train mode; the Trainer's step then leaves the modes of BatchNorm alone.

    Otherwise a comparison that fixes BatchNorm's statistics would run with those of each micro-batch.
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


@dataclass(frozen=True)
class _Attributes:
    data: dict[str, Any]  # plain data by name; a callback may hold the same objects, so they stay the same
    others: frozenset[str]  # names of all other attributes; their objects may hold a batch's memory
    found: Contents  # what each container in the data held
    values: list[tuple[torch.Tensor, torch.Tensor]]  # tensors in the data, with copies


class TrainerAttributes:
    """The Trainer's attributes that hold plain data, as an object that a Runner keeps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def take(self) -> _Attributes:
        attributes = vars(self._trainer)
        most = dict.fromkeys(TABLES, _MOST_METRICS)
        data = {name: one for name, one in attributes.items() if _is_data(one, most.get(name, _MOST_ENTRIES))}
        found = Contents(data.values())
        values = [(tensor, tensor.detach().clone()) for tensor in found.tensors]
        others = frozenset(attributes) - frozenset(data)
        return _Attributes(data, others, found, values)

    @torch.no_grad()
    def put(self, taken: _Attributes) -> None:
        """Restore them in the same objects; remove those that are new."""
        attributes = vars(self._trainer)
        known = taken.others | taken.data.keys()
        for name in [name for name, value in attributes.items() if name not in known and _is_data(value)]:
            del attributes[name]
        attributes.update(taken.data)
        taken.found.restore()
        for tensor, value in taken.values:
            if tensor.shape != value.shape:  # it was resized, or got other memory
                tensor.data = value.clone()
            elif not torch.equal(tensor, value):  # an expanded one, which has its value, cannot be written into
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(value)


def _is_data(value: Any, most: int = _MOST_ENTRIES) -> bool:
    """Return whether it and all that it holds are numbers, texts and small tensors, and not too many."""
    waiting, seen = [value], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list | tuple | set | deque):
            seen += len(one)
            if seen > most:
                return False
            waiting += one.values() if isinstance(one, dict) else one
        elif not isinstance(one, _PLAIN):
            is_tensor = type(one) is torch.Tensor and not one.requires_grad
            if not is_tensor or one.numel() > _MOST_ENTRIES:
                return False
    return True


@contextmanager
def undone(trainer: Any, model: nn.Module, device: torch.device, keep: Sequence[Any]) -> Iterator[None]:
    """Undo at the block's end what its passes changed, also in memory that only the user's objects hold."""
    before = Undo(model, device, keep=[TrainerAttributes(trainer), *keep])
    try:
        with before.watch():
            yield
    finally:
        before.restore()
