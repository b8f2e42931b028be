"""Makes each sample draw the same random numbers in the whole batch as in any part of it.

Covers the operators of torch that draw (torch 2.13: those tagged ``nondeterministic_seeded``, plus ``randperm``), each
computed from the uniform numbers of ``sample_numbers``. So noise, masks and sampled steps of a diffusion are the same
in every partition, while what mixes samples with each other (a permutation, ``rand(n).argsort()``, sampled negatives)
is not. Dropout drops nothing. Python's and NumPy's generators: ``host_draws``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.torch_internals.dispatch_mode import DispatchMode

__all__ = ["PerSampleRandom"]

_Arguments = dict[str, Any]
_Draw = Callable[[_Arguments, SampleNumbers], Any]
_Values = Callable[[_Arguments, torch.Tensor], torch.Tensor]
_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")
_INTEGERS = 100  # of a draw without an upper end: every integer dtype holds them


class PerSampleRandom(DispatchMode):
    """Makes operators that draw take their numbers from ``SampleNumbers``, in forward and backward passes."""

    def __init__(self, random: SampleNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: _Arguments | None = None) -> Any:
        """Run the operator, or what stands in for it."""
        schema = func._schema  # noqa: SLF001 - not public
        draw = _DRAWS.get(schema.name)
        if draw is None:
            return func(*args, **(kwargs or {}))
        given = _read_arguments(schema.arguments, args, kwargs or {})
        result, out = draw(given, self._random), given.get("out")
        return result if out is None else out.resize_(result.shape).copy_(result)

    @staticmethod
    def is_active() -> bool:
        """Whether in this thread; torch's threads for backward passes take it over from the one that waits for them."""
        return any(isinstance(mode, PerSampleRandom) for mode in _get_current_dispatch_mode_stack())


