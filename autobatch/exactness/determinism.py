"""Makes a step repeatable: the same random numbers for each sample, no dropout, float32 or wider throughout.

However the samples are divided, their gradients then differ only by rounding. One dispatch mode sees every operator of
torch, also those of a backward pass; kernels of other packages are not seen.
"""

from __future__ import annotations

import random as python_random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from autobatch._user_errors import contextmanager
from autobatch.batch.samples import Layout
from autobatch.batch.tree import map_tensors
from autobatch.exactness.sample_numbers import SampleNumbers, running_frames
from autobatch.torch_internals.dispatch_mode import DispatchMode, call_operator
from autobatch.undo.gradients import NARROW

_LOCK = threading.RLock()  # precision is a setting of the whole process
_WIDER = {
    torch.float32: dict.fromkeys(NARROW, torch.float32),
    torch.float64: {**dict.fromkeys((*NARROW, torch.float32), torch.float64), torch.complex64: torch.complex128},
}
_DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_STATEFUL = ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator")
_ATEN: Any = torch.ops.aten


@contextmanager
def deterministic(
    model: nn.Module,
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    random: SampleNumbers | None = None,
) -> Iterator[SampleNumbers]:
    """Make every forward and backward pass inside the block repeatable, one thread at a time.

    A model in half precision takes more memory, since it is widened to ``dtype`` (float32 or float64), as are its
    activations. Parameters in half precision may have no ``.grad``, whose dtype would differ from theirs.

    Yields:
        The random numbers (``random``, or new ones). They have to know the samples of each forward pass.
    """
    wider, random = _WIDER[dtype], random or SampleNumbers()
    with ExitStack() as stack:
        stack.enter_context(full_precision())
        for module in model.modules():
            if isinstance(module, nn.RNNBase):  # its fused kernels draw where no mode sees it
                _set(stack, module, "dropout", 0.0)
            elif isinstance(module, _DROPS):  # attention passes its rate to a kernel
                _set(stack, module, "p", 0.0)
        for tensor in (*parameters, *model.buffers()):
            if tensor.dtype in wider:
                _set(stack, tensor, "data", tensor.data.to(wider[tensor.dtype]))
        stack.callback(torch.clear_autocast_cache)  # autocast has kept casts that were widened
        stack.enter_context(_Repeatable(wider, random))
        _hold_host_draws(stack, random)
        yield random


