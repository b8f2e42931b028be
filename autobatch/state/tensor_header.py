"""Remembers what a tensor object refers to and its flags, and puts them back; values are kept elsewhere.

Covers the memory that it points to (``.data = ...``, ``resize_``, ``half()``), its class (a lazy module's parameter
becomes an ordinary one in its first forward pass), ``requires_grad``, a graph that it was made part of in place, and
gradient hooks. Does not cover ``.grad``.
"""

from __future__ import annotations

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from autobatch.storages import place_of

__all__ = ["TensorHeader", "is_uninitialized"]


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer that has no shape yet; few questions may be asked of one."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


class TensorHeader:
    """What one tensor referred to, and its flags. Holds an alias, so that the memory cannot be freed meanwhile."""

    __slots__ = ("_alias", "_class", "_has_hooks", "_is_leaf", "_requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Look at it. Must run with ``torch._C.DisableTorchFunctionSubclass`` where it may be uninitialized."""
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version
        self._class = type(tensor)
        self._alias = tensor.detach()
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._has_hooks = tensor._backward_hooks is not None  # noqa: SLF001 - no public way

    def is_current(self) -> bool:
        """Whether it refers to the same memory in the same way, and has the same flags."""
        tensor = self.tensor
        return (
            type(tensor) is self._class
            and self._refers_to_the_same()
            and tensor.is_leaf == self._is_leaf
            and tensor.requires_grad == self._requires_grad
            and (self._has_hooks or not tensor._backward_hooks)  # noqa: SLF001 - no public way
        )

    def was_written(self) -> bool:
        """Whether torch has counted a write into its memory since: those through ``.data`` and by some kernels are not.

        A tensor that refers to other memory by now does not count: what it referred to is as it was.
        """
        return self.version is not None and self.tensor._version != self.version and self._refers_to_the_same()

    def put_back(self) -> None:
        """Let it refer to the same memory again, with the same flags. Can be done any number of times."""
        tensor = self.tensor
        if type(tensor) is not self._class:
            tensor.data = self._alias
            tensor.__class__ = self._class
        if not self._is_leaf:
            return
        # A buffer that was updated in place with part of a graph. torch cannot take a view out of one.
        if not tensor.is_leaf and not tensor._is_view():  # noqa: SLF001 - no public way
            tensor.detach_()
        if not self._refers_to_the_same():
            tensor.data = self._alias
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if not self._has_hooks:
            (tensor._backward_hooks or {}).clear()  # noqa: SLF001 - no public way

    def _refers_to_the_same(self) -> bool:
        if is_uninitialized(self.tensor):  # of a size of 0, wherever it points
            return self.tensor.dtype == self._alias.dtype and self.tensor.device == self._alias.device
        return place_of(self.tensor) == place_of(self._alias)
