"""Everything a training step may change, remembered before a probe and put back after it.

Covers, for a model and its optimizer: values of parameters, buffers (non-persistent too), tensor attributes and
optimizer state; which objects stand where (``.grad``, optimizer state entries, hooks, train/eval flags, counters kept
as module attributes); ``requires_grad``; and the random generators. Does not cover what the step changes elsewhere: the
user's own counters, files, a dataset's position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autobatch.workload.random_state import RandomState
from autobatch.workload.storage_copy import StorageCopies

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["TrainingState"]

_Container = dict[Any, Any] | list[Any] | deque[Any]


class TrainingState:
    """A model's and its optimizer's state at one moment.

    ``rewind`` puts values and generators back between trials, and leaves what is resident (fresh optimizer state) where
    it is. ``restore`` puts everything back, in place: every tensor, dict and list is the same object as before.
    """

    def __init__(self, model: nn.Module, optimizer: Any | None, device: torch.device, *, host_bytes: int) -> None:
        """Remember all of it.

        Args:
            model: Its submodules are covered too.
            optimizer: ``torch.optim.Optimizer`` or anything with ``param_groups`` and ``state``; wrapped ones are
                covered.
            device: Whose random generator is meant.
            host_bytes: Host memory that copies of values may take before they go to a file.
        """
        roots = [vars(module) for module in model.modules()]
        if optimizer is not None:
            roots.append(vars(optimizer))
        found = list(_walk(roots))
        tensors = [value for value in found if isinstance(value, torch.Tensor)]
        self._containers = [(value, value.copy()) for value in found if not isinstance(value, torch.Tensor)]
        self._leaves = [(tensor, tensor.grad, tensor.requires_grad) for tensor in tensors if tensor.is_leaf]
        self._values = StorageCopies(tensors, host_bytes=host_bytes)
        self._random = RandomState.capture(device)

    def rewind(self) -> None:
        """Put values and generators back; gradients of the leaves are dropped."""
        for tensor, _, _ in self._leaves:
            tensor.grad = None
        self._values.restore()
        self._random.restore()

    def restore(self) -> None:
        """Put everything back bit for bit."""
        for container, members in self._containers:
            container.clear()
            if isinstance(container, dict):
                container.update(members)
            else:
                container.extend(members)
        for tensor, gradient, requires_grad in self._leaves:
            tensor.grad = gradient
            tensor.requires_grad_(requires_grad)
        self._values.restore()
        self._random.restore()

    def __enter__(self) -> TrainingState:
        """Restore at the end of the block, whatever happens in it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See ``restore``."""
        self.restore()
        self._values.close()


def _walk(roots: Iterable[Any]) -> Iterator[torch.Tensor | _Container]:
    """Every tensor and every mutable container below the roots, once each; inner optimizers are entered."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield value
            waiting.extend(value.values())
            waiting.extend(
                key for key in value if isinstance(key, torch.Tensor)
            )  # optimizer.state is keyed by parameters
        elif isinstance(value, (list, deque)):
            yield value
            waiting.extend(value)
        elif isinstance(value, tuple):
            waiting.extend(value)
        elif hasattr(value, "param_groups") and hasattr(value, "__dict__"):
            waiting.append(vars(value))
