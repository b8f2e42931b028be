"""Everything a training step may change, remembered before a probe and put back after it.

Covers, for a model and its optimizer: values of parameters, gradients, buffers (non-persistent too), tensor attributes
and optimizer state; the memory each tensor points to (``.data = ...``, ``resize_``, ``half()``); which objects stand
where (``.grad``, optimizer state entries, hooks of modules and tensors, train/eval flags, counters and containers kept
as attributes); ``requires_grad``; and the random generators. Does not cover what the step changes elsewhere: inside the
user's own objects and NumPy arrays, generators the user made, files, a dataset's position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autobatch.state.random_state import RandomState
from autobatch.state.storage_copy import StorageCopies
from autobatch.storages import place_of

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["TrainingState"]

_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class TrainingState:
    """A model's and its optimizer's state at one moment.

    ``rewind`` is for between trials: values, generators and the model are as they were, while the optimizer keeps the
    state it has made, so that it is resident. ``restore`` puts everything back, in place: every tensor, dict and list
    is the same object as before.
    """

    def __init__(self, model: nn.Module, optimizer: Any | None, device: torch.device, *, host_bytes: int) -> None:
        """Remember all of it, and silence the optimizer's step hooks until ``restore``: they tell of training.

        Args:
            model: Its submodules are covered too.
            optimizer: ``torch.optim.Optimizer`` or anything with ``param_groups`` and ``state``; wrapped ones are
                covered.
            device: Whose random generator is meant.
            host_bytes: Host memory that copies of values may take before they go to a file.

        Raises:
            DoesNotFit: There is neither host memory nor disk for the copies.
        """
        seen: set[int] = set()
        # First: what a module shares with the optimizer is the optimizer's, which keeps it between trials.
        of_optimizer = list(_walk([] if optimizer is None else [vars(optimizer)], seen))
        of_model = list(_walk([vars(module) for module in model.modules()], seen))
        tensors = [value for value in (*of_optimizer, *of_model) if isinstance(value, torch.Tensor)]
        self._of_optimizer = [_Contents(value) for value in of_optimizer if not isinstance(value, torch.Tensor)]
        self._of_model = [_Contents(value) for value in of_model if not isinstance(value, torch.Tensor)]
        self._tensors = [_Standing(tensor) for tensor in tensors]
        self._values = StorageCopies(tensors, host_bytes=host_bytes)
        self._random = RandomState.capture(device)
        self._optimizer = optimizer
        _silence_step_hooks(optimizer)

    def rewind(self) -> None:
        """Put back values, generators and the model; gradients are dropped, what the optimizer has made stays."""
        self._put_back(self._of_model)
        for standing in self._tensors:
            standing.drop_gradient()

    def reset_optimizer(self) -> None:
        """Drop what the optimizer has made: a first step in which memory ended may leave half a state."""
        for content in self._of_optimizer:
            content.put_back()
        _silence_step_hooks(self._optimizer)

    def restore(self) -> None:
        """Put everything back bit for bit."""
        self._put_back([*self._of_optimizer, *self._of_model])

    def _put_back(self, contents: Iterable[_Contents]) -> None:
        for content in contents:
            content.put_back()
        for standing in self._tensors:
            standing.put_back()
        for standing in self._tensors:  # now that gradients are what they were, too: half() casts those as well
            standing.put_back_gradient()
        self._values.restore()
        self._random.restore()

    def __enter__(self) -> TrainingState:
        """Restore at the end of the block, whatever happens in it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See ``restore``; nothing is remembered afterwards."""
        try:
            self.restore()
        finally:
            self._of_optimizer, self._of_model, self._tensors, self._optimizer = [], [], [], None
            self._values.close()


class _Contents:
    """What a container holds, by identity. One that has not changed is not touched: whoever watches it sees nothing."""

    def __init__(self, container: _Container) -> None:
        self._container = container
        self._keys, self._values = _members(container)

    def put_back(self) -> None:
        keys, values = _members(self._container)
        if _are_same(keys, self._keys) and _are_same(values, self._values):
            return
        self._container.clear()
        if isinstance(self._container, dict):
            # One by one: transformers' ModelOutput refuses update(), and dict.update() breaks an OrderedDict.
            for key, value in zip(self._keys, self._values, strict=True):
                self._container[key] = value
        elif isinstance(self._container, set):
            self._container.update(self._values)
        else:
            self._container.extend(self._values)


class _Standing:
    """How a tensor stands: the memory it points to, its gradient, its flags. Values are ``StorageCopies``' matter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._alias = tensor.detach()
        self._place = place_of(tensor)
        self._is_leaf = tensor.is_leaf
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._requires_grad = tensor.requires_grad
        self._unhooked = [name for name in _TENSOR_HOOKS if getattr(tensor, name) is None]

    def put_back(self) -> None:
        tensor = self.tensor
        if not self._is_leaf:
            return
        # A buffer that was updated in place with part of a graph. torch cannot take a view out of one.
        if not tensor.is_leaf and not tensor._is_view():  # noqa: SLF001 - no public twin
            tensor.detach_()
        if place_of(tensor) != self._place:
            tensor.data = self._alias
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        for name in self._unhooked:
            (getattr(tensor, name) or {}).clear()

    def put_back_gradient(self) -> None:
        if self._is_leaf:
            self.tensor.grad = self._gradient

    def drop_gradient(self) -> None:
        if self._is_leaf:
            self.tensor.grad = None


def _members(container: _Container) -> tuple[list[Any], list[Any]]:
    if isinstance(container, dict):
        return list(container.keys()), list(container.values())
    return [], list(container)


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _walk(roots: Iterable[Any], seen: set[int]) -> Iterator[torch.Tensor | _Container]:
    """Every tensor and every mutable container below the roots that is not in ``seen``, once each."""
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, dict, list, set, deque)):
            yield value
        waiting += _below(value)


def _below(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        gradient = value.grad if value.is_leaf else None
        return [vars(value), gradient, *(getattr(value, name) for name in _TENSOR_HOOKS)]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]  # optimizer.state is keyed by parameters
    if isinstance(value, (list, set, deque, tuple)):
        return list(value)
    is_inner_optimizer = hasattr(value, "param_groups") and hasattr(value, "__dict__")
    return [vars(value)] if is_inner_optimizer else []


def _silence_step_hooks(optimizer: Any | None) -> None:
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = getattr(optimizer, name, None)
        if isinstance(hooks, dict):
            hooks.clear()
