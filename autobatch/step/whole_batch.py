"""Defines a step whose loss is over the whole batch, such as a contrastive one, and reads what its functions return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autobatch._formatting import name_type, show_value
from autobatch.errors import InvalidArgument
from autobatch.step.losses import Mean, Sum, read_terms


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """A step whose loss is over the whole batch: in-batch negatives, or another loss that no weighing makes exact.

    Pass it as ``step=``. Each micro-batch is represented twice (GradCache, Gao et al. 2021): first for the loss of all
    representations, without keeping its graph, and again for its part of the gradient. A batch that fits whole is
    represented once.

    Example:
        >>> step = autobatch.WholeBatch(represent, loss)  # doctest: +SKIP
        >>> runner = autobatch.Runner.fit(model, 4096, batch=batch, step=step, optimizer=optimizer)  # doctest: +SKIP

    Attributes:
        represent: ``represent(model, micro_batch)``: a tensor with a row a sample, or tuples, lists and dicts of such.
        loss: ``loss(representations, batch)``: one scalar tensor, or ``(loss, aux)``. Row i of each representation
            belongs to sample i of the batch. The batch stays on the device on which it was passed. On several ranks
            the rows are those of all, and ``batch.own_rows`` is the slice of this rank's. A loss that returns ``Mean``
            or ``Sum`` is this rank's part, and parts are added up as in any step.
    """

    represent: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a part that cannot be called."""
        for name, part, call in (
            ("represent", self.represent, "represent(model, micro_batch)"),
            ("loss", self.loss, "loss(representations, batch)"),
        ):
            if not callable(part):
                shown = show_value(part) if isinstance(part, str | int | float | None) else name_type(part)
                raise InvalidArgument(f"WholeBatch({name}={shown}) cannot be called: pass {call}")

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a batch that runs whole."""
        returned = self.loss(self.represent(model, batch), batch)
        read_loss(returned[0] if isinstance(returned, tuple) and returned else returned)
        return returned


class PerRank(WholeBatch):
    """A ``WholeBatch`` of the samples of each rank alone; the step's loss is the mean of the ranks' losses."""


class RankBatch:
    """In place of the batch, on several ranks: each has its own samples, and the loss is over the rows of all.

    Attributes:
        own_rows: Slice of this rank's rows among those of all ranks.
    """

    def __init__(self, own_rows: slice, read_own: Callable[[], Any]) -> None:
        """``read_own`` returns this rank's batch."""
        self.own_rows, self.read_own = own_rows, read_own

    def _refuse(self, *_: Any) -> Any:
        """Raise InvalidArgument for any other use of it."""
        raise InvalidArgument(
            "the loss of WholeBatch reads its batch, and each of several ranks has another one: return what the loss "
            "needs, such as labels, from represent(), a row a sample"
        )

    __getattr__ = __getitem__ = __len__ = __iter__ = __call__ = __bool__ = _refuse
    # A loss that asks isinstance() would run another way than on one rank.
    __class__ = property(_refuse)


def refuse_sharded(step: Any) -> None:
    """Raise InvalidArgument for a ``WholeBatch`` whose model has sharded parameters."""
    if isinstance(step, WholeBatch):
        raise InvalidArgument(
            "WholeBatch does not run with fully_shard: use DistributedDataParallel, or train on one rank"
        )


def read_loss(returned: Any) -> tuple[torch.Tensor, float | None]:
    """Return the loss of a whole batch, in at least float32, and the count that it states; refuse one with terms."""
    if not isinstance(returned, torch.Tensor | Mean | Sum):
        raise InvalidArgument(
            f"the loss of WholeBatch returned {type(returned).__name__}: it must return one scalar tensor, Mean or "
            f"Sum, or (loss, aux)"
        )
    [term] = read_terms(returned)
    if term.count == 0:
        raise InvalidArgument("the loss of WholeBatch states a count of 0: count the samples that it compares")
    count = 1.0 if term.count is None else term.count
    return term.divide(count, count), term.count


def read_rows(returned: Any, samples: int) -> tuple[list[torch.Tensor | None], TreeSpec]:
    """Return the tensors of the representations of so many samples, and their nest; raise InvalidArgument without rows.

    ``None`` may be among them.
    """
    found, nest = tree_flatten(returned)
    for one in found:
        if one is not None and not isinstance(one, torch.Tensor):
            raise InvalidArgument(
                f"represent() returned {name_type(one)}: return a tensor with a row a sample, or tuples, lists and "
                f"dicts of such"
            )
        if one is not None and one.shape[:1] != (samples,):
            raise InvalidArgument(
                f"represent() returned a tensor of shape {tuple(one.shape)} for {samples} samples: each needs a row a "
                f"sample; return two views as two tensors, and read values such as a scale in the loss"
            )
    if not any(isinstance(one, torch.Tensor) for one in found):
        raise InvalidArgument(f"represent() returned no tensor ({name_type(returned)}): return one with a row a sample")
    return found, nest


class _Shown(str):
    """A text that its containers show without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def show_rows(found: Sequence[torch.Tensor | None], nest: TreeSpec) -> str:
    """Show representations in their containers, in one line."""
    shown = [
        None
        if one is None
        else _Shown(f"rows of {tuple(one.shape[1:])} {one.dtype}{'' if one.requires_grad else ' without a graph'}")
        for one in found
    ]
    return " ".join(repr(tree_unflatten(shown, nest)).split())
