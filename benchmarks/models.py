"""Small models of four kinds, each with a batch of its own: what the benchmarks train.

Covers a convolutional net, a transformer, the same with checkpointing, and an MLP that is nearly all parameters; all
without coupling between samples and without dropout, so that a split gradient can be held against the whole one. Does
not cover models of a size that means anything outside a benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["Batch", "Training", "classify", "make_mlp", "make_trainings"]

Batch = tuple[torch.Tensor, torch.Tensor]

_CLASSES = 10
_TOKENS = 16


@dataclass(frozen=True)
class Training:
    """A model and a batch for it: inputs ``[samples, ...]`` and labels ``[samples]``."""

    name: str
    model: nn.Module
    batch: Batch


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy, the mean over samples."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def make_trainings(samples: int, width: int, depth: int, dtype: torch.dtype = torch.float32) -> list[Training]:
    """One training of each kind.

    Args:
        samples: Rows of each batch.
        width: Channels of the convolutions and of the transformer; the MLP is eight times as wide.
        depth: Blocks of the transformer; the MLP has twice as many layers.
        dtype: Of parameters and inputs.
    """
    torch.manual_seed(0)
    labels = torch.randint(_CLASSES, (samples,))
    images = torch.randn(samples, 3, 16, 16, dtype=dtype)
    tokens = torch.randn(samples, _TOKENS, width, dtype=dtype)
    rows = torch.randn(samples, 8 * width, dtype=dtype)
    return [
        Training("CNN", make_cnn(width).to(dtype), (images, labels)),
        Training("transformer", Transformer(width, depth).to(dtype), (tokens, labels)),
        Training("transformer, checkpointed", Transformer(width, depth, checkpointed=True).to(dtype), (tokens, labels)),
        Training("MLP, nearly all parameters", make_mlp(8 * width, 2 * depth).to(dtype), (rows, labels)),
    ]


def make_cnn(width: int) -> nn.Sequential:
    """Two convolutions, one with GroupNorm, one with a BatchNorm that is frozen: buffers, and exact under any split."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.GroupNorm(2, width),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width).eval(),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, _CLASSES),
    )


def make_mlp(width: int, depth: int) -> nn.Sequential:
    """Linear layers with GELU and a head."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


class Transformer(nn.Module):
    """Pre-norm blocks over ``[samples, tokens, width]``, then the mean over tokens and a head."""

    def __init__(self, width: int, depth: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.head = nn.Linear(width, _CLASSES)
        self.checkpointed = checkpointed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Class scores ``[samples, classes]``."""
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(hidden.mean(dim=1))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = (hidden.shape[0], hidden.shape[1], 2, -1)
        parts = self.mix(self.before_attention(hidden)).chunk(3, dim=-1)
        query, key, value = (part.reshape(heads).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + self.join(attended)
        return hidden + self.mlp(self.before_mlp(hidden))
