"""What a contrastive loss over the whole batch costs and how exact it is, beside sentence-transformers' cached loss.

    python benchmarks/contrastive.py

One step of a small transformer on pairs of texts, in micro-batches, on one CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from typing import Any

import torch
from quiet import undisturbed
from runner import pair_up
from tables import Goal, Table, judge
from torch import nn
from torch.nn import functional as F

import autobatch

_SAMPLES, _SIZE, _LENGTH, _WORDS = 32, 8, 16, 500
_MOST = 1.6  # times as long as plain accumulation in the same micro-batches

Batch = tuple[torch.Tensor, torch.Tensor]
Accumulate = Callable[[], object]


class Encoder(nn.Module):
    """A small transformer; its call is that of a module of sentence-transformers."""

    def __init__(self, dropout: float, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return one vector a text."""
        return self.layers(self.words(ids)).mean(1)

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        """Add the vectors to the features."""
        return {**features, "sentence_embedding": self.embed(features["input_ids"])}


def represent(model: Encoder, batch: Batch) -> list[torch.Tensor]:
    """Return the vectors of the first texts, and of the second ones."""
    return [model.embed(ids) for ids in batch]


def rank(embeddings: Sequence[torch.Tensor], _: Any = None) -> torch.Tensor:
    """The loss of MultipleNegativesRankingLoss."""
    anchors, others = (F.normalize(one, dim=-1) for one in embeddings)
    return F.cross_entropy(20 * anchors @ others.T, torch.arange(len(anchors)))


def compare_pairs(model: Encoder, batch: Batch) -> torch.Tensor:
    """A loss that is a mean over samples, for plain accumulation on the same model."""
    anchors, others = represent(model, batch)
    return (1 - F.cosine_similarity(anchors, others)).mean()


def make(dropout: float, dtype: torch.dtype) -> tuple[Encoder, Batch]:
    """Make a model, and pairs of texts."""
    torch.manual_seed(0)
    model = Encoder(dropout).to(dtype)
    first, second = torch.randint(_WORDS, (2, _SAMPLES, _LENGTH))
    return model, (first, second)


def bind(model: nn.Module, batch: Batch, step: Any, size: int) -> Accumulate:
    """Return what accumulates a batch in micro-batches of this size."""
    options = {"max_micro_batch": size, "check": None, "reuse": False, "progress": False}
    with undisturbed():
        plan = autobatch.fit(model, _SAMPLES, batch=batch, step=step, **options)
    runner = autobatch.Runner(plan, model, step=step, optimizer=None)
    return lambda: _run_fresh(model, lambda: runner.accumulate(batch))


def cache(model: Encoder, batch: Batch) -> Accumulate | None:
    """CachedMultipleNegativesRankingLoss, if sentence-transformers is installed."""
    try:
        library = import_module("sentence_transformers")
        losses = import_module("sentence_transformers.sentence_transformer.losses")
    except ImportError:
        return None
    loss = losses.CachedMultipleNegativesRankingLoss(
        library.SentenceTransformer(modules=[model], device="cpu").train(), mini_batch_size=_SIZE
    )
    texts = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batch]
    return lambda: _run_fresh(model, lambda: loss([{**one} for one in texts], torch.empty(0)).backward())


def _run_fresh(model: nn.Module, action: Accumulate) -> None:
    model.zero_grad(set_to_none=True)
    action()


def join_in_one_graph(model: Encoder, batch: Batch, *, by_column: bool) -> None:
    """The whole batch that is right: one graph, in the order in which the micro-batches draw."""
    parts = [[ids[row : row + _SIZE] for ids in batch] for row in range(0, _SAMPLES, _SIZE)]
    columns: Iterator[list[torch.Tensor]] = zip(*parts, strict=True)  # type: ignore[assignment]
    if by_column:
        embedded = [[model.embed(one) for one in column] for column in columns]
    else:
        embedded = [*zip(*[[model.embed(one) for one in part] for part in parts], strict=True)]
    rank([torch.cat([*column]) for column in embedded]).backward()


def measure_apart(prepare: Callable[[Encoder, Batch], Accumulate | None], dropout: float, *, by_column: bool) -> str:
    """Return how far a gradient in float64 is from that of its own whole batch."""
    model, batch = make(dropout, torch.float64)
    accumulate = prepare(model, batch)
    if accumulate is None:
        return "-"
    torch.manual_seed(1)
    accumulate()
    found = [one.grad for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    join_in_one_graph(model, batch, by_column=by_column)
    pairs = [(one, p.grad) for one, p in zip(found, model.parameters(), strict=True)]
    apart = sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)
    return f"{apart**0.5:.0e}"


def measure(pairs: int = 6) -> Table:
    """Time and compare three ways to run a step; ``pairs`` is how often each is timed beside plain accumulation."""
    step = autobatch.WholeBatch(represent, rank)
    ways: dict[str, tuple[Callable[[Encoder, Batch], Accumulate | None], bool]] = {
        f"WholeBatch, micro-batches of {_SIZE}": (lambda model, batch: bind(model, batch, step, _SIZE), False),
        "WholeBatch, the whole batch at once": (lambda model, batch: bind(model, batch, step, _SAMPLES), False),
        f"CachedMultipleNegativesRankingLoss, mini-batches of {_SIZE}": (cache, True),
    }
    model, batch = make(0.1, torch.float32)
    plain, rows, ratios = bind(model, batch, compare_pairs, _SIZE), [], []
    for name, (prepare, by_column) in ways.items():
        accumulate = prepare(model, batch)
        if accumulate is None:
            rows.append((name, "not installed", "", ""))
            continue
        with undisturbed():
            timed = pair_up(plain, accumulate, pairs + 2)[2:]
        ratios.append(statistics.median(mine / its for its, mine in timed))
        whole = "at once" in name  # its draws are those of the whole batch, not of parts
        apart = [measure_apart(prepare, dropout, by_column=by_column) for dropout in ((0.0,) if whole else (0.0, 0.1))]
        rows.append((name, *apart, *(("-",) if whole else ()), f"{ratios[-1]:.2f}"))
    return Table(
        "A contrastive loss over the whole batch",
        f"{_SAMPLES} pairs of texts through a small transformer. The gradient in float64 is compared with that of one "
        "graph over all samples, without dropout and with it; with dropout each way has the draws of its own order. "
        f"Times are in float32, as multiples of plain accumulation in micro-batches of {_SIZE} with a loss that is a "
        f"mean over samples. sentence-transformers {_version()}.",
        ("way", "gradient apart", "with dropout", "time"),
        rows,
        [
            Goal(
                "time of a WholeBatch step, beside plain accumulation",
                f"at most {_MOST}",
                f"{ratios[0]:.2f}",
                judge(ratios[0] <= _MOST),
            )
        ],
    )


def _version() -> str:
    try:
        return metadata.version("sentence-transformers")
    except metadata.PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure())
