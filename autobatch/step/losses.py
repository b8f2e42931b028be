"""Defines what a step may return: a loss, or several, each with what it is a mean over.

Covers ``Mean``, ``Sum`` and ``PerStep``, which state what a bare tensor leaves open, and how terms are read
from what a step returned. Does not cover how terms of many micro-batches are divided (``training.loss_denominators``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autobatch.errors import InvalidStep
from autobatch.state.gradients import NARROW
from autobatch.step.weights import read_count

__all__ = ["Mean", "PerStep", "Sum", "Term", "read_terms", "states_counts"]


@dataclass(frozen=True, eq=False)
class Mean:
    """A loss that has been divided by ``over``: the mean over so many samples, tokens or weights.

    A micro-batch whose count is 0 has no mean, whatever ``loss`` is (usually nan): it is left out.

    Example:
        >>> return autobatch.Mean(cross_entropy(logits, labels), over=(labels != -100).sum())  # doctest: +SKIP

    Attributes:
        loss: A tensor of one element, any floating dtype.
        over: A number, or a tensor of one element. It is read before the backward pass, so one that lies on a GPU makes
            the host wait; a number, a CPU tensor, or counting by ``weigh=`` does not.
    """

    loss: torch.Tensor
    over: float | torch.Tensor


@dataclass(frozen=True, eq=False)
class Sum:
    """A loss that has not been divided: the sum over ``count`` samples, tokens or weights.

    Attributes:
        loss: A tensor of one element, any floating dtype.
        count: As ``Mean.over``. The update divides by the sum of all counts of the step.
    """

    loss: torch.Tensor
    count: float | torch.Tensor


@dataclass(frozen=True, eq=False)
class PerStep:
    """A term that counts once an optimizer step, in however many micro-batches: a regulariser of the parameters.

    Attributes:
        loss: A tensor of one element. It must not depend on the samples: of those that do, the mean over the
            micro-batches would be taken.
    """

    loss: torch.Tensor


@dataclass(eq=False)
class Term:
    """One loss of one micro-batch, read.

    Attributes:
        name: Its key, or ``""`` for a step that returns one loss.
        loss: 0-dim, with a graph.
        kind: What it is: the mean over its count, the sum, or a term that counts once a step.
        count: What the step states; ``None`` where ``weigh`` or the number of samples says it.
        is_narrow: Whether the loss is bfloat16 or float16, so that its gradient rounds whatever it is multiplied by.
    """

    name: str
    loss: torch.Tensor
    kind: Literal["mean", "sum", "per step"] = "mean"
    count: float | None = None
    is_narrow: bool = False

    def divide(self, count: float, total: float) -> torch.Tensor:
        """This term's part of the mean over ``total``, of which it covers ``count``."""
        factor = 1 / total if self.kind == "sum" else count / total
        return (self.loss.float() if self.is_narrow else self.loss) * factor

    def multiply(self, factor: float) -> torch.Tensor:
        """The loss times a factor; in float32 where it is narrower, since a third in bfloat16 is off by 0.1 %."""
        return (self.loss.float() if self.is_narrow else self.loss) * factor


def read_terms(returned: Any) -> tuple[Term, ...]:
    """The terms of a step's loss: one, or one an entry of a mapping.

    Raises:
        InvalidStep: A loss is no tensor, has more than one element or no graph, or its count is none.
    """
    if not isinstance(returned, Mapping):
        return (_read_term("", returned),)
    if not returned:
        raise InvalidStep("step() returned an empty dict: it must hold the step's losses")
    return tuple(_read_term(str(name), loss) for name, loss in returned.items())


def _read_term(name: str, returned: Any) -> Term:
    if isinstance(returned, Mean):
        return _make_term(name, returned.loss, "mean", read_count(returned.over, _argument_of(name, "Mean(over=)")))
    if isinstance(returned, Sum):
        return _make_term(name, returned.loss, "sum", read_count(returned.count, _argument_of(name, "Sum(count=)")))
    if isinstance(returned, PerStep):
        return _make_term(name, returned.loss, "per step", None)
    return _make_term(name, returned, "mean", None)


def _argument_of(name: str, argument: str) -> str:
    return f"{argument} of the term {name!r}" if name else argument


def _make_term(name: str, loss: Any, kind: Literal["mean", "sum", "per step"], count: float | None) -> Term:
    what = f"the term {name!r} of step()" if name else "step()"
    if not isinstance(loss, torch.Tensor):
        raise InvalidStep(
            f"{what} returned {type(loss).__name__}; it must return a scalar tensor, the mean loss, or (loss, aux)"
        )
    if loss.numel() != 1:
        raise InvalidStep(
            f"{what} returned a loss of shape {tuple(loss.shape)}; take its mean first: a scalar is needed; "
            f"what is no loss goes beside it, as (loss, aux)"
        )
    if loss.is_complex():
        raise InvalidStep(f"{what} returned a complex loss; a real one is needed, such as its abs() or its real part")
    if not loss.requires_grad and count != 0:
        raise InvalidStep(
            f"{what} returned a loss without a graph (detached, under no_grad, or every parameter is frozen)"
            + ("; what is no loss goes beside it: return (losses, aux)" if name else "")
        )
    return Term(name, loss.reshape(()), kind, count, loss.dtype in NARROW)


def states_counts(returned: Any) -> bool:
    """Whether a step says itself, in a loss that it returned, what that loss was divided by."""
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    terms = loss.values() if isinstance(loss, Mapping) else (loss,)
    return any(isinstance(term, Mean | Sum) for term in terms)
