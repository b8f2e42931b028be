"""Batches of texts of different lengths, a small model that masks padding, and steps on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 30
LENGTHS = (24, 3, 17, 9, 24, 1, 12, 6, 5, 20, 2, 11)


class Reader(nn.Module):
    """Embedding, masked attention, a head; dropout where asked for."""

    def __init__(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, dtype=dtype)
        self.key = nn.Linear(8, 8, dtype=dtype)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, WORDS, dtype=dtype)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        scores = self.key(hidden) @ hidden.transpose(1, 2)
        hidden = hidden + scores.masked_fill(~mask.bool()[:, None], -1e9).softmax(-1) @ hidden
        return self.head(self.drop(hidden))


def make_texts(lengths: Sequence[int] = LENGTHS, *, left: bool = False, padded: int = 0, seed: int = 0) -> Any:
    """``{"tokens", "mask", "labels"}``, each ``[samples, padded]``."""
    generator, longest = torch.Generator().manual_seed(seed), padded or max(lengths)
    tokens = torch.randint(1, WORDS, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] < torch.tensor([*lengths])[:, None]
    mask = mask.flip(1) if left else mask
    return {"tokens": tokens * mask, "mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def read_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"], batch["mask"]).flatten(0, 1), batch["labels"].flatten())


def count_tokens(batch: Any) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def length_of(batch: Any) -> torch.Tensor:
    return batch["mask"].sum(1)
