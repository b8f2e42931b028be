"""Computes the cross entropy of a linear layer in chunks of its classes, without the logits of all classes at once.

1. In place of its output the layer returns ``Logits``, which hold its inputs and no values.
2. ``cross_entropy`` of them is computed in chunks: the forward pass keeps one number a row, and the backward pass
   computes each chunk again. A chunk's gradient of the weight is one product over all rows, as without chunks.
3. Any other function that reads them computes them, as the layer would have done: the step is the same then, and saves
   nothing. Code that does not call torch, such as an own kernel, finds NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.utils._pytree import tree_map_only

from autobatch.errors import InvalidArgument

CHUNKS = 16

_DESCRIBES = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")),
}
_KEEPS_ROWS = {
    *(torch.Tensor.float, torch.Tensor.contiguous, torch.Tensor.view, torch.Tensor.reshape, torch.reshape),
    *(torch.Tensor.flatten, torch.flatten),
}


@dataclass(eq=False)
class HeadCall:
    """One call of the layer.

    Attributes:
        inputs: Inputs of the layer, cast as autocast would.
        weight: Its weight, cast in the same way.
        bias: Its bias.
        versions: Numbers of writes into inputs, weight and bias at the call.
        is_read: Whether the step has read its output otherwise than through a cross entropy.
        losses: Inputs and labels of each cross entropy in chunks.
    """

    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_read: bool = False
    losses: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Note the versions."""
        self.versions = self._count_writes()

    @property
    def rows(self) -> int:
        """Number of rows of its output."""
        return self.inputs[..., 0].numel()

    def check_unchanged(self) -> None:
        """Raise InvalidArgument if the layer would return something else now."""
        if self._count_writes() != self.versions:
            raise InvalidArgument(
                "the logits are used after the optimizer's step, or after a write into the input of their layer: use "
                "them before, or leave 'chunk_loss' out of strategies="
            )

    def _count_writes(self) -> list[int]:
        return [_version(one) for one in (self.inputs, self.weight, self.bias) if one is not None]


def call_head(head: nn.Linear, hidden: torch.Tensor) -> Logits:
    """Return what the layer would return, without computing it."""
    inputs, bias = _cast(hidden), None if head.bias is None else _cast(head.bias)
    return _make(HeadCall(inputs, _cast(head.weight), bias), inputs, inputs.dtype, None)


class Logits(torch.Tensor):
    """Logits that nobody has computed yet."""

    call: HeadCall
    hidden: torch.Tensor  # inputs of the layer, a row for each row of these logits
    made_by: Callable[[], torch.Tensor] | None  # from those of the layer's call; ``None`` for these themselves
    value: torch.Tensor | None
    version: int

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in _DESCRIBES:
            return super().__torch_function__(function, types, args, given)  # type: ignore[no-untyped-call]
        if args and isinstance(logits := args[0], cls) and not logits.call.is_read:
            made = _lose(logits, *args[1:], **given) if function is cross_entropy else None
            made = _follow(logits, function, args[1:], given) if made is None else made
            if made is not None:
                return made
        read_args, read_kwargs = tree_map_only(cls, cls.read, (args, dict(given)))
        return function(*read_args, **read_kwargs)

    def read(self) -> torch.Tensor:
        """Return the values.

        Raises:
            InvalidArgument: They were written to.
        """
        self.call.is_read = True
        if self.value is None:
            self.call.check_unchanged()
            with torch.set_grad_enabled(self.requires_grad), _no_autocast(self.hidden):
                made = self.made_by() if self.made_by else linear(self.hidden, self.call.weight, self.call.bias)
            self.value, self.version = made, _version(made)
        if _version(self.value) != self.version:
            raise InvalidArgument(
                "the step writes into its logits, so their loss cannot be computed in chunks: leave 'chunk_loss' out "
                "of strategies="
            )
        return self.value


