"""What an operator's arguments tell before it runs: where they are, and whether it only writes into them.

Covers tensors alone and in lists. Does not cover what an operator returns (``outputs``).
"""

# ruff: noqa: SLF001 - what torch keeps for those who add devices has no public names

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE
from autobatch.prediction.tracing.outputs import tensors_in

__all__ = ["check_devices", "has_real", "is_on_device", "is_written_to", "only_writes"]

_aten = torch.ops.aten
_TAKES_HOSTS = (_aten.copy_.default, _aten.index_put_.default, _aten._index_put_impl_.default)


@cache
def only_writes(func: Any) -> bool:
    """Whether an operator does nothing but write into its first argument, or list of them: no memory comes or goes."""
    name = func._schema.name.partition("::")[2]
    return (
        func.namespace == "aten"
        and name.endswith("_")
        and torch.Tag.inplace_view not in func.tags
        and not name.startswith(("resize", "set_", "_amp"))
        and len(func._schema.returns) <= 1
    )


def is_written_to(args: tuple[Any, ...]) -> bool:
    """Whether what is written to, the first argument, is on the fake device."""
    first = args[0] if args else None
    if isinstance(first, (list, tuple)):
        return all(isinstance(tensor, torch.Tensor) and is_on_device(tensor) for tensor in first)
    return isinstance(first, torch.Tensor) and is_on_device(first)


def check_devices(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse an operator that writes as CUDA does: of the host it takes single values, indices, and what it copies.

    Raises:
        RuntimeError: A tensor is the host's, in torch's own words.
    """
    if func in _TAKES_HOSTS:
        return
    for tensor in tensors_in(args):
        if tensor.dim() and not is_on_device(tensor):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                f"{tensor.device}!"
            )


def has_real(args: Any, kwargs: Any) -> bool:
    """Whether a tensor is one with memory, which the step holds on to."""
    return any(not isinstance(tensor, FakeTensor) for tensor in tensors_in((args, *kwargs.values())))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one on the fake device."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE_TYPE
