"""Layers whose output for one sample depends on the others in its micro-batch.

Covers torch's BatchNorm family in train mode, the one common layer for which no weighting makes a split exact. Does not
cover losses that compare samples with each other; a check of gradients finds those.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["batch_norms_in_train_mode", "blame_batch_norms", "warn_of_batch_norms"]


def batch_norms_in_train_mode(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by their micro-batch's own statistics."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ]


def blame_batch_norms(names: Sequence[str], size: str = "", together: str = "") -> str:
    """Why such layers make a split inexact, with sizes where they are known, and what would be exact."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm in train mode ({shown}) normalises each micro-batch{size} by itself{together}; GroupNorm, or "
        f"BatchNorm in eval mode, is exact"
    )


def warn_of_batch_norms(names: Sequence[str], micro_batch_size: int, total: int) -> str:
    """The warning for a plan that splits a model with such layers."""
    blame = blame_batch_norms(names, f" of {micro_batch_size}", f", not the {total} together")
    return f"splitting is not exact here: {blame}"
