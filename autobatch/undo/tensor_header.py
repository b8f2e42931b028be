"""Records what tensor objects refer to and their flags, and restores them; values are copied elsewhere.

That is a tensor's memory (``.data = ...``, ``resize_``, ``half()``), its class, its attributes, ``requires_grad``, its
graph and its gradient hooks. ``.grad`` is recorded elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autobatch.torch_internals.storages import storage_key, storages_of
from autobatch.undo.containers import is_same, put_entries_back

# Read by functions in C: a generator expression costs a Python call for each tensor, in every step.
_MAKE_ALIAS = torch.Tensor._make_subclass  # noqa: SLF001 - as nn.Parameter does; see ``_alias``
_VERSION = attrgetter("_version")
_FLAGS = attrgetter("requires_grad", "is_leaf", "_backward_hooks")
_HOOKS = itemgetter(2)

UNDISTURBED = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - no public way to ask what has no shape yet
LAZY = frozenset((UninitializedParameter, UninitializedBuffer))


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer that has no shape yet; few questions may be asked of one."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


class TensorHeaders:
    """What some tensors referred to at one moment, and their flags. Aliases hold that memory until this is gone.

    Attributes:
        tensors: Those that were recorded.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record them, each given once."""
        self.tensors = tensors
        self._attributes, self._classes = [*map(vars, tensors)], [*map(type, tensors)]
        with UNDISTURBED():
            self._is_usual = not any(is_traceable_wrapper_subclass(t) or t.is_inference() for t in tensors)
        self.renew()

    def renew(self) -> bool:
        """Record them again: ``put_back`` restores what they refer to now.

        Returns:
            Whether their classes are the same. If not (``swap_tensors``, ``materialize``), nothing was recorded.
        """
        tensors = self.tensors
        if [*map(type, tensors)] != self._classes or not all(map(is_, map(vars, tensors), self._attributes)):
            return False
        with UNDISTURBED():
            if self._is_usual:
                self._aliases = [*map(_MAKE_ALIAS, repeat(torch.Tensor), tensors)]
                self._versions = [*map(_VERSION, tensors)]
            else:
                self._aliases = [_alias(tensor) for tensor in tensors]
                self._versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
            self._flags = [*map(_FLAGS, tensors)]
        # By value: a hook's handle refers to the table, so the table stays the same object.
        self._hooks = [dict(hooks or {}) for _, _, hooks in self._flags] if any(map(_HOOKS, self._flags)) else []
        self._held = [held.copy() for held in self._attributes] if any(self._attributes) else [{}] * len(tensors)
        return True

    def release(self) -> None:
        """Drop the references to the tensors' memory, until ``renew``."""
        self._aliases, self._held, self._flags, self._hooks = [], [], [], []

    def any_written(self) -> bool:
        """Whether torch has counted a write into any of them."""
        if self._is_usual:
            try:
                return [*map(_VERSION, self.tensors)] != self._versions
            except RuntimeError:  # one has become an inference tensor, which counts none
                pass
        return bool(self.find_written())

    def find_written(self) -> list[torch.Tensor]:
        """Aliases of tensors into which torch has counted a write. Those through ``.data`` are not counted.

        Where such a tensor refers to other memory by now, its old memory may or may not have been written into before;
        that of a lazy module's parameter had no size.
        """
        counts = zip(self.tensors, self._versions, self._aliases, self._classes, strict=True)
        return [
            alias
            for tensor, version, alias, cls in counts
            if version >= 0 and cls not in LAZY and not tensor.is_inference() and tensor._version != version
        ]

    def find_referring(self, storages: AbstractSet[int]) -> set[int]:
        """The ids of tensors that referred to one of these storages (``_cdata``), or do so now."""
        pairs = zip(self.tensors, self._aliases, strict=True)
        return {
            id(tensor)
            for tensor, alias in pairs
            if any(s._cdata in storages for t in (tensor, alias) for s in storages_of(t))
        }

    def storages(self) -> set[int]:
        """The storages (``_cdata``) that they referred to, and those that they refer to now."""
        return {s._cdata for tensor in (*self._aliases, *self.tensors) for s in storages_of(tensor)}

    def are_current(self) -> bool:
        """Whether all refer to the same memory in the same way, and have the same flags."""
        tensors = self.tensors
        return (
            all(map(_refer_to_the_same, tensors, self._aliases))
            and [type(t) for t in tensors] == self._classes
            and all(map(_holds, tensors, self._held))
            and [(t.requires_grad, t.is_leaf) for t in tensors] == [flags[:2] for flags in self._flags]
            and all((tensor._backward_hooks or {}) == hooks for tensor, hooks in self._hooked())  # noqa: SLF001 - no public way
        )

    def put_back(self) -> None:
        """Restore what they refer to, and their flags. Can be done any number of times."""
        with UNDISTURBED():
            headers = zip(self.tensors, self._aliases, self._classes, strict=True)
            for tensor, alias, cls in headers:
                if type(tensor) is not cls:
                    tensor.data = alias
                    tensor.__class__ = cls
            for tensor, alias, (requires_grad, was_leaf, _) in zip(
                self.tensors, self._aliases, self._flags, strict=True
            ):
                if was_leaf:
                    _put_leaf_back(tensor, alias, requires_grad=requires_grad)
            for tensor, held in zip(self.tensors, self._held, strict=True):
                put_entries_back(vars(tensor), held)
            for tensor, hooks in self._hooked():
                table = tensor._backward_hooks  # noqa: SLF001 - no public way
                if table is not None and table != hooks:
                    table.clear()
                    table.update(hooks)

    def _hooked(self) -> Iterable[tuple[torch.Tensor, dict[int, Any]]]:
        """Each tensor with the gradient hooks that it had."""
        return zip(self.tensors, self._hooks or repeat({}), strict=False)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory, unseen by dispatch modes, since neither counts nor planned faults concern it.

    ``_make_subclass`` takes all modes off the stack (torch/csrc/autograd/python_variable.cpp); it makes a plain tensor,
    so wrappers are detached.
    """
    if is_traceable_wrapper_subclass(tensor):
        return tensor.detach()
    return torch.Tensor._make_subclass(torch.Tensor, tensor)  # noqa: SLF001 - as nn.Parameter does


def _put_leaf_back(tensor: torch.Tensor, alias: torch.Tensor, *, requires_grad: bool) -> None:
    # A buffer that was updated in place with part of a graph. torch cannot take a view out of one.
    if not tensor.is_leaf and not tensor._is_view():  # noqa: SLF001 - no public way
        tensor.detach_()
    if not _refer_to_the_same(tensor, alias):
        tensor.data = alias
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _holds(tensor: torch.Tensor, held: dict[str, object]) -> bool:
    now = vars(tensor)
    return now.keys() == held.keys() and is_same([*now.values()], [*held.values()])


def _refer_to_the_same(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    # Without a shape, it does not matter where it points.
    return is_uninitialized(tensor) or storage_key(tensor) == storage_key(alias)
