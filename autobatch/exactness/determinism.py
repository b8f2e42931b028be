"""Makes a step repeatable: the same random numbers for each sample, no dropout, float32 or wider throughout.

Two batches of the same samples then differ in their gradients only by rounding, however they are divided. One dispatch
mode sees every operator, also what a checkpoint runs again in a backward pass. Kernels of other packages that draw or
round themselves are not seen.
"""

from __future__ import annotations

import random as python_random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from types import ModuleType
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

_LOCK = threading.RLock()  # precision is a setting of the whole process
_HALF = (torch.float16, torch.bfloat16)
_WIDER = {
    torch.float32: dict.fromkeys(_HALF, torch.float32),
    torch.float64: {**dict.fromkeys((*_HALF, torch.float32), torch.float64), torch.complex64: torch.complex128},
}
_DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_STATEFUL = frozenset(
    ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator")
)
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
        stack.enter_context(_hold_host_draws(random))
        yield random


def widen(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Copy a tensor, to ``dtype`` if it is narrower; a leaf that requires a gradient if the original does."""
    wide = tensor.detach().to(_WIDER[dtype].get(tensor.dtype, tensor.dtype), copy=True)
    return wide.requires_grad_(tensor.requires_grad)


def widened(layout: Layout, dtype: torch.dtype = torch.float32) -> Layout:
    """Return a copy of a batch, in ``dtype`` where it is narrower."""
    return Layout(map_tensors(layout.batch, lambda tensor: widen(tensor, dtype)), layout.count, layout.lists)


def is_narrow(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any of them is in half precision."""
    return any(tensor.dtype in _HALF for tensor in tensors)


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
        """Run the operator with the changed arguments, or what replaces it."""
        kwargs, kind = kwargs or {}, _kind_of(func)
        if kind == "view":  # reads the same bytes as another dtype: no cast
            return func(*args, **kwargs)
        args = [self._widen_dtype(value) for value in args]
        kwargs = {name: self._widen_dtype(value) for name, value in kwargs.items()}
        if kind == "kernel":
            return func(**_without_dropout(_read_arguments(func, args, kwargs)))
        if kind == "draw":
            result = self._widen_new(_draw(func, _read_arguments(func, args, kwargs), self._random), args)
            out = kwargs.get("out")
            return result if out is None else out.resize_(result.shape).copy_(result)
        result = call_operator(func, tuple(args), kwargs)
        return result if "out" in kwargs else self._widen_new(result, () if func is _ATEN.lift_fresh.default else args)

    def _widen_new(self, result: Any, args: Sequence[Any]) -> Any:
        """Widen a tensor that an operator has made in torch's default dtype, from no other tensor."""
        if torch.float32 not in self._wider or not isinstance(result, torch.Tensor) or result.dtype not in self._wider:
            return result
        if any(isinstance(value, torch.Tensor) for value in args):
            return result
        return result.detach().to(self._wider[result.dtype]).requires_grad_(result.requires_grad)

    def _widen_dtype(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value

    @staticmethod
    def is_active() -> bool:
        """Return whether it is active in this thread; backward passes in torch's threads take it over."""
        return any(isinstance(mode, _Repeatable) for mode in _get_current_dispatch_mode_stack())


@cache
def _kind_of(func: Any) -> Literal["", "view", "draw", "kernel"]:
    """Return how an operator is replaced: a draw, or a kernel that drops inside."""
    if not isinstance(func, torch._ops.OpOverload):  # noqa: SLF001 - no public way to see a higher-order operator
        return ""
    name, names = _name_of(func), {argument.name for argument in func._schema.arguments}  # noqa: SLF001 - not public
    if "dropout_p" in names or name in ("native_dropout", "rrelu_with_noise", "rrelu_with_noise_"):
        return "kernel"
    if name in _FILLS or name in _FILLED or name in _BY_NUMBERS:
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


_FILLS = ("uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_")
_FILLED = {
    "rand": "uniform_",
    "rand_like": "uniform_",
    "randn": "normal_",
    "randn_like": "normal_",
    "normal": "normal_",
    "randint": "random_",
    "randint_like": "random_",
}
"""Operators that make a tensor, and those that would fill it with the same numbers."""

_NUMBERS = ("from", "to", "mean", "std", "lambd", "median", "sigma", "p")


def _draw(func: Any, given: dict[str, Any], random: SampleNumbers) -> torch.Tensor:
    """Draw for the samples that run, in the operator's own distribution."""
    name = _name_of(func)
    like: torch.Tensor = given.get("self", torch.empty(0))
    if name in _BY_NUMBERS:
        return _BY_NUMBERS[name](given, random)
    if any(isinstance(given.get(key), torch.Tensor) for key in ("mean", "std", "p")):
        return _near(given, random) if name == "normal" else like.copy_(_flip(given, random))
    if name in _FILLED:
        options = _options_of(given)
        integer = {"dtype": torch.int64} if name == "randint" else {}
        has_size = "size" in given
        like = torch.empty(given["size"], **{**integer, **options}) if has_size else torch.empty_like(like, **options)
        if "high" in given:
            given = {"from": given.get("low", 0), "to": given["high"]}
    elif name == "bernoulli_":
        # All coins of dropout show heads. At least half of the others do: zeros would hide what is behind them.
        is_dropout = running_frames()[0].f_code.co_filename == F.__file__
        given["p"] = 1.0 if is_dropout else max(given["p"], 0.5) if given["p"] else 0.0
    numbers = [given[key] for key in _NUMBERS if given.get(key) is not None]
    drawn = random.draw(like.shape, partial(_fill, like, _FILLED.get(name, name), numbers))
    return drawn if name in _FILLED else like.copy_(drawn)


def _fill(like: torch.Tensor, name: str, numbers: Sequence[Any], shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    empty = torch.empty(shape, dtype=like.dtype, device=like.device)
    filled: torch.Tensor = getattr(_ATEN, name)(empty, *numbers, generator=generator)
    return filled


def _options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given[key] for key in ("dtype", "device") if given.get(key) is not None}


def _uniform(shape: Sequence[int], device: torch.device, random: SampleNumbers) -> torch.Tensor:
    """Numbers in (0, 1); float64, but float32 on MPS, which has no float64."""
    like = torch.empty(0, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
    return random.draw(shape, partial(_fill, like, "uniform_", ())).clamp(1e-6, 1 - 1e-6)


def _flip(given: Mapping[str, Any], random: SampleNumbers) -> torch.Tensor:
    """Heads with a chance of each coin's own: of half at least, if it has any."""
    target: torch.Tensor = given["self"]
    chance = torch.as_tensor(target if given.get("p") is None else given["p"], device=target.device)
    heads = (_uniform(target.shape, target.device, random) < chance.clamp_min(0.5)) & (chance > 0)
    return heads.to(target.dtype)


def _near(given: Mapping[str, Any], random: SampleNumbers) -> torch.Tensor:
    mean, std = given["mean"], given["std"]
    like = mean if isinstance(mean, torch.Tensor) else std
    shape = torch.broadcast_shapes(*(part.shape for part in (mean, std) if isinstance(part, torch.Tensor)))
    near: torch.Tensor = mean + std * torch.special.ndtri(_uniform(shape, like.device, random)).to(like.dtype)
    return near


def _permutation(given: Mapping[str, Any], random: SampleNumbers) -> torch.Tensor:
    uniform = _uniform((given["n"],), torch.device("cpu"), random)
    return uniform.argsort(stable=True).to(**{"dtype": torch.int64, **_options_of(given)})


def _categories(given: Mapping[str, Any], random: SampleNumbers) -> torch.Tensor:
    weights: torch.Tensor = given["self"]
    count = given["num_samples"]
    if given.get("replacement"):
        chances = weights.double().cumsum(-1)
        uniform = _uniform((*weights.shape[:-1], count), weights.device, random)
        return torch.searchsorted(chances / chances[..., -1:], uniform, right=True).clamp(max=weights.shape[-1] - 1)
    # The largest of log(weight) + Gumbel noise are a sample without replacement.
    noise = -(-(1 - _uniform(weights.shape, weights.device, random)).log()).log()
    return (weights.log() + noise).topk(count).indices


def _positive(given: Mapping[str, Any], random: SampleNumbers) -> torch.Tensor:
    """Not the distribution, but positive, near its mean, and different for each sample."""
    mean: torch.Tensor = given["self"]
    return (mean * (0.5 + _uniform(mean.shape, mean.device, random))).to(mean.dtype)


def _counts(mean: torch.Tensor, random: SampleNumbers) -> torch.Tensor:
    return _positive({"self": mean}, random).round()


_BY_NUMBERS: dict[str, Callable[[Mapping[str, Any], SampleNumbers], torch.Tensor]] = {
    "bernoulli": _flip,
    "randperm": _permutation,
    "multinomial": _categories,
    "poisson": lambda given, random: _counts(given["self"], random),
    "binomial": lambda given, random: torch.minimum(_counts(given["count"] * given["prob"], random), given["count"]),
    "_standard_gamma": _positive,
    "_sample_dirichlet": lambda given, random: F.normalize(_positive(given, random), p=1, dim=-1),
}
"""Operators whose numbers depend on values of tensors."""


@contextmanager
def _hold_host_draws(numbers: SampleNumbers) -> Iterator[None]:
    """Let the functions of ``random`` and ``numpy.random`` draw for samples, for this thread, until the block ends.

    Functions that were imported by their own name before still draw as they do, and so do generator objects. So does a
    call whose array has another shape in a part than in the whole batch: its values may depend on the number of
    samples, as those of a permutation.
    """
    with ExitStack() as stack:
        _hold(stack, python_random, python_random.Random(0), numbers)
        if sys.modules.get("numpy") is not None:
            numpy = import_module("numpy.random")  # NumPy 2 loads it where a step first names it
            _hold(stack, numpy, numpy.RandomState(0), numbers)
        yield


def _hold(stack: ExitStack, module: ModuleType, own: Any, numbers: SampleNumbers) -> None:
    """Let a module's functions of its global generator draw from ``own``, which is seeded for each draw."""
    shared = module.random.__self__
    for name, function in list(vars(module).items()):
        if getattr(function, "__self__", None) is shared and name not in _STATEFUL:
            _set(stack, module, name, partial(_draw_on_host, function, getattr(own, name), own.seed, numbers))


def _draw_on_host(shared: Any, own: Any, reseed: Any, numbers: SampleNumbers, *args: Any, **kwargs: Any) -> Any:
    if not _Repeatable.is_active():  # another thread's
        return shared(*args, **kwargs)

    def draw(seed: int) -> tuple[Any, tuple[int, ...]]:
        reseed(seed)
        drawn = own(*args, **kwargs)
        return drawn, (len(drawn),) if isinstance(drawn, (list, bytes)) else getattr(drawn, "shape", ())

    with _disable_current_modes():
        return numbers.hold(draw, partial(shared, *args, **kwargs))
