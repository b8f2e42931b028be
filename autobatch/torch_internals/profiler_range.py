"""A name in torch's profiler for what is run inside a block.

Covers the range alone. Does not cover when a profile is taken: that is the user's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

__all__ = ["profile_range"]


def profile_range(name: str) -> AbstractContextManager[None] | None:
    """A ``record_function`` while a profiler looks; else nothing, as that would cost 15 us a micro-batch."""
    if torch._C._autograd._profiler_enabled():  # noqa: SLF001 - what torch/autograd/profiler.py itself asks
        return torch.profiler.record_function(name)
    return None
