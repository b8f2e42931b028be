"""Ten kinds of training on a card: what the benchmarks of memory and of the search train there.

Covers perceptrons, small transformers with random weights (torch's own and those of the library of that name),
autocast, checkpointing, tied weights and bfloat16. Does not cover convolutions and recurrent layers: what cuDNN takes
is not known where there is no card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["TRAININGS", "Training"]

_TOKENS, _VOCABULARY, _CLASSES = 128, 4096, 1000


@dataclass(frozen=True)
class Training:
    """A model, how one step of it goes, its optimizer, and a batch in the host's memory."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    step: Callable[[Any, Any], torch.Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Of all parameters."""
        return self.optimizer(model.parameters(), **({"lr": 1e-3} | self.options))  # type: ignore[call-arg]


class _Perceptron(nn.Module):
    def __init__(self, width: int = 2048, depth: int = 4, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(512, width)
        self.hidden = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.last = nn.Linear(width, _CLASSES)
        self.checkpointed = checkpointed

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(rows))
        for layer in self.hidden:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.checkpointed else layer(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


class _Encoder(nn.Module):
    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens)).mean(1))
        return logits


class _VisionTransformer(nn.Module):
    """Its patches go through a linear layer, which does what the usual convolution does."""

    def __init__(self, width: int = 384, depth: int = 6, patch: int = 16) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, activation="gelu", norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        samples, channels, height, width = images.shape
        grid = images.view(samples, channels, height // self.patch, self.patch, width // self.patch, self.patch)
        patches = grid.permute(2, 4, 0, 1, 3, 5).reshape(-1, samples, channels * self.patch**2)
        logits: torch.Tensor = self.head(self.layers(self.embed(patches)).mean(0))
        return logits


class _TiedDecoder(nn.Module):
    """The embedding's weight is the head's, so its gradient meets itself; logits are the largest tensors."""

    def __init__(self, width: int = 384, depth: int = 6, vocabulary: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))
        return logits


def _classify(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _classify_amp(model: Any, batch: Any) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return _classify(model, batch)


def _next_token(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _own_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _rows(samples: int) -> Any:
    return torch.randn(samples, 512), torch.randint(_CLASSES, (samples,))


def _tokens(samples: int) -> torch.Tensor:
    return torch.randint(_VOCABULARY, (samples, _TOKENS))


def _labelled_tokens(samples: int) -> Any:
    return _tokens(samples), torch.randint(_CLASSES, (samples,))


def _images(samples: int) -> Any:
    return torch.randn(samples, 3, 112, 112), torch.randint(_CLASSES, (samples,))


def _bert() -> nn.Module:
    sizes = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 1536}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=_VOCABULARY, **sizes))


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": _TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=_VOCABULARY, **sizes))


def _llama() -> nn.Module:
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=_VOCABULARY, intermediate_size=1024, **sizes)
    return transformers.LlamaForCausalLM(config).bfloat16()


_SGD = {"optimizer": torch.optim.SGD, "options": {"momentum": 0.9}}
TRAININGS = {
    "mlp_sgd": Training(_Perceptron, _rows, _classify, **_SGD),
    "mlp_amp_adamw": Training(_Perceptron, _rows, _classify_amp),
    "mlp_checkpointed": Training(lambda: _Perceptron(depth=8, checkpointed=True), _rows, _classify, **_SGD),
    "transformer": Training(_Encoder, _labelled_tokens, _classify),
    "transformer_amp": Training(_Encoder, _labelled_tokens, _classify_amp),
    "bert": Training(_bert, _tokens, _own_loss),
    "vit": Training(_VisionTransformer, _images, _classify),
    "gpt2": Training(_gpt2, _tokens, _own_loss),
    "llama_bf16": Training(_llama, _tokens, _own_loss),
    "tied_decoder": Training(_TiedDecoder, _tokens, _next_token),
}
"""By name."""
