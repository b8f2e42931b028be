"""Sends the buffers of the first rank to all others, as ``DistributedDataParallel`` does.

Covers what must be the same on each rank for that, and one collective for each dtype. Does not cover which buffers
these are (``data_parallel``).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autobatch.distributed.channel import Channel

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """Some buffers, and a copy of them in one tensor for each dtype.

    Attributes:
        description: What differs where two ranks have other buffers.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make the copies: here memory may end, and after this nothing more is needed."""
        alike: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in buffers:
            alike[buffer.dtype, buffer.device].append(buffer.detach())
        self._groups = [(group, torch.cat([buffer.reshape(-1) for buffer in group])) for group in alike.values()]
        facts = [(str(buffer.dtype), tuple(buffer.shape)) for buffer in buffers]
        self.description = hashlib.sha256(repr(facts).encode()).hexdigest()[:16] if facts else ""

    @torch.no_grad()
    def take_first(self, group: dist.ProcessGroup | None, channel: Channel) -> None:
        """Make the buffers those of the group's first rank.

        Raises:
            RankLost: A rank is gone.
        """
        with _disable_current_modes():  # a budget that raised in here would leave the others waiting
            for _, numbers in self._groups:
                try:
                    dist.broadcast(numbers.view(torch.uint8), group=group, group_src=0)
                except RuntimeError as error:
                    reason = f"sending the buffers broke off: {error}".strip().partition("\n")[0]
                    raise channel.lose(reason) from error
        for buffers, numbers in self._groups:
            for buffer, values in zip(buffers, numbers.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
