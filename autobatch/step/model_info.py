"""Inspects a model without running it: is it compiled, by what does a plan recognise it, which BatchNorm layers it has.

Covers compiled modules, modules compiled in place, and compiled functions that are the step or a module's ``forward``;
torch's BatchNorm family in train mode, the one common layer for which no weighing makes a split exact; and layers that
cannot run one sample alone. Does not cover a compiled function that a plain step calls, nor losses that compare samples
with each other, which a check of gradients finds (``exactness``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch._wrappers import unwrap_model, unwrap_optimizer
from autobatch.records import ModelIdentity
from autobatch.state.tensor_header import is_uninitialized

__all__ = [
    "batch_norms_in_train_mode",
    "blame_batch_norms",
    "explain_smallest",
    "identify_model",
    "is_compiled",
    "may_refuse_one_sample",
    "refuses_one_sample",
    "show_names",
    "warn_of_batch_norms",
]

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""How ``torch.nn.functional.batch_norm`` and ``group_norm`` refuse one value to normalise (``_verify_batch_size``)."""


def is_compiled(model: nn.Module, step: Any = None) -> bool:
    """Whether the model, any module in it, or the step function (also in a ``functools.partial``) was compiled.

    What ``torch.compile`` returns, module or function, has ``get_compiler_config``, which ``torch.compiler.disable``
    does not give (``torch/_dynamo/eval_frame.py``); ``nn.Module.compile`` puts it in ``_compiled_call_impl``. So
    ``torch._dynamo``, which a program that compiles nothing has not loaded, need not be imported.
    """
    while isinstance(step, partial):
        step = step.func
    return _is_marked(step) or any(
        _is_marked(module)
        or _is_marked(getattr(module, "forward", None))
        or _is_marked(getattr(module, "_compiled_call_impl", None))
        for module in model.modules()
    )


def _is_marked(compiled: Any) -> bool:
    return hasattr(compiled, "get_compiler_config") or hasattr(type(compiled).__call__, "get_compiler_config")


def identify_model(model: nn.Module, optimizer: Any | None) -> ModelIdentity:
    """What both are recognised by; 1000 parameters took 2 ms."""
    parameters = list(unwrap_model(model).parameters())
    lazy = any(is_uninitialized(parameter) for parameter in parameters)  # of a lazy module: it gets its shape later
    sizes = [0 if is_uninitialized(parameter) else parameter.numel() for parameter in parameters]
    shapes = [] if lazy else sorted(tuple(parameter.shape) for parameter in parameters)
    return ModelIdentity(
        tensors=len(parameters),
        parameters=sum(sizes),
        trained=sum(size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad),
        shapes="" if lazy else hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        optimizer="" if optimizer is None else type(unwrap_optimizer(optimizer)).__name__,
    )


def batch_norms_in_train_mode(model: nn.Module) -> list[str]:
    """Names of the layers that normalise by their micro-batch's own statistics."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ]


def show_names(names: Sequence[str]) -> str:
    """Names of modules in a sentence: the first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def blame_batch_norms(names: Sequence[str], size: str = "", together: str = "") -> str:
    """Why such layers make a split inexact, with sizes where they are known, and what would be exact."""
    return (
        f"BatchNorm in train mode ({show_names(names)}) normalises each micro-batch{size} by itself{together}; "
        f"GroupNorm, or BatchNorm in eval mode, is exact"
    )


def warn_of_batch_norms(names: Sequence[str], micro_batch_size: int, total: int) -> str:
    """The warning for a plan that splits a model with such layers."""
    blame = blame_batch_norms(names, f" of {micro_batch_size}", f", not the {total} together")
    return f"splitting is not exact here: {blame}"


def may_refuse_one_sample(model: nn.Module) -> bool:
    """Whether a layer raises for one sample, if that has one value per channel at that layer.

    BatchNorm by its own statistics, and GroupNorm with one channel a group in either mode. Both run one sample that has
    a spatial extent, so only running it can decide. What InstanceNorm raises does not depend on the number of samples.
    """
    return bool(batch_norms_in_train_mode(model)) or any(
        isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels for module in model.modules()
    )


def refuses_one_sample(error: BaseException) -> bool:
    """Whether a normalising layer raised this for a single value per channel: with more samples it would run."""
    return isinstance(error, ValueError) and _ONE_VALUE in str(error)


def explain_smallest(model: nn.Module) -> str:
    """Why no micro-batch has one sample, with the layers that are the likely cause."""
    names = batch_norms_in_train_mode(model)
    who = f"BatchNorm in train mode ({show_names(names)})" if names else "the model"
    return f"{who} cannot run one sample"
