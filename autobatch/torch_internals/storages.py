"""Finds the storages of a tensor of any layout, which ``memory.cpu`` counts and ``undo`` copies; knows lazy ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

UNDISTURBED = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - no public way to ask what has no shape yet
LAZY = frozenset((UninitializedParameter, UninitializedBuffer))
"""Classes of a lazy module's parameters and buffers that have no shape yet."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Return whether it is a lazy module's tensor that has no shape yet; few questions may be asked of one."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def has_shards(tensor: torch.Tensor) -> bool:
    """Return whether each rank has only a part of this parameter or gradient."""
    return type(tensor.data).__name__ == "DTensor"


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values; a view has those that it shows, a sparse one those of its parts."""
    if isinstance(tensor, UninitializedParameter):
        return 0
    if tensor.layout in _SPARSE_PARTS:
        return sum(storage.nbytes() for storage in storages_of(tensor))
    if is_traceable_wrapper_subclass(tensor):  # a sharded tensor has this rank's part
        return sum(map(bytes_of, _parts_of(tensor)))
    return int(tensor.nbytes)


def storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that changes if a tensor points to other memory or reads it differently; values do not count."""
    storages = [storage._cdata for storage in storages_of(tensor)]
    strides = (tensor.storage_offset(), tensor.stride()) if tensor.layout is torch.strided else None
    return storages, tensor.dtype, tensor.shape, strides


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield every storage that holds values of a tensor, in a fixed order; one may come more than once.

    A sparse tensor has one for each of its parts. A wrapper subclass has those of the tensors inside it. If it does
    not name them (no ``__tensor_flatten__``), they are looked for in its attributes. Meta, fake and opaque tensors
    (oneDNN's layout) have none.
    """
    if is_traceable_wrapper_subclass(tensor):
        for part in _parts_of(tensor):
            yield from storages_of(part)
    elif tensor.layout in _SPARSE_PARTS:
        for name in _SPARSE_PARTS[tensor.layout]:
            yield from storages_of(getattr(tensor, name)())
    else:
        try:
            storage = tensor.untyped_storage()
        # Opaque layouts have no storage, and a lazy module's parameter refuses nearly every question.
        except (NotImplementedError, RuntimeError, ValueError):
            return
        if storage.device.type == "meta":  # a fake tensor claims a device, its storage does not
            return
        if type(tensor) in _PLAIN or _has_memory(storage):
            yield storage
            return
        for part in vars(tensor).values():
            if isinstance(part, torch.Tensor) and part is not tensor and not lacks_memory(part):
                yield from storages_of(part)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Return whether another tensor, such as a view, has the same storage."""
    storage = tensor.untyped_storage()  # the second of its two users, if no other tensor is one
    return torch._C._storage_Use_Count(storage._cdata) > 2  # noqa: SLF001 - no public equivalent


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a wrapper that does not name the tensors with its values."""
    if type(tensor) in _PLAIN or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return storage.device.type != "meta" and not _has_memory(storage)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        return storage.nbytes() == 0 or storage.data_ptr() != 0
    except RuntimeError:  # torch refuses to look at such a pointer
        return False


def _parts_of(wrapper: Any) -> list[torch.Tensor]:
    """Return the tensors inside; a DTensor names its mesh among them (torch 2.13)."""
    parts = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
