"""Defines a step whose loss is over the whole batch, such as a contrastive one, and reads what its functions return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from autobatch._formatting import name_type, show_value
from autobatch.errors import InvalidArgument
from autobatch.step.losses import Mean, PerStep, Sum, read_terms


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
            belongs to sample i of the batch. The batch stays on the device on which it was passed.
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


class NoBatch:
    """In place of the batch, on several ranks: each has its own samples, and the loss is over the rows of all."""

    def __getattr__(self, name: str) -> Any:
        """Raise InvalidArgument, as any use of it."""
        raise InvalidArgument(
            "the loss of WholeBatch reads its batch, and each of several ranks has another one: return what the loss "
            "needs, such as labels, from represent(), a row a sample"
        )

    def __getitem__(self, key: Any) -> Any:
        """Raise InvalidArgument."""
        return self.__getattr__("")

    __len__ = __iter__ = __call__ = __getitem__


def refuse_sharded(step: Any) -> None:
    """Raise InvalidArgument for a ``WholeBatch`` whose model has sharded parameters."""
    if isinstance(step, WholeBatch):
        raise InvalidArgument(
            "WholeBatch does not run with fully_shard: use DistributedDataParallel, or train on one rank"
        )


def read_loss(returned: Any) -> torch.Tensor:
    """Return the loss of a whole batch, in at least float32; raise InvalidArgument for one with counts or terms."""
    if not isinstance(returned, torch.Tensor):
        of_count = isinstance(returned, Mean | Sum | PerStep)
        raise InvalidArgument(
            f"the loss of WholeBatch returned {type(returned).__name__}: it must return one scalar tensor, or (loss, "
            f"aux){'; it is over the whole batch already, so nothing is counted' if of_count else ''}"
        )
    [term] = read_terms(returned)
    return term.divide(1.0, 1.0)


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
