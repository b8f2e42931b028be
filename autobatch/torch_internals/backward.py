"""Begins a backward pass from one loss without the checks that a single number cannot fail.

``loss.backward()`` runs 300 operations of Python before torch's engine begins: it looks for several losses, nested
tensors, subclasses and shapes (``torch/autograd/__init__.py``). That takes 34 us a micro-batch, a third of all that a
Runner adds to a step (torch 2.13, 2 CPU cores). So the engine is called as that function calls it. Where somebody has
put a function of their own in front of it, or torch is a release in which this was not tried, theirs is called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import graph

from autobatch._torch_versions import LATEST_TRIED, OLDEST, read_release

__all__ = ["choose_backward"]

_TENSOR_BACKWARD, _BACKWARD = torch.Tensor.backward, torch.autograd.backward
_ENGINE = getattr(graph, "_engine_run_backward", None)
_IS_TRIED = _ENGINE is not None and OLDEST <= read_release(torch.__version__) <= LATEST_TRIED


def choose_backward() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``torch.Tensor.backward``, or what does the same in less time where nobody would see the difference.

    Returns:
        A function of a loss, a 0-dim tensor with a graph, and the gradient that begins there, of its shape and dtype.
    """
    is_torchs_own = torch.Tensor.backward is _TENSOR_BACKWARD and torch.autograd.backward is _BACKWARD
    is_seen = not is_torchs_own or torch._C._is_torch_function_mode_enabled()  # noqa: SLF001 - no public way
    return _run_backward if _IS_TRIED and not is_seen else torch.Tensor.backward


def _run_backward(loss: torch.Tensor, gradient: torch.Tensor) -> None:
    if type(loss) is not torch.Tensor:
        loss.backward(gradient)  # a subclass may run its own
        return
    # Read from its module: torch's own debugging tools replace it there.
    graph._engine_run_backward(  # noqa: SLF001 - no public way
        (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
