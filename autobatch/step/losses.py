"""Defines the losses that a step may return, and reads them, their counts and the results of ``weigh``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autobatch.errors import InvalidArgument
from autobatch.undo.gradients import NARROW

Weigh = Callable[[Any], "float | torch.Tensor | Mapping[str, float | torch.Tensor]"]
_LARGEST_COUNT = 1e100  # largest count of a micro-batch, so that no sum of counts is infinite
_Kind = Literal["mean", "sum", "per step"]


@dataclass(frozen=True, eq=False)
class Mean:
    """A loss that has been divided by ``count``: the mean over so many samples, tokens or weights.

    A micro-batch whose count is 0 has no mean, whatever ``loss`` is (usually nan): it is left out.

    Example:
        >>> return autobatch.Mean(cross_entropy(logits, labels), count=(labels != -100).sum())  # doctest: +SKIP

    Attributes:
        loss: A tensor of one element, any floating dtype.
        count: A number, or a tensor of one element. It is read before the backward pass, so a tensor on a GPU makes the
            host wait. A number, a CPU tensor, or counting by ``weigh=`` does not.
    """

    loss: torch.Tensor
    count: float | torch.Tensor


@dataclass(frozen=True, eq=False)
class Sum:
    """A loss that has not been divided: the sum over ``count`` samples, tokens or weights.

    Attributes:
        loss: A tensor of one element, any floating dtype.
        count: As in ``Mean``. The update divides by the sum of all counts of the step. If ``loss`` has been divided by
            the whole step's count already, state the micro-batch's share of the step's samples: shares add up to 1.
    """

    loss: torch.Tensor
    count: float | torch.Tensor


@dataclass(frozen=True, eq=False)
class PerStep:
    """A term that counts once an optimizer step, for any number of micro-batches: a regulariser of the parameters.

    Attributes:
        loss: A tensor of one element. It must not depend on the samples, or it becomes a mean over the micro-batches.
    """

    loss: torch.Tensor


@dataclass(eq=False)
class Term:
    """One loss of one micro-batch, read.

    Attributes:
        name: Its key, or ``""`` for a step that returns one loss.
        loss: 0-dim, with a graph.
        count: Count that the step states; ``None`` if ``weigh`` or the number of samples gives it.
        is_narrow: Whether the loss is bfloat16 or float16.
    """

    name: str
    loss: torch.Tensor
    kind: _Kind = "mean"
    count: float | None = None
    is_narrow: bool = False

    def divide(self, count: float, total: float) -> torch.Tensor:
        """Return this term's part of the step's loss: its micro-batch covers ``count`` of ``total``.

        A narrow loss becomes float32 first, since a third in bfloat16 is off by 0.1 %.
        """
        factor = 1 / total if self.kind == "sum" else count / total
        return (self.loss.float() if self.is_narrow else self.loss) * factor

    @property
    def has_count(self) -> bool:
        """Whether it is divided by a total, so that its count matters."""
        return self.kind != "per step"


def read_terms(returned: Any) -> tuple[Term, ...]:
    """Read the terms of a step's loss: one, or one for each entry of a mapping; raise InvalidArgument for others."""
    if not isinstance(returned, Mapping):
        return (_read_term("", returned),)
    if not returned:
        raise InvalidArgument("the step returned an empty dict: it must hold the step's losses")
    return tuple(_read_term(str(name), loss) for name, loss in returned.items())


def _read_term(name: str, returned: Any) -> Term:
    what, of_term = (f"the term {name!r} of the step", f" of the term {name!r}") if name else ("the step", "")
    kind: _Kind = "sum" if isinstance(returned, Sum) else "per step" if isinstance(returned, PerStep) else "mean"
    loss = returned.loss if isinstance(returned, Mean | Sum | PerStep) else returned
    count = None
    if isinstance(returned, Mean | Sum):
        count = _read_count(returned.count, f"{type(returned).__name__}(count=){of_term} is")
    if loss is None:
        raise InvalidArgument(
            f"{what} returned None; to skip a bad batch return autobatch.Sum(torch.zeros(()), 0), which counts for "
            f"nothing, and state the count of the others with autobatch.Mean or Sum"
        )
    if not isinstance(loss, torch.Tensor):
        raise InvalidArgument(
            f"{what} returned {type(loss).__name__}; it must return a scalar tensor, the mean loss, or (loss, aux)"
        )
    if loss.numel() != 1:
        raise InvalidArgument(
            f"{what} returned a loss of shape {tuple(loss.shape)}; take its mean first: a scalar is needed; "
            f"other values go beside it, as (loss, aux)"
        )
    if loss.is_complex():
        raise InvalidArgument(
            f"{what} returned a complex loss; a real one is needed, such as its abs() or its real part"
        )
    if not loss.requires_grad and count != 0:
        is_inference = torch.is_inference_mode_enabled() or loss.is_inference()
        off = "torch.inference_mode() is on, in which none is made"
        why = off if is_inference else "detached, under no_grad, or every parameter is frozen"
        beside = "; other values go beside it: return (losses, aux)" if name else ""
        raise InvalidArgument(f"{what} returned a loss without a graph ({why}){beside}")
    return Term(name, loss.reshape(()), kind, count, loss.dtype in NARROW)


def losses_of(returned: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a step's loss by term; read no count, and refuse nothing."""
    terms = returned if isinstance(returned, Mapping) else {"": returned}
    losses = {str(name): term.loss if isinstance(term, Mean | Sum | PerStep) else term for name, term in terms.items()}
    return {name: loss for name, loss in losses.items() if isinstance(loss, torch.Tensor)}


def counts_of(returned: Any) -> dict[str, float]:
    """Return the counts that a step states for its losses, by term; raise InvalidArgument for an unusable count."""
    terms = returned if isinstance(returned, Mapping) else {"": returned}
    stated = {str(name): term for name, term in terms.items() if isinstance(term, Mean | Sum)}
    return {name: _read_count(term.count, f"{type(term).__name__}(count=) is") for name, term in stated.items()}


def read_weights(returned: Any, samples: int) -> dict[str, float]:
    """Read the result of ``weigh`` for a micro-batch, by term; the key ``""`` means every term."""
    must, size = "it must return one number, or a dict of them by term", f"a micro-batch of {samples}"
    if not isinstance(returned, Mapping):
        return {"": _read_count(returned, f"weigh() for {size} gave", must)}
    if not returned:
        raise InvalidArgument("weigh() returned an empty dict: it must name the step's terms, or return one number")
    terms = [(str(name), value, f"weigh() for {name!r} in {size} gave") for name, value in returned.items()]
    return {name: _read_count(value, given, must) for name, value, given in terms}


def _read_count(value: Any, given: str, must: str = "it must be one number") -> float:
    count = _read_number(value)
    if count is None:
        shape = f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, torch.Tensor) else ""
        raise InvalidArgument(f"{given} {shape or type(value).__name__}; {must}")
    if not 0 <= count <= _LARGEST_COUNT:
        raise InvalidArgument(f"{given} {count}; it must be a number from 0 to 1e100")
    return count


def _read_number(value: Any) -> float | None:
    """Return a number, or a tensor of one, as a Python number; ``None`` for another value."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
        return float(value.detach()) if is_number else None
    # float() reads these too, but a text or a bool is a mistake here.
    if isinstance(value, str | bytes | bool) or getattr(value, "dtype", None) == "bool":
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
