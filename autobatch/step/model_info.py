"""Inspects a model: is it compiled, how does it save memory, was a plan made for it, what does its BatchNorm refuse?"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from autobatch._user_errors import contextmanager
from autobatch._wrappers import members_of, own_table, unwrap_model, unwrap_optimizer
from autobatch.records import ModelIdentity, Saving
from autobatch.step.whole_batch import WholeBatch
from autobatch.torch_internals.storages import is_uninitialized
from autobatch.undo.gradients import NARROW

_MARK = "get_compiler_config"


def is_compiled(model: nn.Module, step: Any = None) -> bool:
    """Return whether the model, any module in it, or the step function was compiled; do not import ``torch._dynamo``.

    ``torch.compile`` returns a module or function with ``get_compiler_config``, and ``nn.Module.compile`` puts one in
    ``_compiled_call_impl`` (``torch/_dynamo/eval_frame.py``).
    """
    while isinstance(step, partial | WholeBatch):
        step = step.func if isinstance(step, partial) else step.represent
    parts = [(one, getattr(one, "forward", None), getattr(one, "_compiled_call_impl", None)) for one in model.modules()]
    return any(_is_marked(part) for part in (step, *(part for three in parts for part in three)))


def _is_marked(compiled: Any) -> bool:
    function = compiled.__func__ if isinstance(compiled, MethodType) else compiled
    return _MARK in own_table(function) or hasattr(type(compiled).__call__, _MARK)


def name_optimizer(optimizer: Any | None) -> str:
    """Return the class of an optimizer, or of several: ``"AdamW + SGD"``."""
    return " + ".join(type(unwrap_optimizer(member)).__name__ for member in members_of(optimizer))


def identify_model(model: nn.Module, optimizer: Any | None) -> ModelIdentity:
    """Return what identifies both; 1000 parameters took 2 ms."""
    parameters = list(unwrap_model(model).parameters())
    lazy = any(is_uninitialized(parameter) for parameter in parameters)  # of a lazy module: it gets its shape later
    sizes = [0 if is_uninitialized(parameter) else parameter.numel() for parameter in parameters]
    shapes = [] if lazy else sorted(tuple(parameter.shape) for parameter in parameters)
    return ModelIdentity(
        tensors=len(parameters),
        parameters=sum(sizes),
        trained=sum(size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad),
        shapes="" if lazy else hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        optimizer=name_optimizer(optimizer),
    )


def model_differences(
    planned_name: str, planned: ModelIdentity | None, name: str, identity: ModelIdentity
) -> Iterator[str]:
    """Yield the differences from the model and optimizer of a plan; none if the plan has no identity."""
    if planned is None:
        return
    has_shapes = planned.shapes and identity.shapes  # a lazy module has none yet
    if has_shapes and planned.shapes != identity.shapes:
        was, now = (
            f"{name or 'a model'} with {one.parameters} parameters in {one.tensors} tensors"
            for name, one in ((planned_name, planned), (name, identity))
        )
        yield f"it was made for {was}, and this is {now}"
    elif has_shapes and planned.trained != identity.trained:
        yield f"{planned.trained} of {planned.parameters} parameters were trained, and now {identity.trained} are"
    # Without one its memory was not counted, which the plan says itself; a runner without one only accumulates.
    if planned.optimizer and identity.optimizer and planned.optimizer != identity.optimizer:
        yield f"the optimizer was {planned.optimizer}, and now is {identity.optimizer}"


def find_savings(model: nn.Module) -> set[Saving]:
    """Return what shows without a step: the dtype of parameters, and the flags of Transformers models."""
    found: set[Saving] = set()
    made = [parameter for parameter in model.parameters() if not is_uninitialized(parameter)]
    bits = [(parameter.numel(), parameter.dtype in NARROW) for parameter in made]
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
        if caller.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = caller
    return False


# -------------------------------------------------------------------------------------------- BatchNorm

# How ``torch.nn.functional.batch_norm`` and ``group_norm`` refuse one value to normalise (``_verify_batch_size``).
_ONE_VALUE = "Expected more than 1 value per channel when training"


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
    return bool(batch_norms_in_train_mode(model)) or any(
        isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels for module in model.modules()
    )


def refuses_one_sample(error: BaseException) -> bool:
    """Return whether a normalising layer raised this for a single value per channel."""
    return isinstance(error, ValueError) and _ONE_VALUE in str(error)


def explain_smallest(model: nn.Module) -> str:
    names = batch_norms_in_train_mode(model)
    who = f"BatchNorm in train mode ({show_names(names)})" if names else "the model"
    return f"{who} cannot run one sample"
