"""Runs the model if no step is given: calls it on the batch and finds a loss in its output.

A model that computes no loss gives the mean of its output, which uses the memory but trains nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autobatch._wrappers import unwrap_model
from autobatch.batch.tree import map_tensors, tensors_of
from autobatch.errors import InvalidArgument

NO_LOSS = "no step= was given and the output holds no loss: the mean of its floats is taken; pass step= to train"

_OWN = "no step= was given: the loss is the output's own .loss"
_SCALAR = "no step= was given: the model's scalar output is taken as the loss"


def default_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model and find a scalar loss in its output; raise InvalidArgument if the output has no floats."""
    return find_loss(call_model(model, batch))[1]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch of any form.

    A mapping gives keyword arguments. A list or tuple gives positional arguments if ``forward`` takes that many; else
    its first entry is the input and the rest (targets) is left out. Any other object is the one argument.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if not isinstance(batch, list | tuple):
        return model(batch)
    return model(*batch) if _takes(model, batch) else model(batch[0])


def find_loss(output: Any) -> tuple[str, torch.Tensor]:
    """Return a scalar to start the backward pass from, and a sentence about it, or raise InvalidArgument.

    This is the output's ``.loss`` (an attribute or a key) if it is a tensor. Else it is the output itself if that is a
    scalar tensor, or the mean over all elements of its floating-point tensors, accumulated in at least float32.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return _OWN, loss
    if isinstance(output, torch.Tensor) and output.ndim == 0:
        return _SCALAR, output
    floats = [tensor for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.numel() > 0]
    if not floats:
        raise InvalidArgument(
            f"the model returned {type(output).__name__} without a float tensor: pass step= with a loss"
        )
    total = sum(tensor.numel() for tensor in floats)
    means = [tensor.mean(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in floats]
    parts = [mean.to(floats[0].device) * (tensor.numel() / total) for mean, tensor in zip(means, floats, strict=True)]
    return NO_LOSS, sum(parts[1:], start=parts[0])


def explain_default(model: nn.Module, batch: Any) -> str:
    """Return one sentence that names the loss of ``default_step``, for a plan's warnings.

    It calls the model once without gradients, in its present mode, on its device; the caller restores its state. Pass
    two samples, because BatchNorm refuses a single one.
    """
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    with torch.no_grad():
        return find_loss(call_model(model, map_tensors(batch, lambda tensor: tensor.to(device))))[0]


def _takes(model: nn.Module, arguments: list[Any] | tuple[Any, ...]) -> bool:
    try:
        signature = inspect.signature(unwrap_model(model).forward)
    except (TypeError, ValueError):
        return True  # a scripted forward shows no signature; if it takes another number its own error says so
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
