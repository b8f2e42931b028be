"""Sets gradients aside, restores or adds them, and sums narrow ones in float32.

Covers dense and sparse gradients of leaf parameters; ``None`` stays ``None``. Does not cover when any of it happens
(``training.transaction``, ``training.accumulation``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, is_not

import torch

from autobatch.errors import InvalidArgument
from autobatch.undo.sparse_gradients import widen
from autobatch.undo.tensor_header import is_uninitialized

__all__ = ["NARROW", "Float32Sums", "GradientStamps", "GradientsAside", "gradient_dtype"]

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which a sum loses small numbers beside large ones."""

# Read by functions in C: a generator costs a Python call for each parameter, in every micro-batch.
_GRADIENT = attrgetter("grad")
_VERSION = attrgetter("_version")
_IS_SPARSE = attrgetter("is_sparse")
_IS_LEAF = attrgetter("is_leaf")
# torch 2.8 has no such attribute. Other dtypes, and None for any dtype, are looked at one by one.
_GRADIENT_DTYPE = attrgetter("grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype")
_ALL_WIDE = frozenset((torch.float32, torch.float64))


class GradientsAside:
    """Gradients from before a step: references moved out of the way, so that the step begins with none.

    Attributes:
        is_final: Whether the step can no longer be undone: gradients from before do not come back.
        are_there: Whether any parameter had one.
    """

    def __init__(self, stamps: GradientStamps) -> None:
        """Note every ``.grad`` as stamped; nothing is moved yet."""
        self._parameters, self._gradients = stamps.parameters, stamps.gradients
        self.are_there = bool(stamps.present)
        self._is_spent = False
        self.is_final = False

    def gradients(self) -> Sequence[torch.Tensor | None]:
        """What was noted, a parameter each."""
        return self._gradients

    def take(self) -> None:
        """Set every ``.grad`` to ``None``."""
        for parameter in self._parameters:
            parameter.grad = None

    def end(self) -> None:
        """Restore every ``.grad``; after ``settle`` leave the sums, after ``spend`` set ``None``."""
        if self.is_final and not self._is_spent:
            return
        try:
            self._put_back()
        except BaseException:
            self._put_back()  # interrupted: half of it would be neither before nor after
            raise

    def _put_back(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def spend(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let ``end`` set every ``.grad`` to ``None``, since the update uses them.

        Args:
            parameters: The parameters now: a forward pass may have made some.
        """
        gone: tuple[Sequence[torch.Tensor], list[torch.Tensor | None]] = (parameters, [None] * len(parameters))
        (self._parameters, self._gradients), self._is_spent, self.is_final = gone, True, True

    @torch.no_grad()
    def add(self) -> None:
        """Make ``.grad`` the sum with what was there; the earlier gradients stay as they are, so this can be undone."""
        for parameter, earlier in zip(self._parameters, self._gradients, strict=True):
            new = parameter.grad
            if earlier is None:
                continue
            if new is None:
                parameter.grad = earlier.clone()  # clipping writes into it
            elif new.is_sparse and not earlier.is_sparse:
                parameter.grad = earlier + new
            else:
                new.add_(earlier)

    @torch.no_grad()
    def settle(self) -> None:
        """Move the sums into the earlier gradients' own tensors, where ``backward`` would have added them.

        An earlier sparse gradient cannot take a dense sum: there the new tensor stays, as after ``backward``.
        """
        pairs = zip(self._parameters, self._gradients, strict=True)
        sums = [(parameter, earlier, parameter.grad) for parameter, earlier in pairs if earlier is not None]
        self.is_final = True
        try:
            _move(sums)
        except BaseException:
            _move(sums)  # interrupted: it cannot be undone, but moving twice is moving once
            raise


def _move(sums: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
    for parameter, earlier, total in sums:
        if total is None or total is earlier or total.is_sparse != earlier.is_sparse:
            continue
        earlier.copy_(total)
        parameter.grad = earlier


class Float32Sums:
    """Gradients of bfloat16 and float16 parameters, added up in float32 beside ``.grad``.

    Each backward pass's gradient is added to its sum the moment it is there, and dropped. A sum in the parameter's own
    dtype loses what is small against it: 512 bfloat16 micro-batches gave a relative error of 0.14, with float32 sums
    8e-5. A sum takes 4 bytes a parameter.

    Attributes:
        writes: How often any sum has been written to.
        hooks: On the parameters whose gradients are summed.
    """

    def __init__(self) -> None:
        """Nothing is summed before ``begin``."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.writes = 0

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sum the gradients of narrow parameters from now on; a second call before ``end`` does nothing."""
        if not self.hooks and not _ALL_WIDE.issuperset(map(_GRADIENT_DTYPE, filter(_IS_LEAF, parameters))):
            narrow = (
                p
                for p in parameters
                if p.is_leaf and p.requires_grad and gradient_dtype(p) in NARROW and not is_uninitialized(p)
            )
            for parameter in narrow:  # one by one: an interrupt leaves at most one that ``end`` does not know
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._add))

    @torch.no_grad()
    def _add(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None  # noqa: S101 - narrows for mypy: torch calls this when it has written .grad
        self.writes += 1
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = parameter.grad.float()
        elif total.is_sparse:
            self._sums[parameter] = (total + parameter.grad.float()).coalesce()
        else:
            total.add_(parameter.grad)
        parameter.grad = None

    def take_in(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add and drop the gradients of narrow parameters whose hooks torch does not call."""
        for parameter in parameters:
            if parameter.grad is not None and gradient_dtype(parameter) in NARROW:
                self._add(parameter)

    def clear(self) -> None:
        """Drop all sums."""
        self._sums.clear()

    def tensors(self) -> list[torch.Tensor]:
        """The sums."""
        return [*self._sums.values()]

    @torch.no_grad()
    def widen(self, times: int) -> None:
        """Let sparse sums have the rows of so many micro-batches; see ``sparse_gradients``."""
        self._sums = {parameter: widen(total, times) for parameter, total in self._sums.items()}

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """All sums by one factor, before they are rounded."""
        for total in self._sums.values():
            total.mul_(factor)

    def take(self) -> dict[torch.Tensor, torch.Tensor]:
        """The sums by parameter, for somebody else to write."""
        self.writes = 0
        return self._sums

    @torch.no_grad()
    def write(self) -> None:
        """Each sum becomes its parameter's ``.grad``, rounded once; one after the other, so that both need not fit."""
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(gradient_dtype(parameter))

    def end(self) -> None:
        """Remove the hooks and drop what was not written."""
        for hook in self.hooks:
            hook.remove()
        self._sums.clear()
        self.hooks, self.writes = [], 0


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What ``.grad`` of this parameter is in."""
    # torch 2.8 has no such attribute; None means that any dtype may stand there.
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class GradientStamps:
    """The gradients at one moment and their counts of writes, to see whether a backward pass has touched any.

    torch either writes ``.grad`` in place, which raises its ``_version``, or puts another tensor there
    (``torch/csrc/autograd/functions/accumulate_grad.h``). The stamp holds the old reference, so an address cannot come
    back.

    Attributes:
        parameters: Whose gradients they are.
        gradients: Their ``.grad``, which may be ``None``.
        present: The gradients that were there.
        any_sparse: Whether any of them is sparse.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Stamp every parameter's gradient, and the sums beside them."""
        self.parameters, self._sums = parameters, sums
        self.gradients: Sequence[torch.Tensor | None] = ()
        self.present: list[torch.Tensor] = []
        self.any_sparse = False
        self.renew()

    def renew(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Stamp them as they are now; ``parameters`` are other ones from now on."""
        if parameters is not None:
            self.parameters, self.gradients = parameters, ()
        gradients = list(map(_GRADIENT, self.parameters))
        if not self.gradients or not all(map(is_, gradients, self.gradients)):
            self.gradients = gradients
            self.present = list(compress(gradients, map(is_not, gradients, repeat(None))))
            self.any_sparse = any(map(_IS_SPARSE, self.present))
        self._versions = list(map(_VERSION, self.present))
        self._writes = self._sums.writes

    def tensors(self) -> list[torch.Tensor]:
        """The gradients that were stamped, and the sums."""
        return self.present + self._sums.tensors()

    def unchanged(self) -> bool:
        """Whether every ``.grad`` is the same tensor, written as often as when it was stamped, and so are the sums."""
        return (
            self._sums.writes == self._writes
            and all(map(is_, map(_GRADIENT, self.parameters), self.gradients))
            and list(map(_VERSION, self.present)) == self._versions
        )

    def refuse_change(self) -> None:
        """``unchanged``, or an error, after a forward pass.

        Raises:
            InvalidArgument: The step has changed a gradient.
        """
        if not self.unchanged():
            raise InvalidArgument(
                "step() changed .grad: leave backward() and zero_grad() to the Runner, return the loss only"
            )

    def clear(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop all gradients of these parameters, and stamp them."""
        for parameter in parameters:
            parameter.grad = None
        self._sums.clear()
        self.renew(parameters)

    def release(self) -> None:
        """Drop the references to gradients: an optimizer's step may need the memory of a sparse one."""
        self.gradients, self.present, self._versions = (), [], []
