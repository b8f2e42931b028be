"""Makes a step deterministic: no dropout, the same random numbers for each sample, float32 or wider throughout.

Covers dropout, random numbers, autocast, TF32, parameters and casts in half precision, and compiled code: whatever
makes the same samples give another gradient only because they were split otherwise. Does not cover state that changes
with each forward pass (``measurement`` restores it) nor kernels of other packages that draw random numbers or round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autobatch._user_errors import contextmanager
from autobatch.exactness.host_draws import hold_host_draws
from autobatch.exactness.per_sample_random import PerSampleRandom
from autobatch.exactness.sample_numbers import SampleNumbers

__all__ = ["deterministic", "widen"]

_LOCK = threading.RLock()  # ``torch.autocast`` and TF32 are settings of the whole process
_HALF = (torch.float16, torch.bfloat16)
_WIDER = {
    torch.float32: dict.fromkeys(_HALF, torch.float32),
    torch.float64: {**dict.fromkeys((*_HALF, torch.float32), torch.float64), torch.complex64: torch.complex128},
}
# These pass their rate to a fused kernel (cuDNN's recurrent layers) or around the function mode below; and what a
# checkpoint recomputes in the backward pass, it recomputes without that mode.
_LAYERS_WITH_RATES: dict[type[nn.Module], str] = {
    nn.RNNBase: "dropout",
    nn.MultiheadAttention: "dropout",
    nn.modules.dropout._DropoutNd: "p",  # noqa: SLF001 - the base of all dropout layers has no public name
}
_PLAIN_DROPOUTS: tuple[Callable[..., Any], ...] = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
    torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_,
)  # fmt: skip
_DROPOUTS: dict[Callable[..., Any], tuple[str, int]] = {
    **dict.fromkeys(_PLAIN_DROPOUTS, ("p", 1)),
    F.multi_head_attention_forward: ("dropout_p", 10),  # its own calls no longer pass the function mode
    F.scaled_dot_product_attention: ("dropout_p", 4),
}
"""Where each function takes its rate: the name, and the position in a call without names."""
_CASTS = {torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16, torch.Tensor.float: torch.float32}
_FACTORIES = frozenset((
    torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty,
    torch.eye, torch.arange, torch.linspace, torch.rand, torch.randn,
))  # fmt: skip
"""Functions that make tensors of torch's default dtype when no dtype is given."""


@contextmanager
def deterministic(
    model: nn.Module,
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    random: SampleNumbers | None = None,
) -> Iterator[SampleNumbers]:
    """Make every forward and backward pass inside the block deterministic; afterwards all is as it was.

    It takes memory: a model in half precision is there in ``dtype`` (float32 or float64) as well, as are its
    activations; where that does not fit the error comes out. No parameter in half precision may have a ``.grad``: its
    dtype would be another than the parameter's. One thread at a time. Yields the random numbers (``random``, or new
    ones), which need to know the samples of each forward pass.
    """
    wider = _WIDER[dtype]
    with ExitStack() as stack:
        stack.enter_context(_LOCK)
        _disable_autocast(stack)
        _use_full_precision(stack)
        for module in model.modules():
            for layer, rate in _LAYERS_WITH_RATES.items():
                if isinstance(module, layer):
                    _set(stack, module, rate, 0.0)
        for tensor in (*parameters, *model.buffers()):
            if tensor.dtype in wider:
                _set(stack, tensor, "data", tensor.data.to(wider[tensor.dtype]))
        random = random or SampleNumbers()
        stack.enter_context(PerSampleRandom(random))
        stack.enter_context(hold_host_draws(random))
        stack.enter_context(_NoDropoutNorCasts(wider))
        yield random


def widen(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A copy, in ``dtype`` where it is narrower; a leaf that requires a gradient where the original does."""
    wide = tensor.detach().to(_WIDER[dtype].get(tensor.dtype, tensor.dtype), copy=True)
    return wide.requires_grad_(tensor.requires_grad)


class _NoDropoutNorCasts(TorchFunctionMode):
    """Calls dropout with a rate of 0, and widens every request for a narrower dtype."""

    def __init__(self, wider: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._wider = wider

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the function with the changed arguments."""
        if func is torch.Tensor.view:  # reads the same bytes as another dtype, it does not cast
            return func(*args, **(kwargs or {}))
        if _CASTS.get(func) in self._wider:
            func, args = torch.Tensor.to, (*args, _CASTS[func])
        given = [self._widen_dtype(value) for value in args]
        named = {name: self._widen_dtype(value) for name, value in (kwargs or {}).items()}
        if func in _DROPOUTS:
            name, position = _DROPOUTS[func]
            if len(given) > position:
                given[position] = 0.0
            else:
                named[name] = 0.0
        result = func(*given, **named)
        if func in _FACTORIES and result.dtype in self._wider and named.get("out") is None:
            return result.detach().to(self._wider[result.dtype]).requires_grad_(result.requires_grad)
        return result

    def _widen_dtype(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _disable_autocast(stack: ExitStack) -> None:
    """What is on, and what the step enters itself, as an object, a decorator, or recomputing."""
    enter: Callable[[Any], Any] = torch.autocast.__enter__

    def enter_disabled(autocast: Any) -> Any:
        with ExitStack() as entering:
            if PerSampleRandom.is_active():  # not another thread's
                # Only while it enters: the object may be the user's, to be used again.
                _set(entering, autocast, "_enabled", False)
            return enter(autocast)

    accelerator = torch.accelerator.current_accelerator()
    for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    _set(stack, torch.autocast, "__enter__", enter_disabled)


def _use_full_precision(stack: ExitStack) -> None:
    """In float32 operations."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        _set(stack, backends.cuda.matmul, "allow_tf32", False)
        _set(stack, backends.cudnn, "allow_tf32", False)
    else:
        for operation in (backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
            _set(stack, operation, "fp32_precision", "ieee")
        try:
            # Where it can be read the older switch is turned: after the newer one `torch.backends.cudnn.flags`, which
            # CTC losses use, would raise in the step.
            _set(stack, backends.cudnn, "allow_tf32", False)
        except RuntimeError:
            _set(stack, backends.cudnn.conv, "fp32_precision", "ieee")
            _set(stack, backends.cudnn.rnn, "fp32_precision", "ieee")
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the older switch and the newer one disagreed before
        return
    # By the older switch as well: where the two disagree torch raises in a step that reads the older one.
    stack.callback(torch.set_float32_matmul_precision, before)
    torch.set_float32_matmul_precision("highest")
