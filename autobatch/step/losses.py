"""Defines what a step may return, a loss or several, and reads what each is a mean over.

Covers ``Mean``, ``Sum``, ``PerStep`` and ``Part``, which state what a bare tensor leaves open, and what ``weigh``
returned. Does not cover how terms of many micro-batches are divided (``training.loss_denominators``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from autobatch.errors import InvalidArgument
from autobatch.undo.gradients import NARROW

__all__ = [
    "Mean",
    "Part",
    "PerStep",
    "Stated",
    "Sum",
    "Term",
    "Weigh",
    "add_counts",
    "counts_of",
    "find_stated",
    "losses_of",
    "read_terms",
    "read_weights",
    "states_counts",
]

Weigh = Callable[[Any], "float | torch.Tensor | Mapping[str, float | torch.Tensor]"]
_LARGEST_COUNT = 1e100
"""Of a micro-batch: no sum of these is infinite."""

_Kind = Literal["mean", "sum", "per step", "part"]


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


@dataclass(frozen=True, eq=False)
class Part:
    """A loss that has been divided by the whole step's count: the parts of all micro-batches and ranks add up.

    For code that knows the step's total before its first micro-batch, as Hugging Face's Trainer does
    (``num_items_in_batch``). The step that is compared whole in ``verify`` and ``fit(check=)`` has fewer samples than a
    training step, and so must its divisor be the same in all micro-batches of one step: a constant, or set before.

    Where ``weigh=`` counts nothing in a micro-batch that one is not run, and its part is 0.

    Attributes:
        loss: A tensor of one element, any floating dtype.
    """

    loss: torch.Tensor


@dataclass(eq=False)
class Term:
    """One loss of one micro-batch, read.

    Attributes:
        name: Its key, or ``""`` for a step that returns one loss.
        loss: 0-dim, with a graph.
        kind: What it is: the mean over its count, the sum, a term that counts once a step, or divided already.
        count: What the step states; ``None`` where ``weigh`` or the number of samples says it.
        is_narrow: Whether the loss is bfloat16 or float16, so that its gradient rounds whatever it is multiplied by.
    """

    name: str
    loss: torch.Tensor
    kind: _Kind = "mean"
    count: float | None = None
    is_narrow: bool = False

    def divide(self, count: float, total: float) -> torch.Tensor:
        """This term's part of the mean over ``total``, of which it covers ``count``."""
        factor = 1 / total if self.kind == "sum" else count / total
        return (self.loss.float() if self.is_narrow else self.loss) * factor

    @property
    def has_count(self) -> bool:
        """Whether it is divided by a total, so that what it counts for matters."""
        return self.kind in {"mean", "sum"}

    def multiply(self, factor: float) -> torch.Tensor:
        """The loss times a factor; in float32 where it is narrower, since a third in bfloat16 is off by 0.1 %."""
        return (self.loss.float() if self.is_narrow else self.loss) * factor


def read_terms(returned: Any) -> tuple[Term, ...]:
    """The terms of a step's loss: one, or one an entry of a mapping.

    Raises:
        InvalidArgument: A loss is no tensor, has more than one element or no graph, or its count is none.
    """
    if not isinstance(returned, Mapping):
        return (_read_term("", returned),)
    if not returned:
        raise InvalidArgument("step() returned an empty dict: it must hold the step's losses")
    return tuple(_read_term(str(name), loss) for name, loss in returned.items())


_INFERENCE = "torch.inference_mode() is on, in which none is made"


def _read_term(name: str, returned: Any) -> Term:
    what, of_term = (f"the term {name!r} of step()", f" of the term {name!r}") if name else ("step()", "")
    kind: _Kind = "mean"
    count = None
    match returned:
        case Mean(loss, over):
            count = _read_count(over, f"Mean(over=){of_term}")
        case Sum(loss, stated):
            kind, count = "sum", _read_count(stated, f"Sum(count=){of_term}")
        case PerStep(loss):
            kind = "per step"
        case Part(loss):
            kind = "part"
        case loss:
            pass
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
            f"what is no loss goes beside it, as (loss, aux)"
        )
    if loss.is_complex():
        raise InvalidArgument(
            f"{what} returned a complex loss; a real one is needed, such as its abs() or its real part"
        )
    if not loss.requires_grad and count != 0:
        why = "detached, under no_grad, or every parameter is frozen"
        is_inference = torch.is_inference_mode_enabled() or loss.is_inference()
        raise InvalidArgument(
            f"{what} returned a loss without a graph ({_INFERENCE if is_inference else why})"
            + ("; what is no loss goes beside it: return (losses, aux)" if name else "")
        )
    return Term(name, loss.reshape(()), kind, count, loss.dtype in NARROW)


