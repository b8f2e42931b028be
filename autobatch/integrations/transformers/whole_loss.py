"""Runs losses of sentence-transformers that compare samples over the whole batch, as the two parts of a ``WholeBatch``.

Such a loss embeds a batch in ``forward`` and compares the embeddings in ``compute_loss_from_embeddings``. Each part
runs within the Trainer's own ``training_step``, with its autocast and device; the other part is replaced.

On several ranks the library compares the samples of each rank alone. With ``gather_across_devices=True`` it compares
those of all ranks, and so does the loss of all ranks' rows in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from autobatch.integrations.attributes import replaced
from autobatch.step.whole_batch import PerRank, WholeBatch

_COMPARING = frozenset(
    (
        *("MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss", "CoSENTLoss", "AnglELoss"),
        *("BatchAllTripletLoss", "BatchHardTripletLoss", "BatchHardSoftMarginTripletLoss", "BatchSemiHardTripletLoss"),
    )
)
_CACHED = frozenset(("CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss"))
_COMPARE = "compute_loss_from_embeddings"
_GATHER = "gather_across_devices"


class WholeLoss:
    """A loss that compares the embeddings of a whole batch.

    Attributes:
        kind: The step that runs it: over the samples of each rank, or over those of all.
    """

    def __init__(self, trainer: Any, loss: nn.Module, loss_of: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        """``loss_of`` runs the Trainer's own step on a batch up to its loss."""
        self._trainer, self._loss, self._loss_of = trainer, loss, loss_of
        self.kind: type[WholeBatch] = WholeBatch if getattr(loss, _GATHER, False) else PerRank

    def represent(self, model: nn.Module, inputs: Any) -> list[torch.Tensor]:
        """Return the embeddings of a micro-batch, one tensor a column."""
        found: list[torch.Tensor] = []

        def note(embeddings: list[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
            found.extend(embeddings)
            return embeddings[0].sum()  # the Trainer's step needs a loss

        with replaced(self._trainer, "loss", self._loss), replaced(self._loss, _COMPARE, note):
            self._loss_of(model, inputs)
        return found

    def compare(self, embeddings: list[torch.Tensor], inputs: Any) -> torch.Tensor:
        """Return the loss of all embeddings; ``inputs`` is the whole batch, of which only labels are read."""
        compare = getattr(self._loss, _COMPARE)

        def forward(_: Any, labels: Any) -> torch.Tensor:
            loss: torch.Tensor = compare(embeddings, labels)
            return loss

        with ExitStack() as stack:
            stack.enter_context(replaced(self._trainer, "loss", self._loss))
            stack.enter_context(replaced(self._loss, "forward", forward))
            if self.kind is WholeBatch:
                stack.enter_context(replaced(self._loss, _GATHER, value=False))  # the rows are those of all ranks
            return self._loss_of(self._trainer.model, inputs)


def find_whole_loss(trainer: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor]) -> WholeLoss | None:
    """Return the Trainer's loss if it is known to compare samples; else ``None``."""
    loss = getattr(trainer, "loss", None)
    is_known = type(loss).__module__.startswith("sentence_transformers.")
    if not isinstance(loss, nn.Module) or not is_known or type(loss).__name__ not in _COMPARING | _CACHED:
        return None
    inner: Any = loss.loss if type(loss).__name__ in _CACHED else loss
    return WholeLoss(trainer, inner, loss_of)
