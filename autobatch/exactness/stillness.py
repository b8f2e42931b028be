"""A step held still: deterministic, each sample by itself, in float32 or wider.

Covers dropout, random numbers, autocast, TF32, parameters and casts in half precision, and compiled code: whatever
makes the same samples give another gradient only because they were divided otherwise. Does not cover state that
moves with each forward pass (``measurement`` puts it back) nor kernels of other packages that draw or round.

It takes memory: a model in half precision stands there in float32 as well, as do its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autobatch.exactness.draws import ConstantDraws
from autobatch.memory.cpu import run_eagerly

__all__ = ["still", "widen"]

_NARROW = (torch.float16, torch.bfloat16)
# These hand their rate to a fused kernel (cuDNN's recurrent layers) or past the function mode below.
_LAYERS_WITH_RATES = (nn.RNNBase, nn.MultiheadAttention)
_DROPOUTS: dict[Callable[..., Any], tuple[str, int]] = {
    F.dropout: ("p", 1),
    F.dropout1d: ("p", 1),
    F.dropout2d: ("p", 1),
    F.dropout3d: ("p", 1),
    F.alpha_dropout: ("p", 1),
    F.feature_alpha_dropout: ("p", 1),
    torch.dropout: ("p", 1),
    torch.feature_dropout: ("p", 1),
    torch.alpha_dropout: ("p", 1),
    torch.feature_alpha_dropout: ("p", 1),
    F.scaled_dot_product_attention: ("dropout_p", 4),
}
"""Where each function takes its rate: the name, and the position in a call without names."""
_CASTS = (torch.Tensor.half, torch.Tensor.bfloat16)


@contextmanager
def still(model: nn.Module, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hold every forward and backward pass inside the block still; afterwards all is as it was.

    No ``.grad`` may stand on a parameter in half precision: it would have another dtype than its parameter then.

    Args:
        model: Its layers' rates, and its buffers.
        parameters: The parameters that take part.
    """
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        stack.enter_context(_no_autocast())
        for owner, name, value in _settings():
            stack.enter_context(_hold(owner, name, value))
        for module in model.modules():
            if isinstance(module, _LAYERS_WITH_RATES):
                stack.enter_context(_hold(module, "dropout", 0.0))
        for tensor in (*parameters, *model.buffers()):
            if tensor.dtype in _NARROW:
                stack.enter_context(_hold(tensor, "data", tensor.data.float()))
        stack.enter_context(ConstantDraws())  # type: ignore[no-untyped-call]
        stack.enter_context(_NoDropoutNorCasts())
        yield


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in float32 where it is in half precision; a leaf that requires a gradient where the original does."""
    wide = tensor.detach().to(torch.float32 if tensor.dtype in _NARROW else tensor.dtype, copy=True)
    return wide.requires_grad_(tensor.requires_grad)


class _NoDropoutNorCasts(TorchFunctionMode):
    """Calls dropout with a rate of 0, and takes every request for half precision as one for float32."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function with the changed arguments."""
        if func is torch.Tensor.view:  # reads the same bytes as another dtype, it does not cast
            return func(*args, **(kwargs or {}))
        if func in _CASTS:
            func = torch.Tensor.float
        given = [_widen_dtype(value) for value in args]
        named = {name: _widen_dtype(value) for name, value in (kwargs or {}).items()}
        if func in _DROPOUTS:
            name, position = _DROPOUTS[func]
            if len(given) > position:
                given[position] = 0.0
            else:
                named[name] = 0.0
        return func(*given, **named)


def _widen_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value


@contextmanager
def _hold(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Autocast that is on, and any that the step switches on itself, as an object, a decorator, or when recomputing."""
    enter: Callable[[Any], Any] = torch.autocast.__enter__

    def enter_disabled(autocast: Any) -> Any:
        # Only while it enters: the object may be the user's, to be used again.
        with _hold(autocast, "_enabled", False):
            return enter(autocast)

    with ExitStack() as stack:
        accelerator = torch.accelerator.current_accelerator()
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_hold(torch.autocast, "__enter__", enter_disabled))
        yield


def _settings() -> Iterator[tuple[Any, str, Any]]:
    """Where torch keeps what precision a float32 operation may have: an attribute each, and its value for full."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        yield backends.cuda.matmul, "allow_tf32", False
        yield backends.cudnn, "allow_tf32", False
        return
    for operation in (backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
        yield operation, "fp32_precision", "ieee"
    try:
        # Where it can be read the older switch is turned: after the newer one `torch.backends.cudnn.flags`, which CTC
        # losses use, would raise in the step.
        _ = backends.cudnn.allow_tf32
    except RuntimeError:
        yield backends.cudnn.conv, "fp32_precision", "ieee"
        yield backends.cudnn.rnn, "fp32_precision", "ieee"
    else:
        yield backends.cudnn, "allow_tf32", False
