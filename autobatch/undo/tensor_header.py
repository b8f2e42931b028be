"""Records what tensor objects refer to and their flags, and restores them; values are copied elsewhere.

That is a tensor's memory (``.data = ...``, ``resize_``, ``half()``), its class, its attributes, ``requires_grad``, its
graph and its gradient hooks. ``.grad`` is recorded elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autobatch.torch_internals.storages import lacks_memory, storage_key
from autobatch.undo.containers import put_entries_back

UNDISTURBED = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - no public way to ask what has no shape yet
LAZY = frozenset((UninitializedParameter, UninitializedBuffer))


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer that has no shape yet; few questions may be asked of one."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


class TensorHeaders:
    """What some tensors referred to at one moment, and their flags. Aliases hold that memory until this is gone."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record them, each given once."""
        self.tensors, self._classes = tensors, [type(tensor) for tensor in tensors]
        with UNDISTURBED():
            self._aliases = [_alias(tensor) for tensor in tensors]
            self._flags = [(tensor.requires_grad, tensor.is_leaf) for tensor in tensors]
            # By value: a hook's handle refers to the table, so the table stays the same object.
            self._hooks = [dict(tensor._backward_hooks or {}) for tensor in tensors]  # noqa: SLF001 - no public way
        self._held = [vars(tensor).copy() for tensor in tensors]

    def put_back(self) -> None:
        """Restore what they refer to, and their flags. Can be done any number of times."""
        with UNDISTURBED():
            headers = zip(self.tensors, self._aliases, self._classes, strict=True)
            for tensor, alias, cls in headers:
                if type(tensor) is not cls:
                    tensor.data = alias
                    tensor.__class__ = cls
            for tensor, alias, (requires_grad, was_leaf) in zip(self.tensors, self._aliases, self._flags, strict=True):
                if was_leaf:
                    _put_leaf_back(tensor, alias, requires_grad=requires_grad)
            for tensor, held in zip(self.tensors, self._held, strict=True):
                put_entries_back(vars(tensor), held)
            for tensor, hooks in zip(self.tensors, self._hooks, strict=True):
                table = tensor._backward_hooks  # noqa: SLF001 - no public way
                if table is not None and table != hooks:
                    table.clear()
                    table.update(hooks)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory, unseen by dispatch modes, since neither counts nor planned faults concern it.

    ``_make_subclass`` takes all modes off the stack (torch/csrc/autograd/python_variable.cpp); it makes a plain tensor,
    so wrappers are detached. One that does not show its memory stands for itself: torch 2.8 makes no other of it.
    """
    if is_traceable_wrapper_subclass(tensor):
        return tensor.detach()
    if lacks_memory(tensor):
        return tensor
    return torch.Tensor._make_subclass(torch.Tensor, tensor)  # noqa: SLF001 - as nn.Parameter does


def _put_leaf_back(tensor: torch.Tensor, alias: torch.Tensor, *, requires_grad: bool) -> None:
    # A buffer that was updated in place with part of a graph. torch cannot take a view out of one.
    if not tensor.is_leaf and not tensor._is_view():  # noqa: SLF001 - no public way
        tensor.detach_()
    if not _refer_to_the_same(tensor, alias):
        tensor.data = alias
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _refer_to_the_same(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    # Without a shape, it does not matter where it points.
    return is_uninitialized(tensor) or storage_key(tensor) == storage_key(alias)