def widen(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Copy a tensor, to ``dtype`` if it is narrower; a leaf that requires a gradient if the original does."""
    wide = tensor.detach().to(_WIDER[dtype].get(tensor.dtype, tensor.dtype), copy=True)
    return wide.requires_grad_(tensor.requires_grad)


def widened(layout: Layout, dtype: torch.dtype = torch.float32) -> Layout:
    """Return a copy of a batch, in ``dtype`` where it is narrower."""
    return Layout(map_tensors(layout.batch, lambda tensor: widen(tensor, dtype)), layout.count, layout.lists)


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 operations in full precision, without TF32, one thread at a time."""
    backends: Any = torch.backends
    with ExitStack() as stack:
        stack.enter_context(_LOCK)
        if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
            _set(stack, backends.cuda.matmul, "allow_tf32", False)
            _set(stack, backends.cudnn, "allow_tf32", False)
        else:
            for operation in (backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
                _set(stack, operation, "fp32_precision", "ieee")
            try:
                # The older switch where it can be read: after the newer one, `torch.backends.cudnn.flags`, which CTC
                # losses use, would raise in the step.
                _set(stack, backends.cudnn, "allow_tf32", False)
            except RuntimeError:
                _set(stack, backends.cudnn.conv, "fp32_precision", "ieee")
                _set(stack, backends.cudnn.rnn, "fp32_precision", "ieee")
        try:
            # Both switches: torch raises in a step that reads the older one if the two disagree.
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:  # they disagreed before
            pass
        yield


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class _Repeatable(DispatchMode):
    """Widens every request for a narrower dtype, draws for samples, and drops nothing."""

    supports_higher_order_operators = True

    def __init__(self, wider: Mapping[torch.dtype, torch.dtype], random: SampleNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wider, self._random = wider, random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operator with the changed arguments, and fill what it has drawn."""
        kwargs, kind = kwargs or {}, _kind_of(func)
        if kind == "view":  # reads the same bytes as another dtype: no cast
            return func(*args, **kwargs)
        args = [self._wider.get(value, value) if isinstance(value, torch.dtype) else value for value in args]
        kwargs = {name: self._wider.get(v, v) if isinstance(v, torch.dtype) else v for name, v in kwargs.items()}
        if kind == "kernel":
            return func(**_without_dropout(_read_arguments(func, args, kwargs)))
        is_made = "out" not in kwargs and not any(isinstance(value, torch.Tensor) for value in args)
        if kind == "draw":
            given = _read_arguments(func, args, kwargs)
            result = func(**_with_heads(func, given))
            result = self._widen_made(result) if is_made else result
            return result.copy_(_bring_into_range(func, given, self._random.draw(result)))
        result = call_operator(func, tuple(args), kwargs)
        return self._widen_made(result) if is_made or func is _ATEN.lift_fresh.default else result

    def _widen_made(self, result: Any) -> Any:
        """Widen a tensor that an operator has made in torch's default dtype, from no other tensor."""
        if torch.float32 not in self._wider or not isinstance(result, torch.Tensor) or result.dtype not in self._wider:
            return result
        return result.detach().to(self._wider[result.dtype]).requires_grad_(result.requires_grad)


_DRAWS = (
    *("rand", "randn", "randint", "randperm", "uniform", "normal", "random", "exponential", "cauchy", "log_normal"),
    *("geometric", "bernoulli", "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)
"""Operators that draw, without ``_`` for a tensor that is given, and ``_like`` for one of its shape."""


@cache
def _kind_of(func: Any) -> Literal["", "view", "draw", "kernel"]:
    """Return how an operator is changed: a draw, or a kernel that drops inside."""
    if not isinstance(func, torch._ops.OpOverload):  # noqa: SLF001 - no public way to see a higher-order operator
        return ""
    name, names = _name_of(func), {argument.name for argument in func._schema.arguments}  # noqa: SLF001 - not public
    if "dropout_p" in names or name in ("native_dropout", "rrelu_with_noise", "rrelu_with_noise_"):
        return "kernel"
    if name.removesuffix("_").removesuffix("_like") in _DRAWS:
        return "draw"
    return "view" if func is _ATEN.view.dtype else ""


def _name_of(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]  # noqa: SLF001 - not public


def _read_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name all arguments. The dispatcher passes none that equals its default: ``bernoulli_(0.5)`` comes without 0.5."""
    schema = func._schema.arguments  # noqa: SLF001 - not public
    options = ("dtype", "layout", "device", "pin_memory", "memory_format")  # a dtype's default is torch's number of it
    given = {a.name: a.default_value for a in schema if a.has_default_value() and a.name not in options}
    return {**given, **{a.name: value for a, value in zip(schema, args, strict=False)}, **kwargs}


def _without_dropout(given: dict[str, Any]) -> dict[str, Any]:
    """Let a kernel drop nothing, and give random slopes their mean."""
    if "lower" in given:
        slope = (given["lower"] + given["upper"]) / 2
        return {**given, "lower": slope, "upper": slope}
    return {**given, "dropout_p" if "dropout_p" in given else "p": 0.0}


def _with_heads(func: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Let at least half of all coins show heads, and all of dropout: zeros would hide what is behind them."""
    if not _name_of(func).startswith("bernoulli"):
        return given
    key = "p" if given.get("p") is not None else "self"
    least, chance = 1.0 if running_frames()[0].f_code.co_filename == F.__file__ else 0.5, given[key]
    if isinstance(chance, torch.Tensor):
        return {**given, key: torch.where(chance > 0, chance.clamp_min(least), chance)}
    return {**given, key: max(chance, least) if chance else chance}


def _bring_into_range(func: Any, given: Mapping[str, Any], numbers: torch.Tensor) -> torch.Tensor:
    """Bring numbers of the whole batch into the range that this call draws from, which may depend on its samples."""
    name = _name_of(func)
    if name == "randperm":
        return numbers.argsort(stable=True).argsort()
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    if name == "multinomial":
        high = given["self"].shape[-1]
    return numbers if high is None else low + (numbers - low) % (high - low)


def _hold_host_draws(stack: ExitStack, numbers: SampleNumbers) -> None:
    """Let the functions of ``random`` and ``numpy.random`` draw for samples, for this thread, until the stack is left.

    Functions that were imported by their own name before still draw as they do, and so do generator objects. So does a
    call whose array has another shape in a part than in the whole batch: its values may depend on the number of
    samples, as those of a permutation.
    """
    modules: list[tuple[Any, Any]] = [(python_random, python_random.Random(0))]
    if sys.modules.get("numpy") is not None:
        numpy = import_module("numpy.random")  # NumPy 2 loads it where a step first names it
        modules.append((numpy, numpy.RandomState(0)))
    for module, own in modules:
        shared = module.random.__self__
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is shared and name not in _STATEFUL:
                _set(stack, module, name, partial(_draw_on_host, function, getattr(own, name), own.seed, numbers))


def _draw_on_host(shared: Any, own: Any, reseed: Any, numbers: SampleNumbers, *args: Any, **kwargs: Any) -> Any:
    # In another thread; backward passes in torch's threads take the mode over.
    if not any(isinstance(mode, _Repeatable) for mode in _get_current_dispatch_mode_stack()):
        return shared(*args, **kwargs)

    def draw(seed: int) -> tuple[Any, tuple[int, ...]]:
        reseed(seed)
        drawn = own(*args, **kwargs)
        return drawn, (len(drawn),) if isinstance(drawn, (list, bytes)) else getattr(drawn, "shape", ())

    with _disable_current_modes():
        return numbers.hold(draw, partial(shared, *args, **kwargs))
