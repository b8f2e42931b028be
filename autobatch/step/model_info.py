"""Inspects a model without running it: is it compiled, by what does a plan recognise it, and what differs.

Covers compiled modules, modules compiled in place, and compiled functions that are the step or a module's ``forward``.
Does not cover a compiled function that a plain step calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from autobatch._wrappers import members_of, own_table, unwrap_model, unwrap_optimizer
from autobatch.records import ModelIdentity
from autobatch.undo.tensor_header import is_uninitialized

__all__ = ["identify_model", "is_compiled", "model_differences", "name_optimizer"]

_MARK = "get_compiler_config"


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
    function = compiled.__func__ if isinstance(compiled, MethodType) else compiled
    return _MARK in own_table(function) or hasattr(type(compiled).__call__, _MARK)


def name_optimizer(optimizer: Any | None) -> str:
    """Its class, or those of several: ``"AdamW + SGD"``."""
    return " + ".join(type(unwrap_optimizer(member)).__name__ for member in members_of(optimizer))


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
        optimizer=name_optimizer(optimizer),
    )


def model_differences(
    planned_name: str, planned: ModelIdentity | None, name: str, identity: ModelIdentity
) -> Iterator[str]:
    """What differs from the model and optimizer that a plan was made for; nothing where the plan has no identity."""
    if planned is None:
        return
    if not (planned.shapes and identity.shapes):
        pass  # a lazy module has no shapes yet
    elif planned.shapes != identity.shapes:
        yield f"it was made for {_describe(planned_name, planned)}, and this is {_describe(name, identity)}"
    elif planned.trained != identity.trained:
        yield f"{planned.trained} of {planned.parameters} parameters were trained, and now {identity.trained} are"
    # Without one its memory was not counted, which the plan says itself; a runner without one only accumulates.
    if planned.optimizer and identity.optimizer and planned.optimizer != identity.optimizer:
        yield f"the optimizer was {planned.optimizer}, and now is {identity.optimizer}"


def _describe(name: str, identity: ModelIdentity) -> str:
    return f"{name or 'a model'} with {identity.parameters} parameters in {identity.tensors} tensors"
