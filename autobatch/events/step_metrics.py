"""The numbers of a step under the keys that trackers show: ``autobatch/...``.

Covers names and values of one step. Does not cover trackers (``hooks``) nor the loss, which is the user's to read.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["step_metrics"]


def step_metrics(
    micro_batch_sizes: Sequence[int], retries: int, peak_bytes: int, seconds: float
) -> dict[str, int | float]:
    """Plain numbers, each under one key; bytes are bytes.

    Args:
        micro_batch_sizes: The committed micro-batches.
        retries: How often the step had to begin again with less.
        peak_bytes: Most bytes in tensors at once.
        seconds: Wall time.
    """
    return {
        "autobatch/samples": sum(micro_batch_sizes),
        "autobatch/micro_batch_size": max(micro_batch_sizes, default=0),
        "autobatch/accumulation_steps": len(micro_batch_sizes),
        "autobatch/retries": retries,
        "autobatch/peak_bytes": peak_bytes,
        "autobatch/seconds": seconds,
    }
