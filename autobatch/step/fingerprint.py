"""Identifies the conditions of a measurement by a short text that changes when any of them changes.

Values of parameters and data are left out, as are numbers that move during training and code that the step calls. A
plan that no longer fits fails the trial that confirms it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from autobatch._wrappers import members_of
from autobatch.batch.samples import Layout
from autobatch.batch.tree import tensors_of
from autobatch.records import DeviceInfo, Padding
from autobatch.step.whole_batch import WholeBatch
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import is_uninitialized


def fingerprint(
    workload: Workload,
    example: Layout,
    device: DeviceInfo,
    world_size: int,
    *,
    lengths: tuple[Callable[..., Any], Padding] | None = None,
    strategies: Sequence[str] = (),
) -> str:
    """Return a hexadecimal digest of 32 characters: if it is equal, one trial may confirm an earlier plan.

    The first half is that of ``identify_step``, the same on every card. The shapes of one sample of ``example`` count,
    but not their number or other processes on the device.
    """
    parts = {
        "software": [torch.__version__, str(torch.version.cuda)],
        "device": [device.kind, device.name, device.total_bytes, device.driver],
        "world_size": world_size,
        **({"strategies": [*strategies]} if strategies else {}),
    }
    step = identify_step(workload, example, lengths)
    return step + _digest({"step": step, **parts})


def identify_step(
    workload: Workload, example: Layout, lengths: tuple[Callable[..., Any], Padding] | None = None
) -> str:
    """Return a hexadecimal digest of 16 characters of model, step, batch, optimizer and precision."""
    model = workload.model
    autocasts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    parts = {
        "modules": [_spell_module(name, module) for name, module in model.named_modules()],
        "parameters": [_spell(name, p) for name, p in model.named_parameters()],
        "buffers": [_spell(name, buffer) for name, buffer in model.named_buffers()],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "step": _spell_code(workload.step),
        "weigh": _spell_code(workload.weigh),
        "batch": [_spell("", tensor) for tensor in tensors_of(example.take(range(1)))],
        "optimizer": list(_spell_optimizer(workload.optimizer)),
        "precision": [
            torch.get_float32_matmul_precision(),
            str(torch.get_default_dtype()),
            *(f"{kind} {torch.get_autocast_dtype(kind)}" for kind in autocasts),
        ],
        **({} if lengths is None else {"lengths": [_spell_code(lengths[0]), lengths[1].model_dump_json()]}),
    }
    return _digest(parts)


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _spell(name: str, tensor: torch.Tensor) -> str:
    if is_uninitialized(tensor):
        return f"{name} {tensor.dtype} no shape yet"
    # A nested tensor's ragged dimension is a symbol that differs between processes.
    sizes = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return f"{name} {tensor.dtype} {sizes}"


def _spell_module(name: str, module: nn.Module) -> str:
    # Bools are switches (training, gradient_checkpointing, batch_first). Floats may be switches too: a dropout of 0
    # keeps no mask. An int may be a counter.
    switches = sorted(key for key, value in vars(module).items() if isinstance(value, (bool, float)) and value)
    return f"{name} {type(module).__qualname__} {switches}"


def _spell_code(function: Callable[..., Any] | None) -> str:
    """Return a Python function's code and constants, or the type of another object; line numbers do not count."""
    if function is None:
        return ""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        given = [*function.args, *(value for _, value in sorted(function.keywords.items()))]
        return f"partial {_spell_code(function.func)} {[*function.keywords]} {list(map(_spell_option, given))}"
    if isinstance(function, WholeBatch):
        return f"whole batch {_spell_code(function.represent)} {_spell_code(function.loss)}"
    called = function if hasattr(function, "__code__") or hasattr(function, "__func__") else type(function).__call__
    called = getattr(called, "__func__", called)
    code = getattr(called, "__code__", None)
    if not isinstance(code, CodeType):
        return type(function).__qualname__
    return f"{_spell_constant(code)} {[_spell_option(value) for value in getattr(called, '__defaults__', None) or ()]}"


def _spell_constant(value: Any) -> str:
    if isinstance(value, CodeType):
        constants = [_spell_constant(constant) for constant in value.co_consts]
        return f"{value.co_name} {hashlib.sha256(value.co_code).hexdigest()} {value.co_names} {constants}"
    if isinstance(value, frozenset):  # its order changes from process to process
        return str(sorted(map(_spell_constant, value)))
    return repr(value)


def _spell_optimizer(optimizer: Any | None) -> Iterator[str]:
    for member in members_of(optimizer):
        yield type(member).__qualname__
        for group in member.param_groups:
            options = {name: value for name, value in group.items() if name != "params" and not name.endswith("lr")}
            yield str(sorted((name, _spell_option(value)) for name, value in options.items()))
            yield str(len(group["params"]))


_MOST_PARTS = 100  # of a list, which may be a whole dataset
_DEEPEST = 10  # of lists in lists, of which one may hold itself


def _spell_option(value: Any, depth: int = _DEEPEST) -> str:
    """Return switches and sizes, but only "is it 0" for floats: schedules move them, and memory does not follow."""
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (list, tuple)) and depth:
        return str([_spell_option(part, depth - 1) for part in value[:_MOST_PARTS]])
    return str(bool(value)) if isinstance(value, float) else type(value).__qualname__
