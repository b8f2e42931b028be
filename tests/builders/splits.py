"""Steps whose split is exact, is not, or cannot be judged, for the tests of ``verify`` and of the check in ``fit``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from workloads import Plain, make_batch, mean_step

from autobatch.step.losses import Mean, PerStep, Sum

CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.2, 7.0])


def small(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 4))


def with_bare_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, track_running_stats=False), nn.Tanh(), nn.Linear(10, 4))


def with_spectral_norm() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(6, 10)), nn.Tanh(), nn.Linear(10, 4))


def tokens(samples: int = 16, *, filler: int = -100) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(2, 4, (samples, 5), generator=generator)
    for row in range(samples):
        labels[row, 1 + row % 5 :] = filler
    return {"x": torch.randn(samples, 5, 6, generator=generator), "labels": labels}


def token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def shifted_token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the labels of a language model."""
    return F.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def sum_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def class_weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the weights of the classes."""
    return F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


def info_nce(model: nn.Module, batch: Any) -> torch.Tensor:
    hidden = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(hidden @ F.normalize(batch[0][:, :4], dim=1).T, torch.arange(len(hidden)))


def soft_dice(model: nn.Module, batch: Any) -> torch.Tensor:
    chance, truth = model(batch[0]).softmax(1), F.one_hot(batch[1], 4)
    return 1 - 2 * (chance * truth).sum() / (chance.sum() + truth.sum() + (chance**2).sum())


def balanced_experts(model: nn.Module, batch: Any) -> torch.Tensor:
    chance = model(batch[0]).softmax(1)
    share = F.one_hot(chance.argmax(1), 4).float().mean(0)
    return F.cross_entropy(model(batch[0]), batch[1]) + 4 * (share * chance.mean(0)).sum()


def two_tasks(model: nn.Module, batch: Any) -> torch.Tensor:
    out, labels = model(batch[0]), batch[1]
    sparse = labels.masked_fill(batch[0][:, 0] > 0.5, -100)
    return F.cross_entropy(out, labels) + F.cross_entropy(out.flip(1), sparse)


def mixup(model: nn.Module, batch: Any) -> torch.Tensor:
    order = torch.randperm(len(batch[0]))
    return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


class Complex(nn.Module):
    """A complex weight, whose imaginary part has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 1 + 1j, dtype=torch.complex64))


def half_wrong(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean for the real part and a sum for the imaginary part."""
    return (batch[0] @ model.weight.real).square().mean() + (batch[0] @ model.weight.imag).square().sum()


def regulariser(model: nn.Module) -> torch.Tensor:
    return sum(parameter.square().sum() for parameter in model.parameters())


WRONG: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "a sum read as a mean": (small, sum_loss, None, make_batch(16), "autobatch.Sum(loss, count)"),
    "a token mean by rows": (small, token_mean, None, tokens(), 'weigh=lambda batch: (batch["labels"] != -100).sum()'),
    "shifted labels by rows": (
        small,
        shifted_token_mean,
        None,
        tokens(),
        'weigh=lambda batch: (batch["labels"][:, 1:] != -100).sum()',
    ),
    "a row mean by tokens": (
        small,
        lambda model, batch: model(batch["x"]).square().mean(),
        lambda batch: (batch["labels"] != -100).sum(),
        tokens(),
        "and is counted otherwise: leave weigh= out",
    ),
    "a row mean by what some rows have none of": (
        small,
        mean_step,
        lambda batch: (batch[1] == 0).sum(),
        make_batch(16),
        "and is counted otherwise: leave weigh= out",
    ),
    "a token mean by what some rows have none of": (
        small,
        token_mean,
        lambda batch: (batch["x"][:, 0] > 0).sum(),
        tokens(),
        'weigh=lambda batch: (batch["labels"] != -100).sum()',
    ),
    "a sum by what some rows have none of": (
        small,
        sum_loss,
        lambda batch: (batch[1] == 0).sum(),
        make_batch(16),
        "autobatch.Sum(loss, count)",
    ),
    "a row mean stated with count 0 for some rows": (
        small,
        lambda model, batch: Mean(mean_step(model, batch), count=(batch[1] == 0).sum()),
        None,
        make_batch(16),
        "and is counted otherwise: return the loss itself",
    ),
    "class weights": (small, class_weighted, None, make_batch(16), "such as class weights"),
    "in-batch negatives": (small, info_nce, None, make_batch(16), "depends on the others"),
    "BatchNorm": (with_batch_norm, mean_step, None, make_batch(16), "BatchNorm in train mode (1)"),
    "BatchNorm without running statistics": (
        with_bare_batch_norm,
        mean_step,
        None,
        make_batch(16),
        "BatchNorm in train mode (1)",
    ),
    "soft Dice over the batch": (small, soft_dice, None, make_batch(16), "depends on the others"),
    "balance of experts": (small, balanced_experts, None, make_batch(16), "depends on the others"),
    "two tasks, sparse labels": (small, two_tasks, None, make_batch(16), "several terms with counts of their own"),
    "mixup by randperm": (small, mixup, None, make_batch(16), "in-batch shuffling"),
    "spectral norm": (with_spectral_norm, mean_step, None, make_batch(16), "moves with every forward pass (0;"),
    "a regulariser in a Sum": (
        small,
        lambda model, batch: Sum(sum_loss(model, batch) + regulariser(model), len(batch[0])),
        None,
        make_batch(16),
        "return it as autobatch.PerStep",
    ),
    "a complex weight's imaginary part": (Complex, half_wrong, None, make_batch(16), "depends on the others"),
    "a mean stated with count 1": (
        small,
        lambda model, batch: Mean(mean_step(model, batch), count=1),
        None,
        make_batch(16),
        "and is counted otherwise: return the loss itself",
    ),
}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs):
        return self.head(self.layer(inputs.unsqueeze(1).repeat(1, 3, 1) * torch.arange(1, 4)[:, None]).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 8, 2, dropout=0.6, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs.unsqueeze(1).repeat(1, 3, 1))[0][:, -1])


class Path(nn.Module):
    """A small model with a change of its input or output around it."""

    def __init__(self, change) -> None:
        super().__init__()
        self.body, self.change = small(), change

    def forward(self, inputs):
        return self.change(self.body, inputs)


def drop_path(body, inputs):
    return body(inputs) * torch.empty(len(inputs), 1).bernoulli_(0.2) / 0.2


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )


class Recomputed(nn.Module):
    """A transformer layer whose dropouts run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(6, 2, 8, 0.3, batch_first=True), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layer, inputs[:, None], use_reentrant=False)[:, 0])


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
    model[2].weight = model[0].weight
    return model


