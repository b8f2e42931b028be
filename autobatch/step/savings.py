"""Finds the ways in which a step already saves memory, so that no advice repeats them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from autobatch.records import Saving
from autobatch.undo.tensor_header import is_uninitialized

_CHECKPOINTS = "torch.utils.checkpoint"
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def find_savings(model: nn.Module) -> set[Saving]:
    """Return what shows without a step: the dtype of parameters, and the flags of Transformers models."""
    found: set[Saving] = set()
    made = [parameter for parameter in model.parameters() if not is_uninitialized(parameter)]
    bits = [(parameter.numel(), parameter.dtype in _SIXTEEN_BITS) for parameter in made]
    if 2 * sum(count for count, is_short in bits if is_short) > sum(count for count, _ in bits):
        found.add("16-bit parameters")
    if any(vars(module).get("gradient_checkpointing") is True for module in model.modules()):
        found.add("activation checkpointing")
    return found


@contextmanager
def watch_savings(found: set[Saving], *device_types: str) -> Iterator[None]:
    """Add to ``found`` what the forward passes in this block do, by a hook on every module.

    The hook takes time, and a compiled step would be compiled again because of it.
    """

    def look(*_: Any) -> None:
        if "autocast" not in found and any(map(torch.is_autocast_enabled, device_types)):
            found.add("autocast")
        if "activation checkpointing" not in found and _is_checkpointed():
            found.add("activation checkpointing")

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _is_checkpointed() -> bool:
    """Return whether this runs inside a checkpoint of torch, or in a backward pass that recomputes."""
    if torch._C._current_graph_task_id() != -1:  # as torch's own checkpoint asks it  # noqa: SLF001
        return True
    frame = sys._getframe()  # noqa: SLF001
    while (caller := frame.f_back) is not None:
        if caller.f_globals.get("__name__") == _CHECKPOINTS:
            return True
        frame = caller
    return False
