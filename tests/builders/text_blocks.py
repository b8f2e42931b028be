"""A small transformer whose blocks may be recomputed, and the memory that one sample of it needs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import autobatch

LAYERS, WIDTH, LENGTH = 6, 32, 96


class Texts(nn.Module):
    def __init__(self, layers: int = LAYERS, dropout: float = 0.1, wides: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, WIDTH * wides[i % len(wides)], dropout, batch_first=True)
            for i in range(layers)
        )
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(texts)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(texts).flatten(0, 1), texts.flatten())


def make_texts(count: int = 4) -> torch.Tensor:
    return torch.randint(50, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def make_model(dtype: torch.dtype = torch.float32) -> Texts:
    torch.manual_seed(0)
    return Texts().to(dtype)


def need_of(model: nn.Module) -> int:
    plan = autobatch.fit(
        model, 4, batch=make_texts(), step=step, budget="4GiB", headroom=0, max_micro_batch=1, check=None, reuse=False
    )
    return plan.peak_bytes