def losses_of(returned: Any) -> dict[str, torch.Tensor]:
    """The tensors of a step's loss by term, as far as they are some; reads no count, and refuses nothing."""
    terms = returned if isinstance(returned, Mapping) else {"": returned}
    losses = {
        str(name): term.loss if isinstance(term, Mean | Sum | PerStep | Part) else term for name, term in terms.items()
    }
    return {name: loss for name, loss in losses.items() if isinstance(loss, torch.Tensor)}


def counts_of(returned: Any) -> dict[str, float]:
    """What a step states itself as the counts of its losses, by term; empty where it states none.

    Raises InvalidArgument where a count is none.
    """
    terms = returned if isinstance(returned, Mapping) else {"": returned}
    counts = dict[str, float]()
    for name, term in terms.items():
        if isinstance(term, Mean):
            counts[str(name)] = _read_count(term.over, "Mean(over=)")
        elif isinstance(term, Sum):
            counts[str(name)] = _read_count(term.count, "Sum(count=)")
    return counts


def add_counts(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of counts, by term."""
    totals = dict[str, float]()
    for one in counts:
        for name, count in one.items():
            totals[name] = totals.get(name, 0.0) + count
    return totals


def states_counts(returned: Any) -> bool:
    """Whether a step says itself, in a loss that it returned, what that loss was divided by."""
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    terms = loss.values() if isinstance(loss, Mapping) else (loss,)
    return any(isinstance(term, Mean | Sum | Part) for term in terms)


class Stated(NamedTuple):
    """What one loss of a step counts for: a mean or a sum over ``over``, or a part that is added as it is."""

    kind: Literal["mean", "part", "several"]
    over: float


def find_stated(returned: Any, counted: float | None) -> Stated:
    """What a step that returned this counts for; ``counted`` where it does not say, ``None`` where terms differ."""
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    if isinstance(loss, Mapping):
        if len(loss) != 1:
            return Stated("several", 0.0)
        [loss] = loss.values()
    match loss:
        case Part():
            return Stated("part", 1.0)
        case Mean(_, count) | Sum(_, count):
            return Stated("mean", _read_count(count, "count"))
    return Stated("several", 0.0) if counted is None else Stated("mean", counted)


def read_weights(returned: Any, samples: int) -> dict[str, float]:
    """What ``weigh`` of a micro-batch of so many samples returned, by term; ``""`` stands for every term.

    Raises InvalidArgument where a weight is no number, negative, not finite or beyond what can be added up.
    """
    if not isinstance(returned, Mapping):
        return {"": _read_weight(returned, "", samples)}
    if not returned:
        raise InvalidArgument("weigh() returned an empty dict: it must name the step's terms, or return one number")
    return {str(name): _read_weight(value, f" for {name!r}", samples) for name, value in returned.items()}


def _read_weight(value: Any, what: str, samples: int) -> float:
    weight = _read_number(value)
    if weight is None:
        raise InvalidArgument(
            f"weigh() returned {_describe(value)}{what}; it must return one number, or a dict of them by term"
        )
    if not 0 <= weight <= _LARGEST_COUNT:
        raise InvalidArgument(
            f"weigh() gave {weight}{what} for a micro-batch of {samples}; it must be a number from 0 to 1e100"
        )
    return weight


def _read_count(value: Any, argument: str) -> float:
    count = _read_number(value)
    if count is None:
        raise InvalidArgument(f"{argument} is {_describe(value)}; it must be one number")
    if not 0 <= count <= _LARGEST_COUNT:
        raise InvalidArgument(f"{argument} is {count}; it must be a number from 0 to 1e100")
    return count


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__


def _read_number(value: Any) -> float | None:
    """A number, or a tensor of one, as a Python number; ``None`` where it is neither. The device's errors come out."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
        return float(value.detach()) if is_number else None
    # float() reads these too: some texts, and whether anything counts where how much of it was meant.
    if isinstance(value, str | bytes | bool) or getattr(value, "dtype", None) == "bool":
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
