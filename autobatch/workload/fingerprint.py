"""What a measurement depends on, as one short text that changes when any of it changes.

Covers parameters and buffers, the step's code, the batch's shapes, the optimizer and its options, precision settings,
software and device. Does not cover values of parameters or data: no user data goes in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autobatch.records import DeviceInfo
from autobatch.workload.batches import Layout, tensors_of
from autobatch.workload.step import Workload

__all__ = ["fingerprint"]


def fingerprint(workload: Workload, example: Layout, device: DeviceInfo, world_size: int) -> str:
    """A hexadecimal digest of 32 characters: equal where a remembered plan may be tried again.

    Args:
        workload: Model, step, weights and optimizer.
        example: The batch that sizes were made from; one sample's shapes count, not how many there are.
        device: Name and total bytes count; who else is on it does not.
        world_size: Ranks that share the target.
    """
    model = workload.model
    parts = {
        "model": [type(model).__qualname__, *(_spell(name, p) for name, p in model.named_parameters())],
        "buffers": [_spell(name, buffer) for name, buffer in model.named_buffers()],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "training": [name for name, module in model.named_modules() if module.training],
        "step": _spell_code(workload.step),
        "weigh": _spell_code(workload.weigh),
        "batch": [_spell("", tensor) for tensor in tensors_of(example.take(0, 1))],
        "optimizer": list(_spell_optimizer(workload.optimizer)),
        "precision": [torch.get_float32_matmul_precision(), str(torch.get_default_dtype())],
        "software": [torch.__version__, str(torch.version.cuda)],
        "device": [device.kind, device.name, device.total_bytes],
        "world_size": world_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _spell(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}"


def _spell_code(function: Callable[..., Any] | None) -> str:
    """A Python function's code and constants, of anything else its type: lines may move, the code may not change."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return "" if function is None else type(function).__qualname__
    constants = [value for value in code.co_consts if isinstance(value, (int, float, str, bool))]
    return f"{code.co_name} {hashlib.sha256(code.co_code).hexdigest()} {code.co_names} {constants}"


def _spell_optimizer(optimizer: Any | None) -> Iterator[str]:
    if optimizer is None:
        return
    yield type(optimizer).__qualname__
    for group in optimizer.param_groups:
        yield str(
            sorted((name, str(value)) for name, value in group.items() if name not in ("params", "lr", "initial_lr"))
        )
        yield str(len(group["params"]))
