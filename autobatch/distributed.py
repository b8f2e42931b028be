"""How many ranks there are, and what is refused while they do not talk to each other.

Covers the question only: sizes are not agreed between ranks yet, and a rank that retried alone could leave the others
waiting. So more than one rank is refused where a hang or an unreduced gradient would follow.
"""

from __future__ import annotations

import torch.distributed

from autobatch.errors import AutobatchError

__all__ = ["refuse_many_ranks", "world_size"]


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def refuse_many_ranks() -> None:
    """Stop before anything runs.

    Raises:
        AutobatchError: There is more than one rank.
    """
    size = world_size()
    if size > 1:
        raise AutobatchError(
            f"{size} ranks are running, and this version of autobatch does not reduce gradients or agree on sizes "
            f"between ranks; run on one rank, or plan on one rank and use plan.settings() in your distributed framework"
        )
