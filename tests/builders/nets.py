"""Two nets with what real ones have: a convolution net with BatchNorm, a small GPT with dropout and tied weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width // stride, width, 1, stride) if stride > 1 else nn.Identity()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.first_norm(self.first(inputs)))
        hidden = self.second_norm(self.second(hidden))
        hidden += self.shortcut(inputs)
        return self.activation(hidden)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.body = nn.Sequential(Residual(16, 1), Residual(32, 2), Residual(64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(images)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        samples, length, width = hidden.shape
        parts = self.attend(self.before(hidden)).split(width, 2)
        query, key, value = (p.view(samples, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        mixed = self.project(mixed.transpose(1, 2).reshape(samples, length, width))
        hidden = hidden + F.dropout(mixed, self.dropout, self.training)
        return hidden + F.dropout(self.mlp(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """``checkpointed``: ``None``, or what ``use_reentrant`` is."""

    def __init__(self, *, words=500, length=32, width=64, heads=4, layers=2, dropout=0.1, checkpointed=None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpointed is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointed)
        return self.head(self.norm(hidden))


def images(samples: int = 2):
    """``(images [samples, 3, 64, 64], labels [samples])``."""
    return torch.zeros(samples, 3, 64, 64), torch.zeros(samples, dtype=torch.long)


def tokens(samples: int = 2, length: int = 32):
    """``(tokens [samples, length], the same)``."""
    return (torch.zeros(samples, length, dtype=torch.long),) * 2


def step(model: nn.Module, batch) -> torch.Tensor:
    """Cross entropy over the last dimension, the mean."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
