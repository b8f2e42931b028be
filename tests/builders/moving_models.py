"""Small trainings whose forward pass changes state in unusual places.

Each model takes ``inputs [samples, 6]`` and gives ``[samples, 4]``. Not covered: buffers that are registered in the
constructor, dropout and generators of the process, which ``workloads.Everything`` has.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class KeyEncoder(nn.Module):
    """A second encoder that follows the first one in every forward pass, and a queue of its outputs: MoCo."""

    def __init__(self, *, way: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
        self.pointer = 0
        self.way = way

    @torch.no_grad()
    def _follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            if self.way == "in place":
                key.mul_(0.8).add_(query, alpha=0.2)
            elif self.way == "data in place":
                key.data.mul_(0.8).add_(query.data, alpha=0.2)
            elif self.way == "data assigned":
                key.data = key.data * 0.8 + query.data * 0.2
            else:
                key.copy_(torch.lerp(key, query, 0.2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._follow()
        with torch.no_grad():
            keys = self.key(inputs)
        output = self.query(inputs)
        similar = output * keys + output * self.queue[:, self.pointer].clone()
        self.queue[:, self.pointer] = keys.mean(0)
        self.pointer = (self.pointer + 1) % 8
        return similar


class LateTeacher(nn.Module):
    """A copy of itself that is made in the first forward pass and hidden from ``parameters()``: BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.hidden = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.hidden:
            teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).requires_grad_(False)
            teacher.load_state_dict(self.online.state_dict())
            self.hidden.append(teacher)
        with torch.no_grad():
            for old, new in zip(self.hidden[0].parameters(), self.online.parameters(), strict=True):
                old.lerp_(new, 0.3)
            target = self.hidden[0](inputs)
        return self.online(inputs) * (1 + target)


class Normalised(nn.Module):
    """Weights that are trained and also moved: prototypes of unit length (SwAV), a clamp (a Wasserstein critic)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.copy_(F.normalize(self.head.weight + 0.01, dim=1))
        self.body.weight.data.clamp_(-0.3, 0.3)
        self.body.bias.data.add_(0.01)
        return self.head(torch.tanh(self.body(inputs)))


class Hidden(nn.Module):
    """State in plain attributes: tensors replaced and written, numbers, nested containers, arrays, generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.state = torch.zeros(8)
        self.bank = torch.zeros(3, 8)
        self.calls, self.noise = 0, 0.5
        self.history, self.recent = {"means": [], "last": {"size": 0}}, deque(maxlen=2)
        self.array = np.zeros(3)
        self.options = SimpleNamespace(scale=1.0, seen=set())
        self.generator = torch.Generator().manual_seed(3)
        self.python, self.numpy = random.Random(4), np.random.default_rng(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.noise *= 0.9
        self.options.scale *= 1.01
        self.options.seen.add(self.calls)
        drawn = self.python.random() + float(self.numpy.random()) + self.noise * torch.rand(8, generator=self.generator)
        hidden = torch.tanh(self.layer(inputs) + 0.1 * (self.state + self.bank.sum(0) + drawn))
        self.state = hidden.detach().mean(0)
        self.bank[self.calls % 3] = self.state
        self.array += float(self.state[0])
        self.history["means"].append(float(self.state.mean()))
        self.history["last"]["size"] = len(inputs)
        self.recent.append(self.state)
        shift = self.array.mean() + self.history["means"][0] + len(self.recent) + len(self.options.seen)
        return self.head(hidden * self.options.scale) + float(shift)


class DataDependent(nn.Module):
    """Registers a buffer and a parameter in its first forward pass, from what it sees there: ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_parameter("bias", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.layer(inputs)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", 1 / (0.1 + output.detach().std(0, correction=0)))
            self.bias = nn.Parameter(-output.detach().mean(0))
        return output * self.scale + self.bias


class Lazy(nn.Module):
    """Parameters and running statistics whose shapes come from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(inputs))))


class Hooked(nn.Module):
    """Collects an activation through a hook that it removes at its end, which an error does not let it reach."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handle = self.body.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
        self.head.requires_grad_(False)
        self.eval()
        output = self.head(torch.tanh(self.body(inputs)))
        self.train()
        self.head.requires_grad_(True)
        handle.remove()
        return output * len(seen) + self.head(seen[0]) * 0.1


class Embedded(nn.Module):
    """Looks rows up in a table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = (inputs * 1000).long().abs() % 50
        return self.table(rows).mean(1) * inputs[:, :4]


class Teacher:
    """A mean teacher that the step moves, outside the model; and numbers that only ``keep=`` can bring back."""

    def __init__(self) -> None:
        self.model = nn.Linear(6, 4).requires_grad_(False)
        self.steps, self.total = 0, torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.total = state["steps"], state["total"]

    def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps += 1
        with torch.no_grad():
            for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1 * self.steps)
        inputs, labels = batch
        output = model(inputs)
        loss = F.cross_entropy(output, labels) + 0.1 * (output - self.model(inputs)).square().mean()
        self.total = self.total + loss.detach()
        return loss * (1 + 0.1 * self.total)


CLASS_WEIGHTS = torch.tensor([0.1, 0.7, 1.3, 2.9])


def class_weighted_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over class weights: the sum of what it is over is not a whole number."""
    return F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


def sum_class_weights(batch: Any) -> torch.Tensor:
    return CLASS_WEIGHTS[batch[1]].sum()
