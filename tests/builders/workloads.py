"""Small models and steps that the tests share, each with one thing in it that a careless runner gets wrong.

Not covered: sizes that take time; everything here runs in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autobatch.batch.samples import Layout


class Everything(nn.Module):
    """BatchNorm, dropout, non-persistent and overlapping buffers, tied weights, a frozen layer, a counter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.tied = nn.Linear(8, 8, dtype=dtype)
        self.also_tied = nn.Linear(8, 8, dtype=dtype)
        self.also_tied.weight = self.tied.weight
        self.unused = nn.Linear(3, 3, dtype=dtype)
        self.head = nn.Linear(8, 4, dtype=dtype)
        self.register_buffer("seen", torch.zeros((), dtype=dtype), persistent=False)
        self.register_buffer("positions", torch.arange(4).expand(3, 4), persistent=False)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += inputs.detach().mean()
        hidden = self.drop(self.norm(self.embed(inputs)))
        hidden = F.relu(self.also_tied(F.relu(self.tied(self.frozen(hidden)))))
        return self.head(hidden)


class Plain(nn.Module):
    """Deterministic and without coupling between samples: its split must be exact."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10, dtype=dtype), nn.Tanh(), nn.Linear(10, 10, dtype=dtype), nn.Tanh())
        self.head = nn.Linear(10, 4, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)
        self.checkpointed = checkpointed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.body, inputs, use_reentrant=False) if self.checkpointed else self.body(inputs)
        return self.head(hidden)


def make_batch(samples: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """``(inputs [samples, 6], labels [samples])``, without touching the global generator."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, dtype=torch.float64, generator=generator).to(dtype)
    return inputs, torch.randint(0, 4, (samples,), generator=generator)


def cut(layout: Layout, sizes: Sequence[int]) -> list[Any]:
    """Consecutive parts of these sizes, which sum to the number of samples."""
    return [layout.take(range(stop - size, stop)) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def mean_step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def limited(most: int) -> Any:
    """``mean_step``, which runs out of memory with more samples than ``most``."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return mean_step(model, batch)

    return step


def full_batch_gradient(model: nn.Module, step: Any, batch: Any) -> dict[str, torch.Tensor | None]:
    """The oracle: the gradient of the step's mean over the whole batch at once, by name; ``.grad`` is left alone."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    step(model, batch).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter, gradient in kept:
        parameter.grad = gradient
    return found


def relative_error(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> float:
    """``|found - expected| / |expected|`` over all parameters; infinite where only one of the two has a gradient."""
    if {k for k, v in found.items() if v is None} != {k for k, v in expected.items() if v is None}:
        return float("inf")
    pairs = [(found[k], v) for k, v in expected.items() if v is not None]
    distance = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (distance / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """``.grad`` by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything that a probe or an undone step must leave alone, comparable with ``same_bits``."""
    import random

    import numpy as np

    state: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1],
    }
    for name, parameter in model.named_parameters():
        state[f"class of {name}"] = type(parameter).__qualname__
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            continue
        state[f"parameter {name}"] = parameter.detach().clone()
        state[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
        state[f"gradient object {name}"] = id(parameter.grad) if parameter.grad is not None else None
        state[f"requires grad {name}"] = parameter.requires_grad
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, nn.parameter.UninitializedBuffer):
            state[f"buffer {name}"] = buffer.clone()
    for name, module in model.named_modules():
        state[f"training {name}"] = module.training
        state[f"hooks {name}"] = (list(module._forward_hooks.values()), list(module._forward_pre_hooks.values()))
        state[f"class {name}"] = type(module).__qualname__
        state[f"attributes {name}"] = {k: _by_value(v) for k, v in vars(module).items() if not k.startswith("_")}
    if optimizer is not None:
        state["optimizer"] = {
            (index, key): value.clone() if isinstance(value, torch.Tensor) else value
            for index, entry in enumerate(optimizer.state.values())
            for key, value in entry.items()
        }
        state["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return state


def _by_value(value: Any) -> Any:
    """A copy of a plain attribute: a number, a tensor, an array, a generator, or a dict or list of them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {key: _by_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(map(_by_value, value)))
    if isinstance(value, nn.Module):
        return {key: part.clone() for key, part in value.state_dict().items()}
    return value.copy() if hasattr(value, "tolist") else value if isinstance(value, (int, float, str)) else None


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """The paths at which two nests differ; tensors are compared bit for bit."""
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [f"{path}/{key}: only in one" for key in set(expected) ^ set(found)]
        return missing + [
            d for k in set(expected) & set(found) for d in differences(found[k], expected[k], f"{path}/{k}")
        ]
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape
        equal = same and torch.equal(_raw(found), _raw(expected))
        return [] if equal else [path]
    if hasattr(expected, "tolist"):
        return [] if (found == expected).all() else [path]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return [
            d for i, pair in enumerate(zip(found, expected, strict=True)) for d in differences(*pair, f"{path}/{i}")
        ]
    return [] if type(found) is type(expected) and found == expected else [path]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # Bits, not values: nan equals itself, and -0.0 is not 0.0. Of a sharded tensor this rank's part: torch compares
    # whole ones over all ranks.
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
