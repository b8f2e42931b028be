"""Gathers representations over the ranks for a loss of all rows, and lets all ranks run such a step again, or none.

1. ``gather``: each rank sends its rows, through host memory.
2. Each rank runs the loss forward and backward: the whole loss, or its part, which states a count.
3. ``share_loss``: parts are added up, and each rank gets the gradient of its rows from the parts of all.
4. Each rank runs its own second pass.
5. ``confirm``: if one rank ran out of memory in 2 to 4, all run the step again: smaller micro-batches draw other
   numbers, so that rank's rows change.

A rank that runs out of memory before 1 runs again alone. A rank that raises sends its error to the ranks that wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import fsum, prod
from typing import Any

import torch

from autobatch.distributed.agreement import Agreement
from autobatch.distributed.ranks import Ranks
from autobatch.undo.gradients import NARROW
from autobatch.undo.interrupts import deferred_interrupts

_LOG = logging.getLogger("autobatch")

Rows = Sequence["torch.Tensor | None"]
"""One tensor for each representation, or ``None``."""


class SharedRows:
    """The representations of one step, on every rank.

    Attributes:
        size: Number of ranks.
        is_gathered: Whether the other ranks wait for ``confirm``.
        own: This rank's rows among those of all ranks, once they are gathered.
    """

    def __init__(self, ranks: Ranks, agreement: Agreement) -> None:
        """Send nothing yet."""
        self.size, self.is_gathered, self.own = ranks.size, False, slice(0)
        self._rank, self._channel, self._agreement = ranks.rank, ranks.channel, agreement
        self._rows: Rows = ()  # this rank's, with their graph
        self._parts: list[Rows] = []  # leaves, by rank
        self._has_named = False

    def gather(self, own: Rows, shown: str, nest: str) -> list[Rows]:
        """Return the representations of each rank, by rank, without a graph; ``shown`` is for a message."""
        mine = [None if one is None else one.detach().cpu().contiguous() for one in own]
        trained = [its for one, its in zip(own, mine, strict=True) if one is not None and one.requires_grad]
        rows = next((len(one) for one in mine if one is not None), 0)
        numbers = {"rows": rows, "finite": _are_finite(trained)}
        sent = self._agreement.gather("representations", numbers, shown=shown, nest=nest)
        listed = self._agreement.list_unlike({rank: one["shown"] for rank, one in enumerate(sent)})
        self._agreement.refuse_unlike(
            [(one["shown"], one["nest"]) for one in sent],
            f"represent() returned unlike representations on different ranks ({listed}): return rows of one shape and "
            f"dtype, in the same containers",
        )
        self._name_infinite("represent() returned", sent)
        counts = [int(one["rows"]) for one in sent]
        self.is_gathered, self._rows = True, own
        self.own = slice(sum(counts[: self._rank]), sum(counts[: self._rank + 1]))
        columns = [
            [None] * self.size if one is None or home is None else self._exchange(one, counts, home)
            for one, home in zip(mine, own, strict=True)
        ]
        self._parts = [*zip(*columns, strict=True)]
        return self._parts

    def share_loss(self, count: float | None) -> float | None:
        """Begin the backward pass of this rank's rows; return this rank's part of the gradients that its loss has made.

        Args:
            count: Count that this rank's part of the loss states; ``None``: each rank has run the whole loss.

        Returns:
            ``None`` if another rank ran out of memory in the loss.
        """
        if count is None:
            return self._begin_backward([_gradient(one) for one in self._parts[self._rank]], 1 / self.size)
        wholes = [self._join_gradients(column) for column in zip(*self._parts, strict=True)]
        with deferred_interrupts():  # the other ranks wait in the sums
            counts = self._answer(is_done=True, count=count, is_finite=_are_finite(wholes))
            if counts is None:
                return None
            factor = count / fsum(counts)
            for one in wholes:
                if one is not None:
                    self._channel.sum(one, factor)
        return self._begin_backward([None if one is None else one[self.own] for one in wholes], factor)

    def confirm(self, *, is_done: bool) -> bool:
        """Return whether every rank has done its second pass."""
        is_done = self._answer(is_done=is_done) is not None
        self.is_gathered, self._rows, self._parts = False, (), []
        return is_done

    def _answer(self, *, is_done: bool, count: float | None = None, is_finite: bool = True) -> list[float] | None:
        """Return the counts of all ranks; ``None`` if one ran out of memory."""
        kind = "whole" if count is None else "part"
        numbers = {"count": count or 0.0, "finite": is_finite}
        answers = self._agreement.gather("loss", numbers, kind=kind if is_done else None)
        if any(one["kind"] is None for one in answers):
            self.is_gathered = False
            return None
        states = {rank: "a count" if one["kind"] == "part" else "no count" for rank, one in enumerate(answers)}
        self._agreement.refuse_unlike(
            [*states.values()],
            f"the loss of WholeBatch states a count (Mean, Sum) on some ranks only "
            f"({self._agreement.list_unlike(states)}): always return it",
        )
        self._name_infinite("the loss of WholeBatch has gradients with", answers)
        return [one["count"] for one in answers]

    def _name_infinite(self, what: str, sent: Sequence[dict[str, Any]]) -> None:
        """Name the ranks with nan or infinity on rank 0, once a step: all ranks get it in their gradients."""
        ranks = {rank: f"{what} nan or infinity" for rank, one in enumerate(sent) if not one["finite"]}
        if ranks and not self._has_named and self._rank == 0:
            _LOG.warning(
                "%s; the loss compares rows of all ranks, so all get a gradient that is not finite, as in any step: "
                "a GradScaler skips the update, and without one parameters become nan",
                self._channel.list_by_rank(ranks),
            )
        self._has_named = self._has_named or bool(ranks)

    def _begin_backward(self, gradients: Rows, factor: float) -> float:
        pairs = [*zip(self._rows, gradients, strict=True)]
        found = [(one, its) for one, its in pairs if one is not None and its is not None]
        torch.autograd.backward([one for one, _ in found], [its.to(one) for one, its in found])
        self._rows, self._parts = (), []
        return factor

    def _join_gradients(self, column: Rows) -> torch.Tensor | None:
        """Return a representation's gradients in this rank's part of the loss, on the host; zeros where it has none."""
        rows = [one for one in column if one is not None and one.requires_grad]
        made = [one.new_zeros(one.shape) if one.grad is None else one.grad for one in rows]
        wide = [one.detach().cpu().float() if one.dtype in NARROW else one.detach().cpu() for one in made]
        return torch.cat(wide) if wide else None

    def _exchange(self, mine: torch.Tensor, counts: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
        size = mine.element_size() * prod(mine.shape[1:])
        received = self._channel.gather_bytes(mine.reshape(-1).view(torch.uint8), [count * size for count in counts])
        parts = zip(received, counts, strict=True)
        return [
            part.view(mine.dtype).reshape(count, *mine.shape[1:]).to(like.device).requires_grad_(like.requires_grad)
            for part, count in parts
        ]


def _are_finite(tensors: Rows) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors if one is not None)


def _gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.grad
