"""Records everything that trials may change, and restores it after them.

Of a model and its optimizer these are values of parameters and buffers, gradients, optimizer state, containers and
flags in attributes, hooks, the memory that each tensor refers to, and random generators. Modules and tensors outside,
such as a teacher, are recorded without values; a value is copied before the first write into it while ``record`` is
active. The user's own objects, generators and files are not restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autobatch._formatting import name_type
from autobatch._user_errors import contextmanager
from autobatch._wrappers import is_optimizer, members_of, own_table
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import lacks_memory, storages_of
from autobatch.undo.containers import Contents, children_of, record_contents
from autobatch.undo.random_state import RandomState
from autobatch.undo.slots import Slots, own_attributes
from autobatch.undo.storage_copy import StorageCopies
from autobatch.undo.tensor_header import TensorHeaders
from autobatch.undo.written_memory import HostRecorder

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["TrainingState"]

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class TrainingState:
    """A model's and its optimizer's state at one moment.

    ``rewind`` is for between trials: values, generators and the model are as they were, while the optimizer keeps the
    state it has made, so that it is resident. ``restore`` puts everything back, in place: every tensor, dict and list
    is the same object as before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any | None,
        device: torch.device,
        *,
        host_bytes: int,
        outside: Iterable[nn.Module | torch.Tensor] = (),
    ) -> None:
        """Record all of it, and remove the optimizer's step hooks until ``restore``: they are for training.

        Args:
            model: Its submodules are covered too.
            optimizer: ``torch.optim.Optimizer`` or anything with ``param_groups`` and ``state``; wrapped ones are
                covered.
            device: The device whose random generator is recorded.
            host_bytes: Host memory that copies of values may take before they go to a file.
            outside: Modules and tensors in the step's reach that belong to neither. Their values are copied only when
                they are written into while ``record`` is active: a frozen teacher may be larger than the model.

        Raises:
            DoesNotFit: Neither host memory nor the disk has space for the copies.
            InvalidArgument: A trained tensor is of a class that does not show where its values are.
        """
        seen: set[int] = set()
        # First: what a module shares with the optimizer is the optimizer's, which keeps it between trials.
        of_optimizer = list(_walk([] if optimizer is None else _parts_of(optimizer), seen))
        of_model = list(_walk([vars(module) for module in model.modules()], seen))
        of_others = list(_walk(outside, seen | {id(module) for module in model.modules()}))
        found = (*of_optimizer, *of_model, *of_others)
        tensors = [value for value in found if issubclass(type(value), torch.Tensor)]
        owned = [value for value in (*of_optimizer, *of_model) if issubclass(type(value), torch.Tensor)]
        self._of_optimizer = [content for value in of_optimizer if (content := record_contents(value)) is not None]
        self._of_optimizer += [Slots(value) for value in (optimizer, *of_optimizer) if is_optimizer(value)]
        self._of_model = [
            content for value in (*of_model, *of_others) if (content := record_contents(value)) is not None
        ]
        _refuse_uncopied(model, owned)
        self._classes = [(module, type(module)) for module in (model, *found) if issubclass(type(module), nn.Module)]
        self._headers = TensorHeaders(tensors)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no public way to look at what has no shape yet
            self._gradients = [_Gradient(tensor) for tensor in tensors]
            self._values = StorageCopies(owned, host_bytes=host_bytes)
        self._random = RandomState(device)
        self._optimizer = optimizer
        _remove_step_hooks(optimizer)

    @contextmanager
    def record(self, apart: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Inside the block, copy each tensor before the first write into it, so that its value can be put back.

        Takes about 10 us an operator. Meanwhile compiled code runs as it was written.

        Args:
            apart: Tensors that are not copied.
        """
        recorder = HostRecorder(self._values, apart)
        try:
            with recorder:
                yield
        finally:
            recorder.stop()

    def rewind(self) -> None:
        """Put back values, generators and the model; gradients are dropped, what the optimizer has made stays."""
        self._put_back(self._of_model)
        for gradient in self._gradients:
            gradient.drop()

    def reset_optimizer(self) -> None:
        """Drop what the optimizer has made: a first step in which memory ended may leave half a state."""
        for content in self._of_optimizer:
            content.put_back()
        _remove_step_hooks(self._optimizer)

    def restore(self) -> None:
        """Put everything back bit for bit."""
        self._put_back([*self._of_optimizer, *self._of_model])

    def _put_back(self, contents: Iterable[Contents]) -> None:
        for module, cls in self._classes:
            if type(module) is not cls:  # a lazy module has become an ordinary one
                module.__class__ = cls
        for content in contents:
            content.put_back()
        self._headers.put_back()
        for gradient in self._gradients:  # now that gradients are what they were, too: half() casts those as well
            gradient.put_back()
        self._values.restore()
        self._random.restore()

    def __enter__(self) -> TrainingState:
        """Restore at the end of the block, also after an error."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore, and drop the record."""
        try:
            self.restore()
        finally:
            self.drop()

    def drop(self) -> None:
        """Drop the record; everything stays as it is now."""
        self._of_optimizer, self._of_model, self._classes, self._gradients = [], [], [], []
        self._headers, self._optimizer = TensorHeaders([]), None
        self._values.close()


def _refuse_uncopied(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors whose values a trial would change and nobody could put back; a frozen one need not be copied."""
    for tensor in tensors:
        if tensor.requires_grad and lacks_memory(tensor) and next(storages_of(tensor), None) is None:
            name = next((name for name, one in model.named_parameters() if one is tensor), "a tensor")
            raise InvalidArgument(
                f"{name} is {name_type(tensor)} of shape {tuple(tensor.shape)}, whose values cannot be copied: give "
                f"{type(tensor).__name__} a __tensor_flatten__(), or freeze it with requires_grad_(False)"
            )


class _Gradient:
    """A tensor's gradient and hooks, by identity."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._is_leaf = tensor, tensor.is_leaf
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._unhooked = [name for name in _TENSOR_HOOKS if getattr(tensor, name) is None]

    def put_back(self) -> None:
        for name in self._unhooked:
            (getattr(self.tensor, name) or {}).clear()
        if self._is_leaf:
            self.tensor.grad = self._gradient

    def drop(self) -> None:
        if self._is_leaf:
            self.tensor.grad = None


def _walk(roots: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Every object below the roots that is not in ``seen``, once each: roots first, then what they hold."""
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        waiting += _below(value)


def _below(value: Any) -> list[Any]:
    # By type: a mock passes for an instance of the class that it imitates.
    if issubclass(type(value), torch.Tensor):
        gradient = value.grad if value.is_leaf else None
        return [vars(value), gradient, *(getattr(value, name) for name in _TENSOR_HOOKS)]
    # A module that is hidden in a list, the optimizer inside another, and what passes all questions on to one.
    if issubclass(type(value), nn.Module):
        return [own_table(value)]
    if is_optimizer(value) or any(map(is_optimizer, own_attributes(value))):
        return _parts_of(value)
    return children_of(value)


def _parts_of(owner: Any) -> list[Any]:
    return [own_table(owner), *own_attributes(owner)]


def _remove_step_hooks(optimizer: Any | None) -> None:
    for member in members_of(optimizer):
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(member, name, None)
            if isinstance(hooks, dict):
                hooks.clear()