def _follow(logits: Logits, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Logits | None:
    """Return other rows of the logits, or another shape or type of them; ``None`` if they have to be read."""
    is_slice = function is torch.Tensor.__getitem__ and all(
        isinstance(one, slice | int | type(...)) for one in (args[0] if isinstance(args[0], tuple) else args)
    )
    has_type = [isinstance(one, torch.dtype) for one in (*args, *kwargs.values())]
    is_cast = function is torch.Tensor.to and all(has_type)
    if not (is_cast or is_slice or (function in _KEEPS_ROWS and not any(has_type))):
        return None
    made = function(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    *rows, classes = made.shape or (0,)
    if classes != logits.shape[-1] or not made.is_floating_point():
        return None
    hidden = logits.hidden[args[0]] if is_slice else logits.hidden.reshape(*rows, logits.hidden.shape[-1])
    if hidden.shape != (*rows, logits.hidden.shape[-1]):
        return None
    return _make(logits.call, hidden, made.dtype, lambda: function(logits.read(), *args, **kwargs))


def _lose(logits: Logits, labels: torch.Tensor, **options: Any) -> torch.Tensor | None:
    """Return the cross entropy, computed in chunks; ``None`` for options that are not supported."""
    ignored, reduction = options.pop("ignore_index", -100), options.pop("reduction", "mean")
    has_others = options.pop("label_smoothing", 0.0) != 0 or any(one is not None for one in options.values())
    has_rows = logits.ndim == 2 and labels.dtype == torch.int64 and labels.shape == logits.shape[:1]
    if has_others or not has_rows or reduction not in {"mean", "sum", "none"}:
        return None
    logits.call.check_unchanged()
    counts = labels != ignored
    classes = labels.where(counts, 0)
    logits.call.losses.append((logits.hidden, classes))
    with _no_autocast(logits.hidden):
        losses = chunked_losses(logits.hidden, logits.call.weight, logits.call.bias, classes).where(counts, 0)
    loss = losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / counts.sum()
    is_cast = torch.is_autocast_enabled(logits.device.type)
    return loss.to(torch.promote_types(logits.dtype, torch.float32) if is_cast else logits.dtype)


def _make(
    call: HeadCall, hidden: torch.Tensor, dtype: torch.dtype, made_by: Callable[[], torch.Tensor] | None
) -> Logits:
    made: Logits = _Uncomputed.apply(hidden, call.weight, dtype)  # type: ignore[no-untyped-call]
    made.call, made.hidden, made.made_by, made.value, made.version = call, hidden, made_by, None, 0
    return made


class _Uncomputed(torch.autograd.Function):
    """A NaN for all logits, and a place in the graph for what would use them without torch's functions."""

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        value = torch.full((), torch.nan, dtype=dtype, device=hidden.device)
        return value.expand(*hidden.shape[:-1], len(weight)).as_subclass(Logits)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise InvalidArgument(
            "the step uses its logits in a function of its own, so their loss cannot be computed in chunks: leave "
            "'chunk_loss' out of strategies="
        )


def chunked_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the cross entropy of each row, at least in float32; all labels are classes."""
    made: torch.Tensor = _ChunkedLosses.apply(hidden, weight, bias, labels)  # type: ignore[no-untyped-call]
    return made


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        torch.empty(len(weight), device=labels.device).index_select(0, labels)  # raises for a label that is no class
        tops, picked = list[torch.Tensor](), torch.zeros((), device=hidden.device)
        for part in _parts(weight):
            chunk = _logits(hidden, weight, bias, part)
            tops.append(chunk.logsumexp(1))
            is_here, place = _find(labels, part)
            picked = torch.where(is_here, chunk.gather(1, place), picked.to(chunk.dtype))
        total = torch.stack(tops).logsumexp(0)
        ctx.save_for_backward(hidden, weight, bias, labels, total)
        return total - picked.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, total = ctx.saved_tensors
        has_hidden, has_weight, has_bias, _ = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden, dtype=total.dtype) if has_hidden else None
        of_weight = torch.empty_like(weight) if has_weight else None
        of_bias = torch.empty_like(bias) if has_bias else None
        with _no_autocast(hidden):
            for part in _parts(weight):
                chunk = _logits(hidden, weight, bias, part).sub_(total[:, None]).exp_()
                is_here, place = _find(labels, part)
                chunk.scatter_(1, place, chunk.gather(1, place) - is_here.to(chunk.dtype))
                gradient = chunk.mul_(upstream[:, None]).to(hidden.dtype)
                if of_hidden is not None:
                    of_hidden += gradient @ weight[part]
                if of_weight is not None:
                    torch.mm(gradient.t(), hidden, out=of_weight[part])
                if of_bias is not None:
                    of_bias[part] = gradient.sum(0)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    classes = len(weight)
    width = -(-classes // CHUNKS)
    return (slice(start, min(start + width, classes)) for start in range(0, classes, width))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, part: slice) -> torch.Tensor:
    made = linear(hidden, weight[part], None if bias is None else bias[part])
    return made.to(torch.promote_types(made.dtype, torch.float32))


def _find(labels: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows have their class in this part, and a place in the part for each row."""
    place, last = (labels - part.start)[:, None], part.stop - part.start - 1
    return (place >= 0) & (place <= last), place.clamp(0, last)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast an operand as autocast would cast it for a linear layer."""
    device_type = tensor.device.type
    is_cast = torch.is_autocast_enabled(device_type) and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device_type)) if is_cast else tensor


def _version(tensor: torch.Tensor) -> int:
    """Return the number of writes into a tensor; those of inference mode count none."""
    return 0 if tensor.is_inference() else tensor._version


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
