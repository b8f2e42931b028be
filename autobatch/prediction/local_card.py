"""Reads from torch which card this machine has.

Covers what a prediction depends on, as the table of cards has it (``cards``). Does not cover memory that is in use.
"""

from __future__ import annotations

import torch

from autobatch.prediction.cards import GPUS, Gpu, make_gpu

__all__ = ["read_card"]


def read_card(index: int | None = None) -> Gpu:
    """The card with this index, or the current one; its architecture is ``"unknown"`` where no card of the table is so.

    Needs CUDA.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    architecture = f"sm_{properties.major}{properties.minor}"
    return make_gpu(
        properties.name,
        properties.total_memory,
        architecture if architecture in {gpu.architecture for gpu in GPUS} else "unknown",
        multiprocessors=properties.multi_processor_count,
        source="read from the card of this machine",
        cuda=torch.version.cuda,
    )
