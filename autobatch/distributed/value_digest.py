"""Writes in a few characters what tensors hold, so that ranks can compare it bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from autobatch.distributed.sharding import has_shards
from autobatch.undo.tensor_header import is_uninitialized

__all__ = ["digest_values"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_ONCE = 2**20
"""Of which the places, in int64, lie beside them."""


@torch.no_grad()
def digest_values(tensors: Sequence[torch.Tensor | None]) -> str:
    """Empty where there is none; waits for the device.

    A rank's part of a sharded tensor is its own: of that only whether it is there counts.
    """
    if all(tensor is None for tensor in tensors):
        return ""
    numbers = [None if tensor is None else _sum_bits(tensor) for tensor in tensors]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def _sum_bits(tensor: torch.Tensor) -> int:
    """The sum of all elements' bits as integers, each times its place: the same values may lie in other places.

    A sum of floats would depend on the order in which a device adds them.
    """
    if tensor.is_meta or is_uninitialized(tensor) or has_shards(tensor):
        return 0
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    if not bits.numel():
        return 0
    rows = bits.reshape(1) if not bits.ndim else bits
    rows_at_once = max(1, _ELEMENTS_AT_ONCE * len(rows) // rows.numel())
    total = begin = 0
    for part in rows.split(rows_at_once):
        places = torch.arange(begin + 1, begin + part.numel() + 1, device=bits.device).view(part.shape)
        total, begin = total + int(places.mul_(part).sum()), begin + part.numel()
    return total % 2**64  # as the parts' sums, which int64 may not hold
