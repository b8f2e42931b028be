"""The memory behind a tensor of any layout.

Covers dense, sparse and wrapped tensors on every device. Does not cover what is done with the memory: counting it is
``memory.live_storage``, putting it aside ``workload.storage_copy``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["storages_of"]

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Every storage that holds values of a tensor, in a fixed order; the same one may come more than once.

    Args:
        tensor: Of any shape, dtype, layout and device. A sparse one has a storage for each of its parts, a wrapper
            (``torch.utils._python_dispatch``) those of the tensors inside it.

    Yields:
        Storages on real devices: none for meta and fake tensors, nor for opaque ones (oneDNN's own layout).
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
    elif tensor.layout in _SPARSE_PARTS:
        parts = [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]
    else:
        yield from _strided_storage(tensor)
        return
    for part in parts:
        yield from storages_of(part)


def _strided_storage(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque layouts have no storage to look at
        return
    if storage.device.type != "meta":  # a fake tensor claims a device, its storage does not
        yield storage
