"""Finds BatchNorm layers in train mode, which no weighing makes exact, and layers that cannot run one sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""How ``torch.nn.functional.batch_norm`` and ``group_norm`` refuse one value to normalise (``_verify_batch_size``)."""


def batch_norms_in_train_mode(model: nn.Module) -> list[str]:
    """Return the names of the layers that normalise by the statistics of their micro-batch."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ]


def show_names(names: Sequence[str]) -> str:
    """Join the first three names of modules, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def blame_batch_norms(names: Sequence[str], size: str = "", together: str = "") -> str:
    """Explain that such layers make a split inexact, with sizes if they are known, and what would be exact."""
    return (
        f"BatchNorm in train mode ({show_names(names)}) normalises each micro-batch{size} by itself{together}; "
        f"GroupNorm, or BatchNorm in eval mode, is exact"
    )


def warn_of_batch_norms(names: Sequence[str], micro_batch_size: int, total: int) -> str:
    """Return the warning for a plan that splits a model with such layers."""
    blame = blame_batch_norms(names, f" of {micro_batch_size}", f", not the {total} together")
    return f"splitting is not exact here: {blame}"


def may_refuse_one_sample(model: nn.Module) -> bool:
    """Return whether a layer raises an error for one sample, if the sample has one value per channel there.

    BatchNorm in train mode does, and GroupNorm with one channel a group in either mode. Both run one sample with a
    spatial extent, so only running it can decide. InstanceNorm raises for any number of samples.
    """
    return bool(batch_norms_in_train_mode(model)) or any(
        isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels for module in model.modules()
    )


def refuses_one_sample(error: BaseException) -> bool:
    """Return whether a normalising layer raised this for a single value per channel."""
    return isinstance(error, ValueError) and _ONE_VALUE in str(error)


def explain_smallest(model: nn.Module) -> str:
    """Explain why no micro-batch has one sample, with the layers that are the likely cause."""
    names = batch_norms_in_train_mode(model)
    who = f"BatchNorm in train mode ({show_names(names)})" if names else "the model"
    return f"{who} cannot run one sample"
