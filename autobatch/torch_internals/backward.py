"""Begins a backward pass in torch's engine, without the checks that a loss of one number cannot fail.

``loss.backward()`` runs 300 operations of Python before torch's engine begins: it looks for several losses, nested
tensors, subclasses and shapes (``torch/autograd/__init__.py``). That takes 34 us a micro-batch, a third of all that a
Runner added to a step (torch 2.13, 2 CPU cores). So the engine is called as that function calls it, if
``can_begin_in_engine`` allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

from autobatch._torch_versions import LATEST_TRIED, OLDEST, read_release

__all__ = ["IS_TRIED", "TENSOR_BACKWARD", "begin_in_engine", "can_begin_in_engine"]

TENSOR_BACKWARD: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.backward
"""As it was when this was imported."""

_BACKWARD = torch.autograd.backward
_ENGINE: Any = getattr(graph, "_engine_run_backward", None)


def _is_written_in(function: Any, file: str) -> bool:
    return getattr(getattr(function, "__code__", None), "co_filename", None) == file


IS_TRIED = (
    OLDEST <= read_release(torch.__version__) <= LATEST_TRIED
    # A tool may have patched them before this was imported.
    and _is_written_in(TENSOR_BACKWARD, torch._tensor.__file__)  # noqa: SLF001 - no public name for its module
    and _is_written_in(_BACKWARD, torch.autograd.__file__)
    and _is_written_in(_ENGINE, graph.__file__)
)
"""Whether this release of torch is tested, and its functions were not patched when this was imported."""


def can_begin_in_engine() -> bool:
    """Whether the engine can be called in place of ``loss.backward()`` with no visible difference.

    Not where a tool has patched one of the functions in between, nor under a ``TorchFunctionMode``, which would
    intercept ``backward`` (``set_default_device`` is one), nor inside a functorch transform, where ``backward`` raises.
    """
    return (
        IS_TRIED
        and torch.Tensor.backward is TENSOR_BACKWARD
        and torch.autograd.backward is _BACKWARD
        and torch.autograd._engine_run_backward is graph._engine_run_backward is _ENGINE  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
        and not torch._C._is_torch_function_mode_enabled()  # noqa: SLF001 - no public way
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public way
    )


def begin_in_engine(loss: torch.Tensor, gradient: torch.Tensor) -> None:
    """``loss.backward(gradient)``.

    Args:
        loss: 0-dim, with a graph; a plain tensor, as a subclass may have a ``backward`` of its own.
        gradient: Of its shape and dtype, on its device.
    """
    _ENGINE((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
