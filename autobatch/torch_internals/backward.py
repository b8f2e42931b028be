"""Begins a backward pass in torch's engine, without the checks that a loss of one number cannot fail.

``loss.backward()`` looks for several losses, nested tensors, subclasses and shapes (``torch/autograd/__init__.py``).
This takes 34 us a micro-batch, a third of all that a Runner added to a step (torch 2.13, 2 CPU cores).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

from autobatch._torch_versions import LATEST_TRIED, OLDEST, read_release

TENSOR_BACKWARD: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.backward
"""The method at the time of this import."""

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
    """Return whether the engine can be called in place of ``loss.backward()`` with no visible difference.

    A tool may have patched a function in between. A ``TorchFunctionMode`` (such as ``set_default_device``) would
    intercept ``backward``, and a functorch transform would make it raise.
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
    """Run ``loss.backward(gradient)``.

    Args:
        loss: A plain 0-dim tensor with a graph; a subclass may define another ``backward``.
        gradient: A tensor of the same shape, dtype and device.
    """
    _ENGINE((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
