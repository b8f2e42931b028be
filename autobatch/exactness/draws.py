"""Random numbers that are the same for every sample, however the samples are divided.

Covers the operators of torch that draw (torch 2.13: those tagged ``nondeterministic_seeded``, plus ``randperm``): each
returns a constant, and no generator moves. So noise, masks and sampled steps of a diffusion cannot tell one division
from another. Only what mixes samples with each other stays visible: ``randperm`` reverses the order. Does not cover
kernels of other packages, nor Python's and NumPy's generators; who uses this looks whether those moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autobatch.dispatch import DispatchMode

__all__ = ["ConstantDraws"]

_Arguments = dict[str, Any]
_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


class ConstantDraws(DispatchMode):
    """While active, in forward and backward, operators that draw random numbers return constants."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, or what stands in for it."""
        schema = func._schema  # noqa: SLF001 - no public twin
        constant = _CONSTANTS.get(schema.name)
        if constant is None:
            return func(*args, **(kwargs or {}))
        given = _read_arguments(schema.arguments, args, kwargs or {})
        result, out = constant(given), given.get("out")
        return result if out is None else out.resize_(result.shape).copy_(result)

    @staticmethod
    def is_active() -> bool:
        """Whether in this thread; torch's threads for backward passes take it over from the one that waits for them."""
        return any(isinstance(mode, ConstantDraws) for mode in _get_current_dispatch_mode_stack())


def _read_arguments(schema: Any, args: tuple[Any, ...], kwargs: _Arguments) -> _Arguments:
    """All by name. What equals its default is not handed over: ``bernoulli_(0.5)`` comes without its 0.5."""
    given = {
        argument.name: argument.default_value
        for argument in schema
        if argument.has_default_value() and argument.name not in _OPTIONS  # a dtype's default is torch's number of it
    }
    return {**given, **{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}


def _write(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    return tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)


def _options(given: _Arguments) -> _Arguments:
    return {name: given[name] for name in _OPTIONS if given.get(name) is not None}


def _in_place(value: Callable[[_Arguments], Any]) -> Callable[[_Arguments], torch.Tensor]:
    return lambda given: _write(given["self"], value(given))


def _new(value: Callable[[_Arguments], Any]) -> Callable[[_Arguments], torch.Tensor]:
    return lambda given: torch.full(given["size"], value(given), **_options(given))


def _new_like(value: Callable[[_Arguments], Any]) -> Callable[[_Arguments], torch.Tensor]:
    return lambda given: _write(torch.empty_like(given["self"], **_options(given)), value(given))


def _half(_: _Arguments) -> float:
    return 0.5


def _heads(given: _Arguments) -> Any:
    """1 wherever it can be: a mask of zeros would hide from the comparison what lies behind it."""
    chance: Any = given.get("p", given["self"])
    return chance > 0


def _middle(given: _Arguments) -> Any:
    low: Any = given.get("low", given.get("from", 0))
    high: Any = given.get("high", given.get("to"))
    return low + 1 if high is None else (low + high) // 2


def _above_mean(given: _Arguments) -> Any:
    """Half a deviation off: at the mean itself a scale that is learned would get no gradient."""
    mean: Any = given.get("mean", 0.0)
    return mean + given.get("std", 1.0) / 2


def _normal(given: _Arguments) -> torch.Tensor:
    value = _above_mean(given)
    return value if isinstance(value, torch.Tensor) else _new(_above_mean)(given)


def _reverse(given: _Arguments) -> torch.Tensor:
    return torch.arange(given["n"] - 1, -1, -1, **_options(given))


def _most_likely(given: _Arguments) -> torch.Tensor:
    count = given["num_samples"]
    order: torch.Tensor = given["self"].sort(dim=-1, descending=True, stable=True).indices
    if given.get("replacement", False):
        return order[..., :1].repeat(*([1] * (order.ndim - 1)), count)
    return order[..., :count].flip(-1)


def _dirichlet(given: _Arguments) -> torch.Tensor:
    concentration: torch.Tensor = given["self"]
    return concentration / concentration.sum(dim=-1, keepdim=True)


def _dropout(given: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """All kept. The factor stays: the backward operator applies it too, from what autograd has remembered."""
    inputs, chance, training = given["input"], given["p"], given.get("train") is not False
    factor = 1.0 if not training else 0.0 if chance == 1 else 1 / (1 - chance)
    return inputs * factor, torch.ones_like(inputs, dtype=torch.bool)


def _fused_dropout(given: _Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return given["self"] / given["p"], torch.ones_like(given["self"], dtype=torch.uint8)


def _rrelu(given: _Arguments) -> torch.Tensor:
    inputs, slope = given["self"], (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2
    slopes = torch.where(inputs <= 0, slope, 1.0)
    given["noise"].copy_(slopes)  # what the backward operator multiplies by
    result: torch.Tensor = inputs * slopes
    return result


_CONSTANTS: dict[str, Callable[[_Arguments], Any]] = {
    "aten::bernoulli": _new_like(_heads),
    "aten::bernoulli_": _in_place(_heads),
    "aten::rand": _new(_half),
    "aten::rand_like": _new_like(_half),
    "aten::uniform_": _in_place(lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2),
    "aten::randn": _new(_half),
    "aten::randn_like": _new_like(_half),
    "aten::normal": _normal,
    "aten::normal_": _in_place(_above_mean),
    "aten::randint": _new(_middle),
    "aten::randint_like": _new_like(_middle),
    "aten::random_": _in_place(_middle),
    "aten::randperm": _reverse,
    "aten::exponential_": _in_place(lambda given: 1 / given.get("lambd", 1.0)),
    "aten::cauchy_": _in_place(lambda given: given.get("median", 0.0) + given.get("sigma", 1.0) / 2),
    "aten::log_normal_": _in_place(lambda given: math.exp(given.get("mean", 1.0))),
    "aten::geometric_": _in_place(lambda given: max(1, round(1 / given["p"]))),
    "aten::multinomial": _most_likely,
    "aten::poisson": lambda given: given["self"].round(),
    "aten::binomial": lambda given: (given["count"] * given["prob"]).round(),
    "aten::_standard_gamma": lambda given: given["self"].clone(),
    "aten::_sample_dirichlet": _dirichlet,
    "aten::native_dropout": _dropout,
    "aten::_fused_dropout": _fused_dropout,
    "aten::rrelu_with_noise": _rrelu,
    "aten::rrelu_with_noise_": _in_place(_rrelu),
}
