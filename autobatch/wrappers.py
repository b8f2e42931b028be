"""Finds the user's own objects inside the wrappers that frameworks put around them.

Covers modules inside ``DistributedDataParallel`` and ``torch.compile``. Does not cover wrappers of other kinds, which
stay as they are.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["unwrap_model"]


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's own module inside ``DistributedDataParallel`` and ``torch.compile``, whose signatures tell nothing."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner
