"""Whether a training step goes through ``torch.compile``, so that each new size may cost a compilation.

Covers compiled modules, modules compiled in place, and compiled functions that are the step or a module's ``forward``.
Does not cover a compiled function that a plain step calls: that cannot be told without running it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

__all__ = ["is_compiled"]


def is_compiled(model: nn.Module, step: Any = None) -> bool:
    """Whether the model, any module in it, or the step function was compiled.

    What ``torch.compile`` returns, module or function, has ``get_compiler_config``, and ``torch.compiler.disable``
    gives no such thing (``torch/_dynamo/eval_frame.py``); ``nn.Module.compile`` puts it in ``_compiled_call_impl``. So
    ``torch._dynamo``, which a program that compiles nothing has not loaded, need not be imported.

    Args:
        model: The model to train, as given.
        step: ``step(model, micro_batch)``, as given; a ``functools.partial`` of it counts as it does.
    """
    while isinstance(step, partial):
        step = step.func
    return _is_marked(step) or any(_is_compiled_module(module) for module in model.modules())


def _is_compiled_module(module: nn.Module) -> bool:
    entrances = (module, getattr(module, "forward", None), getattr(module, "_compiled_call_impl", None))
    return any(_is_marked(entrance) for entrance in entrances)


def _is_marked(compiled: Any) -> bool:
    return hasattr(compiled, "get_compiler_config") or hasattr(type(compiled).__call__, "get_compiler_config")
