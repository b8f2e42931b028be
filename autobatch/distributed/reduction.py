"""Sums gradients over ranks, once a step, through buckets that were made before.

Every rank takes part to the end, whatever fails on it: one that stops would leave the others inside a collective. A
gradient in bfloat16 or float16 is summed in float32, since another rank may hold a float32 sum of many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autobatch.distributed.channel import Channel
from autobatch.memory.oom import is_oom
from autobatch.torch_internals.storages import is_dense
from autobatch.undo.gradients import NARROW, gradient_dtype

__all__ = ["GradientSlot", "LossSlot", "Reduction", "Slot"]

_BUCKET_BYTES = 25 * 1024**2
"""As DistributedDataParallel's (``bucket_cap_mb``)."""


class Slot:
    """One tensor of the sum, as numbers in the order of their memory, which is the same on each rank.

    Attributes:
        dtype: In which it is summed.
        count: How many numbers it has.
    """

    dtype: torch.dtype
    count: int

    def read(self) -> torch.Tensor | None:
        """This rank's numbers, 1-d; ``None``: all are 0."""
        raise NotImplementedError

    def write(self, numbers: torch.Tensor, start: int) -> None:
        """Take a part of the sum, which begins at the number ``start``."""
        raise NotImplementedError


class GradientSlot(Slot):
    """A parameter's gradient, or its sum in float32."""

    def __init__(self, parameter: torch.Tensor, sums: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
        """Nothing is read yet.

        Args:
            parameter: Whose ``.grad`` becomes the sum over the ranks, rounded once to its own dtype.
            sums: Gradients that were added up in float32, by parameter; each is dropped when it is written.
        """
        self.parameter, self.sums = parameter, sums
        self.dtype, self.count = dtype_of(parameter), parameter.numel()
        # The sum goes into a tensor of its own where .grad cannot take it: a parameter may be in two buckets, and what
        # of it is still to be read must not be what was written.
        self._result: torch.Tensor | None = None

    def has_any(self) -> bool:
        """Whether this rank has a gradient of it."""
        return self.parameter.grad is not None or self.parameter in self.sums

    def read(self) -> torch.Tensor | None:
        """The gradient or its sum."""
        value = self.sums.get(self.parameter, self.parameter.grad)
        return None if value is None else _flatten(value, self.parameter)

    def write(self, numbers: torch.Tensor, start: int) -> None:
        """Write into ``.grad``, or into what becomes it with the last part."""
        parameter, stop = self.parameter, start + len(numbers)
        if self._result is None:
            own = parameter.grad
            is_own = own is not None and parameter not in self.sums and _lies_like(own, parameter)
            self._result = own if is_own else torch.empty_like(parameter, dtype=gradient_dtype(parameter))
        assert self._result is not None  # noqa: S101 - narrows for mypy
        _flatten(self._result, parameter)[start:stop].copy_(numbers)
        if stop == self.count:
            parameter.grad = self._result
            self.sums.pop(parameter, None)


class LossSlot(Slot):
    """The running loss of a rank, which becomes that of all ranks."""

    count = 1

    def __init__(self, loss: torch.Tensor | None, result: torch.Tensor) -> None:
        """``result``, of one number, takes the sum; ``loss`` is ``None`` where nothing was run."""
        self.loss, self.result, self.dtype = loss, result, result.dtype

    def read(self) -> torch.Tensor | None:
        """The loss."""
        return None if self.loss is None else self.loss.reshape(1)

    def write(self, numbers: torch.Tensor, start: int) -> None:
        """Write the result."""
        self.result.copy_(numbers[0])


@dataclass
class Reduction:
    """Sums over the ranks of a process group.

    Attributes:
        group: The user's own, over which the model is parallel.
        channel: Knows who is gone where a collective breaks off.
        bucket_bytes: The most bytes of one collective.
    """

    group: dist.ProcessGroup | None
    channel: Channel
    bucket_bytes: int = _BUCKET_BYTES

    def __post_init__(self) -> None:
        """There are no buckets before ``reserve``."""
        self._buckets: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, parameters: Sequence[torch.Tensor], device: torch.device | None = None) -> list[torch.Tensor]:
        """Make the buckets for the gradients of these parameters, where they are not there; returns all.

        Args:
            parameters: None of them where only a loss is summed.
            device: Default: that of the parameters.
        """
        device = device or (parameters[0].device if parameters else torch.device("cpu"))
        for dtype in {*map(dtype_of, parameters), torch.float32, torch.float64}:
            of_dtype = [parameter for parameter in parameters if dtype_of(parameter) is dtype]
            count = 1 + sum(parameter.numel() for parameter in of_dtype)  # one more, for the loss
            count = max(1, min(count, self.bucket_bytes // dtype.itemsize))
            if dtype not in self._buckets or len(self._buckets[dtype]) < count:
                self._buckets.pop(dtype, None)  # before the larger one is made
                self._buckets[dtype] = torch.empty(count, dtype=dtype, device=device)
        return self.buckets()

    def buckets(self) -> list[torch.Tensor]:
        """Those that are there."""
        return [*self._buckets.values()]

    @torch.no_grad()
    def sum(self, slots: Sequence[Slot], factor: float = 1.0) -> None:
        """Sum each slot over all ranks. Collective: slots must agree in number, order, count and dtype.

        Args:
            slots: What is summed; ``reserve`` was called for it.
            factor: What this rank's numbers are multiplied by before.

        Raises:
            RankLost: A collective broke off.
            Exception: What failed on this rank, raised after the last collective.
        """
        failures: list[BaseException] = []
        for dtype in sorted({slot.dtype for slot in slots}, key=str):
            bucket = self._buckets[dtype]
            for parts in _fill_buckets([slot for slot in slots if slot.dtype is dtype], len(bucket)):
                with _disable_current_modes():  # what it raised would leave the others in the sum
                    used = bucket[: sum(stop - start for _, start, stop in parts)]
                _attempt(failures, lambda used=used, parts=parts: _read(used, parts, factor))  # type: ignore[misc]
                self._sum_bucket(used)  # the others are in it too, whatever has failed here
                _attempt(failures, lambda used=used, parts=parts: _write(used, parts))  # type: ignore[misc]
        if failures:
            raise failures.pop()

    def _sum_bucket(self, bucket: torch.Tensor) -> None:
        try:
            with _disable_current_modes():  # a budget that raised in here would leave the others waiting
                dist.all_reduce(bucket, group=self.group)
        except RuntimeError as error:
            whose = (
                "memory ended on this rank inside the sum of the gradients" if is_oom(error) else "the sum broke off"
            )
            reason = f"{whose}: {error}".strip().partition("\n")[0]
            raise self.channel.lose(reason) from error


_Part = tuple[Slot, int, int]


def dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """In which its gradients are summed over the ranks."""
    dtype = gradient_dtype(parameter)
    return torch.float32 if dtype in NARROW else dtype


def _fill_buckets(slots: Sequence[Slot], most: int) -> Iterator[list[_Part]]:
    """Slots, or ranges of large ones, that fill one bucket each."""
    parts: list[_Part] = []
    left = most
    for slot in slots:
        start = 0
        while start < slot.count:
            stop = min(slot.count, start + left)
            parts.append((slot, start, stop))
            left -= stop - start
            start = stop
            if not left:
                yield parts
                parts, left = [], most
    if parts:
        yield parts


def _read(bucket: torch.Tensor, parts: Sequence[_Part], factor: float) -> None:
    end = 0
    for slot, start, stop in parts:
        begin, end = end, end + stop - start
        numbers = slot.read()
        if numbers is None:
            bucket[begin:end].zero_()
        else:
            bucket[begin:end].copy_(numbers[start:stop])
    if factor != 1:
        bucket.mul_(factor)


def _write(bucket: torch.Tensor, parts: Sequence[_Part]) -> None:
    end = 0
    for slot, start, stop in parts:
        begin, end = end, end + stop - start
        slot.write(bucket[begin:end], start)


def _attempt(failures: list[BaseException], action: Callable[[], None]) -> None:
    """Do it, unless something failed before; an error is kept without its frames, which hold parts of the bucket."""
    if failures:
        return
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - raised when the other ranks no longer wait
        failures.append(error.with_traceback(None))


def _lies_like(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether it lies in memory as ``torch.empty_like`` would make it."""
    if not is_dense(like):
        return value.is_contiguous()
    return value.stride() == like.stride() and is_dense(value)


def _flatten(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Its numbers in the order of their memory: a view where it lies like ``like``, else of a copy that does."""
    if not _lies_like(value, like):
        value = torch.empty_like(like, dtype=value.dtype).copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
