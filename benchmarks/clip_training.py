"""What a CLIP loss costs and how exact its gradient is, beside open_clip's own training loop with ``accum_freq``.

    python benchmarks/clip_training.py

One step of two small towers and a trained temperature, in micro-batches, on one CPU. open_clip's ``train_one_epoch``
runs unchanged, with a learning rate of 0.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch
from contrastive import Encoder
from quiet import undisturbed
from runner import pair_up
from tables import Goal, Table, judge
from torch import nn

import autobatch

_PARTS, _SIZE, _LENGTH, _WORDS = 4, 8, 16, 500
_SAMPLES = _PARTS * _SIZE
_NEAR = 1e-14  # the difference that rounding leaves in float64

Pair = tuple[torch.Tensor, torch.Tensor]
Accumulate = Callable[[], object]


class Clip(nn.Module):
    """Two towers and a temperature, with the outputs of open_clip's model."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image, self.text = Encoder(dropout), Encoder(dropout)
        self.logit_scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return normalized features and the temperature."""
        pairs = (self.image.embed(images), self.text.embed(texts))
        images, texts = (nn.functional.normalize(one, dim=-1) for one in pairs)
        return {"image_features": images, "text_features": texts, "logit_scale": self.logit_scale.exp()}


def make(dropout: float, dtype: torch.dtype) -> tuple[Clip, Pair]:
    """Make a model, and pairs of token lists."""
    torch.manual_seed(0)
    first, second = torch.randint(_WORDS, (2, _SAMPLES, _LENGTH))
    return Clip(dropout).to(dtype), (first, second)


def compare(model: Clip, features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of CLIP (Radford et al. 2021), which open_clip's ``ClipLoss`` computes."""
    images, texts = features
    logits, labels = model.logit_scale.exp() * images @ texts.T, torch.arange(len(images))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2


def bind(model: Clip, batch: Pair) -> Accumulate:
    """Return what accumulates the batch as a WholeBatch."""

    def represent(model: Clip, pairs: Pair) -> list[torch.Tensor]:
        found = model(*pairs)
        return [found["image_features"], found["text_features"]]

    step = autobatch.WholeBatch(represent, lambda features, _: compare(model, features))
    options: dict[str, Any] = {"max_micro_batch": _SIZE, "check": None, "reuse": False, "progress": False}
    with undisturbed():
        plan = autobatch.fit(model, _SAMPLES, batch=batch, step=step, **options)
    runner = autobatch.Runner(plan, model, step=step, optimizer=None)

    def accumulate() -> None:
        model.zero_grad(set_to_none=True)
        runner.accumulate(batch)

    return accumulate


def train(model: Clip, batch: Pair) -> Accumulate | None:
    """Return what runs a step of open_clip's own loop, if it is installed."""
    import torchvision_stub  # noqa: F401, PLC0415 - open_clip imports torchvision

    try:
        run = import_module("open_clip_train.train").train_one_epoch
    except ImportError:
        return None
    loss, optimizer = import_module("open_clip.loss").ClipLoss(), torch.optim.SGD(model.parameters(), lr=0.0)
    loader: Any = list(zip(*(one.split(_SIZE) for one in batch), strict=True))
    dataloader = type("Loader", (list,), {"num_batches": _PARTS, "num_samples": _SAMPLES})(loader)
    data = {"train": SimpleNamespace(dataloader=dataloader, set_epoch=lambda _: None)}
    arguments = SimpleNamespace(
        device="cpu", precision="fp32", distill=False, accum_freq=_PARTS, skip_scheduler=True, horovod=False,
        grad_clip_norm=None, rank=0, local_rank=0, world_size=1, log_local=False, log_every_n_steps=1,
        batch_size=_SIZE, wandb=False, save_logs=False,
    )  # fmt: skip
    return lambda: run(model, data, loss, 0, optimizer, None, None, None, arguments)


def join_in_one_graph(model: Clip, batch: Pair) -> None:
    """The whole batch that is right: one graph, in the order in which the micro-batches draw."""
    parts = [model(*part) for part in zip(*(one.split(_SIZE) for one in batch), strict=True)]
    compare(
        model, [torch.cat([part[name] for part in parts]) for name in ("image_features", "text_features")]
    ).backward()


def measure_all(prepare: Callable[[Clip, Pair], Accumulate | None]) -> list[str]:
    """Return both numbers of ``measure_apart``, without dropout and with it, as a table shows them."""
    found = [measure_apart(prepare, dropout) for dropout in (0.0, 0.1)]
    return [shown for towers, temperature in found for shown in (f"{towers:.0e}", f"{temperature:.3f}")]


def measure_apart(prepare: Callable[[Clip, Pair], Accumulate | None], dropout: float) -> tuple[float, float]:
    """Return how far the towers' gradient is from that of the whole batch; and the temperature's, as a ratio to it."""
    model, batch = make(dropout, torch.float64)
    accumulate = prepare(model, batch)
    assert accumulate is not None  # noqa: S101 - narrows for mypy
    torch.manual_seed(1)
    accumulate()
    found: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    join_in_one_graph(model, batch)
    right: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    towers = [name for name in right if name != "logit_scale"]
    apart = sum(float((found[name] - right[name]).square().sum()) for name in towers)
    whole = sum(float(right[name].square().sum()) for name in towers)
    return (apart / whole) ** 0.5, float(found["logit_scale"] / right["logit_scale"])


def measure(pairs: int = 6) -> Table:
    """Time and compare two ways to run a step; ``pairs`` is how often they are timed in turn."""
    logging.getLogger().setLevel(logging.WARNING)
    model, batch = make(0.1, torch.float32)
    own, its, ratio = bind(model, batch), train(model, batch), "-"
    if its is not None:
        with undisturbed():
            timed = pair_up(its, own, pairs + 2)[2:]
        ratio = f"{statistics.median(mine / theirs for theirs, mine in timed):.2f}"
    rows = [(f"WholeBatch, micro-batches of {_SIZE}", *measure_all(bind), ratio)]
    name = f"open_clip, accum_freq={_PARTS}, batches of {_SIZE}"
    rows.append((name, *measure_all(train), "1") if its is not None else (name, "not installed", "", "", "", ""))
    apart, _ = measure_apart(bind, 0.0)
    return Table(
        "A CLIP loss beside open_clip's accum_freq",
        f"{_SAMPLES} pairs through two small transformers and a trained temperature. The gradient in float64 is "
        "compared with that of one graph over all samples, in which each micro-batch draws as it does in the step: of "
        "the towers the relative error, of the temperature the ratio to the right one (1 is right). Times are in "
        f"float32, as multiples of open_clip's own loop, with dropout. open_clip {_version()}.",
        ("way", "towers apart", "temperature", "towers, dropout", "temperature, dropout", "time"),
        rows,
        [
            Goal(
                "gradient of a CLIP loss in micro-batches, relative error without dropout",
                f"at most {_NEAR:.0e}",
                f"{apart:.0e}",
                judge(apart <= _NEAR),
            )
        ],
    )


def _version() -> str:
    try:
        return metadata.version("open_clip_torch")
    except metadata.PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure())
