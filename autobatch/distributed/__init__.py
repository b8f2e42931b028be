"""Counts the ranks, and refuses more than one where a hang or an unreduced gradient would follow.

Sizes are not agreed between ranks yet, and a rank that retried alone could leave the others waiting.
"""

from __future__ import annotations

import torch.distributed

from autobatch.errors import AutobatchError

__all__ = ["refuse_many_ranks", "world_size"]


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if has_group else 1


def refuse_many_ranks() -> None:
    """Raise ``AutobatchError`` before anything runs on more than one rank."""
    size = world_size()
    if size > 1:
        raise AutobatchError(
            f"{size} ranks are running, and this version of autobatch does not reduce gradients or agree on sizes "
            f"between ranks; run on one rank, or plan on one rank and use plan.settings() in your distributed framework"
        )