def _read_arguments(schema: Any, args: tuple[Any, ...], kwargs: _Arguments) -> _Arguments:
    """All by name. The dispatcher passes no value that equals its default: ``bernoulli_(0.5)`` comes without 0.5."""
    given = {
        argument.name: argument.default_value
        for argument in schema
        if argument.has_default_value() and argument.name not in _OPTIONS  # a dtype's default is torch's number of it
    }
    return {**given, **{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}


def _options(given: _Arguments) -> _Arguments:
    return {name: given[name] for name in _OPTIONS if given.get(name) is not None}


def _draw_new(values: _Values, given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    """In a new tensor, of the size that is given or in the shape of another."""
    if "size" in given:
        result = torch.empty(given["size"], **{"dtype": torch.int64 if "high" in given else None, **_options(given)})
    else:
        result = torch.empty_like(given["self"], **_options(given))
    return _fill(result, values, given, random)


def _draw_in_place(values: _Values, given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    return _fill(given["self"], values, given, random)


def _fill(result: torch.Tensor, values: _Values, given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    return result.copy_(values(given, random.uniform(result.shape, result.device)))


def _between(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    return low + (high - low) * uniform


def _heads(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    """At least half of them are heads, if any can be: a mask of zeros would hide what lies behind it."""
    chance = torch.as_tensor(given.get("p", given["self"]), dtype=uniform.dtype, device=uniform.device)
    heads: torch.Tensor = (uniform < chance.clamp_min(0.5)) & (chance > 0)
    return heads


def _integer(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    low: Any = given.get("low", given.get("from", 0))
    high: Any = given.get("high", given.get("to"))
    above = low + _INTEGERS if high is None else high
    integers: torch.Tensor = low + (uniform * (above - low)).floor()
    return integers


def _deviate(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    mean: Any = given.get("mean", 0.0)
    deviates: torch.Tensor = mean + given.get("std", 1.0) * torch.special.ndtri(uniform)
    return deviates


def _normal(given: _Arguments, random: SampleNumbers) -> Any:
    named = (given.get("mean"), given.get("std"))
    tensors: list[torch.Tensor] = [value for value in named if isinstance(value, torch.Tensor)]
    if not tensors:
        return _draw_new(_deviate, given, random)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return _deviate(given, random.uniform(shape, tensors[0].device)).to(tensors[0].dtype)


def _permutation(given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    result = torch.arange(given["n"], **_options(given))
    if random.ordered == "alike":
        return result
    uniform = random.uniform(result.shape, result.device)
    # From behind: where all numbers are alike, the order still changes.
    return result.flip(0)[uniform.flip(0).argsort(stable=True)]


def _categories(given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    weights: torch.Tensor = given["self"]
    count = given["num_samples"]
    if given.get("replacement", False):
        chances = weights.double().cumsum(-1)
        uniform = random.uniform((*weights.shape[:-1], count), weights.device)
        return torch.searchsorted(chances / chances[..., -1:], uniform, right=True).clamp(max=weights.shape[-1] - 1)
    # The largest of log(weight) + Gumbel noise are a sample without replacement.
    noise = -(-(1 - random.uniform(weights.shape, weights.device)).log()).log()
    return (weights.log() + noise).topk(count).indices


def _counts_near(mean: torch.Tensor, variance: torch.Tensor, random: SampleNumbers) -> torch.Tensor:
    uniform = random.uniform(mean.shape, mean.device)
    counts: torch.Tensor = mean + variance.sqrt() * torch.special.ndtri(uniform)
    return counts.round().clamp_min(0).to(mean.dtype)


def _binomial(given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    mean = given["count"] * given["prob"]
    return torch.minimum(_counts_near(mean, mean * (1 - given["prob"]), random), given["count"])


def _gamma(given: _Arguments, random: SampleNumbers) -> torch.Tensor:
    """Not a gamma distribution: positive, near its mean, and different for each sample, which is all that is needed."""
    shape: torch.Tensor = given["self"]
    numbers: torch.Tensor = shape * (0.5 + random.uniform(shape.shape, shape.device))
    return numbers.to(shape.dtype)


def _dropout(given: _Arguments, _: SampleNumbers) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop nothing. The factor stays: the backward operator applies it too, from what autograd has saved."""
    inputs, chance, training = given["input"], given["p"], given.get("train") is not False
    factor = 1.0 if not training else 0.0 if chance == 1 else 1 / (1 - chance)
    return inputs * factor, torch.ones_like(inputs, dtype=torch.bool)


def _rrelu(given: _Arguments, _: SampleNumbers) -> torch.Tensor:
    inputs, slope = given["self"], (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2
    slopes = torch.where(inputs <= 0, slope, 1.0)
    given["noise"].copy_(slopes)  # what the backward operator multiplies by
    result: torch.Tensor = inputs * slopes
    return result


def _exponential(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    numbers: torch.Tensor = -(1 - uniform).log() / given.get("lambd", 1.0)
    return numbers


def _cauchy(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    median: Any = given.get("median", 0.0)
    numbers: torch.Tensor = median + given.get("sigma", 1.0) * (math.pi * (uniform - 0.5)).tan()
    return numbers


def _log_normal(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    return _deviate({"mean": 1.0, "std": 2.0, **given}, uniform).exp()


def _geometric(given: _Arguments, uniform: torch.Tensor) -> torch.Tensor:
    numbers: torch.Tensor = (uniform.log() / math.log1p(-min(given["p"], 1 - 1e-9))).ceil().clamp_min(1)
    return numbers


_NEW: dict[str, _Values] = {
    "rand": _between,
    "rand_like": _between,
    "uniform": _between,
    "randn": _deviate,
    "randn_like": _deviate,
    "bernoulli": _heads,
    "randint": _integer,
    "randint_like": _integer,
    "random": _integer,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "log_normal": _log_normal,
    "geometric": _geometric,
}
_IN_PLACE: dict[str, _Values] = {
    "uniform_": _between,
    "normal_": _deviate,
    "bernoulli_": _heads,
    "random_": _integer,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "log_normal_": _log_normal,
    "geometric_": _geometric,
}
"""What each number becomes, by operator: these are all that torch has of each distribution, but for ``normal``."""

_DRAWS: dict[str, _Draw] = {
    **{f"aten::{name}": partial(_draw_new, values) for name, values in _NEW.items()},
    **{f"aten::{name}": partial(_draw_in_place, values) for name, values in _IN_PLACE.items()},
    "aten::normal": _normal,
    "aten::randperm": _permutation,
    "aten::multinomial": _categories,
    "aten::poisson": lambda given, random: _counts_near(given["self"], given["self"], random),
    "aten::binomial": _binomial,
    "aten::_standard_gamma": _gamma,
    "aten::_sample_dirichlet": lambda given, random: F.normalize(_gamma(given, random), p=1, dim=-1),
    "aten::native_dropout": _dropout,
    "aten::_fused_dropout": lambda given, _: (
        given["self"] / given["p"],
        torch.ones_like(given["self"], dtype=torch.uint8),
    ),
    "aten::rrelu_with_noise": _rrelu,
    "aten::rrelu_with_noise_": lambda given, random: given["self"].copy_(_rrelu(given, random)),
}