def in_bfloat16(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


def cast_by_hand(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0].to(torch.bfloat16)).float(), batch[1])


def at_its_optimum() -> nn.Module:
    """A point at which the gradient of the whole is 0, and that of its parts is not."""
    inputs, labels = make_batch(16, torch.float64)
    solution = torch.linalg.lstsq(torch.cat([inputs, torch.ones(16, 1)], 1), labels.double().unsqueeze(1)).solution
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.copy_(solution[:6].T)
        model.bias.copy_(solution[6])
    return model


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1].float())


def flat(model: nn.Module, batch: Any) -> torch.Tensor:
    """The length of what has length 1."""
    return F.normalize(model(batch[0]), dim=1).square().sum(1).mean()


def amplify(body, inputs):
    """The last bits of float32 become visible, as behind the kinks of a quantised network."""
    return torch.sin(1e6 * body(inputs))


def state_of_zeros(body, inputs):
    """A state that begins with zeros of the default dtype, amplified too."""
    return torch.sin(1e6 * body(inputs) + torch.addmm(torch.zeros(4), inputs[:, :4], torch.eye(4)))


RIGHT: dict[str, tuple[Any, Any, Any, Any]] = {
    "plain": (small, mean_step, None, make_batch(16)),
    "float64": (Plain, mean_step, None, make_batch(16, torch.float64)),
    "checkpointed": (lambda: Plain(checkpointed=True), mean_step, None, make_batch(16, torch.float64)),
    "reentrant checkpoint": (
        lambda: Path(lambda body, inputs: checkpoint(body, inputs.clone().requires_grad_(), use_reentrant=True)),
        mean_step,
        None,
        make_batch(16),
    ),
    "tokens": (small, token_mean, lambda batch: (batch["labels"] != -100).sum(), tokens()),
    "class weights": (small, class_weighted, lambda batch: CLASS_WEIGHTS[batch[1]].sum(), make_batch(16)),
    "transformer layer": (Encoder, mean_step, None, make_batch(16)),
    "LSTM with dropout": (Recurrent, mean_step, None, make_batch(16)),
    "functional dropout": (
        lambda: Path(lambda body, inputs: F.dropout(body(inputs), 0.7)),
        mean_step,
        None,
        make_batch(16),
    ),
    "drop path": (lambda: Path(drop_path), mean_step, None, make_batch(16)),
    "noise": (
        lambda: Path(lambda body, inputs: body(inputs + torch.randn_like(inputs))),
        mean_step,
        None,
        make_batch(16),
    ),
    "dropout that is recomputed": (Recomputed, mean_step, None, make_batch(16)),
    "tied weights": (tied, mean_step, None, make_batch(16)),
    "GroupNorm": (convolutional, mean_step, None, make_batch(16)),
    "bfloat16 autocast": (small, in_bfloat16, None, make_batch(16)),
    "bfloat16 model": (lambda: small().bfloat16(), mean_step, None, make_batch(16, torch.bfloat16)),
    "bfloat16 by hand": (lambda: small().bfloat16(), cast_by_hand, None, make_batch(16)),
    "Sum": (small, lambda model, batch: Sum(sum_loss(model, batch), len(batch[0])), None, make_batch(16)),
    "divided before": (
        small,
        lambda model, batch: Sum(sum_loss(model, batch) / 256, len(batch[0]) / 256),
        None,
        make_batch(16),
    ),
    "PerStep": (
        small,
        lambda model, batch: {"loss": mean_step(model, batch), "decay": PerStep(regulariser(model))},
        None,
        make_batch(16),
    ),
    "complex": (
        Complex,
        lambda model, batch: (batch[0] @ model.weight.real).square().mean() + (batch[0] @ model.weight.imag).mean(),
        None,
        make_batch(16),
    ),
    "at its optimum": (at_its_optimum, squared_error, None, make_batch(16)),
    "flat in its parameters": (small, flat, None, make_batch(16)),
    "amplified rounding": (lambda: Path(amplify), mean_step, None, make_batch(16)),
    "amplified rounding and new tensors": (lambda: Path(state_of_zeros), mean_step, None, make_batch(16)),
    "ragged": (small, mean_step, None, make_batch(7)),
    "two samples": (small, mean_step, None, make_batch(2)),
}


def insists_on_half(model: nn.Module, batch: Any) -> torch.Tensor:
    hidden = model(batch[0].bfloat16())
    assert hidden.dtype == torch.bfloat16
    return F.cross_entropy(hidden.float(), batch[1])


NOT_DETERMINISTIC: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "insists on half": (lambda: small().bfloat16(), insists_on_half, None, make_batch(16), "AssertionError"),
}


class Squeezes(nn.Module):
    """Does not know what to do with one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs).squeeze())
