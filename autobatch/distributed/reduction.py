"""Sums gradients over the ranks, once a step, through buckets that were allocated before.

Buckets have a fixed order and hold the last parameters first, whose gradients a backward pass finishes first. So a sum
has the same bits whether it begins after the backward pass (``Reduction.sum``) or before its end (``OverlappedSum``).

Every rank takes part until the end, even if it fails: the others wait for it inside the collectives. Gradients in
bfloat16 or float16 are summed in float32, because another rank may hold a float32 sum of many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autobatch.distributed.channel import Channel, uninterrupted
from autobatch.torch_internals.storages import is_dense, shares_memory
from autobatch.undo.gradients import NARROW, gradient_dtype

_BUCKET_BYTES = 25 * 1024**2  # of all buckets: the size of one of DistributedDataParallel (bucket_cap_mb)

_SUM = "the sum of the gradients"

IN_FLIGHT = 4
"""Number of buckets in that memory, all of which may be summed at the same time."""


class GradientSlot:
    """A parameter's gradient in the sum, as numbers in their order in memory, which is the same on each rank.

    The parameter's ``.grad`` becomes the sum, rounded once to its own dtype.
    """

    def __init__(self, parameter: torch.Tensor, sums: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
        """Read nothing yet; ``sums`` has gradients that were summed in float32, and a written one is dropped."""
        self.parameter, self.sums = parameter, sums
        self.dtype, self.count = dtype_of(parameter), parameter.numel()
        self._result: torch.Tensor | None = None

    def has_any(self) -> bool:
        """Return whether this rank has a gradient of the parameter."""
        return self.parameter.grad is not None or self.parameter in self.sums

    def is_sparse(self) -> bool:
        """Return whether this rank's gradient is sparse."""
        value = self.sums.get(self.parameter, self.parameter.grad)
        return value is not None and value.is_sparse

    def lay_out(self) -> None:
        """Lay this rank's gradient out like the parameter, in its own memory, where the sum can be written.

        The gradient of a view may be the tensor that the backward pass still reads, or another parameter's gradient.
        """
        value = self.sums.get(self.parameter, self.parameter.grad)
        if value is None or (_lies_like(value, self.parameter) and not shares_memory(value)):
            return
        value = torch.empty_like(self.parameter, dtype=value.dtype).copy_(value)
        if self.parameter in self.sums:
            self.sums[self.parameter] = value
        else:
            self.parameter.grad = value

    def read(self) -> torch.Tensor | None:
        """Return this rank's numbers, 1-d; ``None`` if all are 0."""
        value = self.sums.get(self.parameter, self.parameter.grad)
        return None if value is None else _flatten(value)

    def write(self, numbers: torch.Tensor, start: int) -> None:
        """Write a part of the sum, from the number ``start`` on; ``.grad`` is the sum after the last part.

        The sum needs another tensor unless ``.grad`` can take it: later parts of a gradient are still to be read.
        """
        parameter, stop = self.parameter, start + len(numbers)
        if self._result is None:
            gradient = parameter.grad
            fits = gradient is not None and parameter not in self.sums and _lies_like(gradient, parameter)
            self._result = gradient if fits else torch.empty_like(parameter, dtype=gradient_dtype(parameter))
        assert self._result is not None  # noqa: S101 - narrows for mypy
        _flatten(self._result)[start:stop].copy_(numbers)
        if stop == self.count:
            parameter.grad = self._result
            self.sums.pop(parameter, None)


_Part = tuple[GradientSlot, int, int]  # numbers of a slot, from start to stop


class Bucket:
    """Parts of gradients that one collective sums, and the memory through which it does."""

    def __init__(self, memory: torch.Tensor, parts: Sequence[_Part]) -> None:
        """Read nothing yet; ``memory`` may be that of a bucket whose sum has been written."""
        self.parts = parts
        self.numbers = memory[: sum(stop - start for _, start, stop in parts)]

    def slots(self) -> list[GradientSlot]:
        """Return the gradients that have a part in the bucket."""
        return [slot for slot, _, _ in self.parts]

    @torch.no_grad()
    def read(self, factor: float) -> None:
        """Take this rank's numbers, times its factor, without allocating."""
        end = 0
        for slot, start, stop in self.parts:
            begin, end = end, end + stop - start
            numbers = slot.read()
            if numbers is None:
                self.numbers[begin:end].zero_()
            else:
                self.numbers[begin:end].copy_(numbers[start:stop])
        if factor != 1:
            self.numbers.mul_(factor)

    @torch.no_grad()
    def write(self) -> None:
        """Make the gradients' parts what the numbers are."""
        end = 0
        for slot, start, stop in self.parts:
            begin, end = end, end + stop - start
            slot.write(self.numbers[begin:end], start)


class Reduction:
    """Sums over the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, channel: Channel, bucket_bytes: int = _BUCKET_BYTES) -> None:
        """Allocate nothing yet; all buckets of a dtype together take at most ``bucket_bytes``."""
        self._group, self._channel, self._bucket_bytes = group, channel, bucket_bytes
        self._buckets: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocate missing buckets for the gradients of these parameters; return all buckets."""
        for dtype in {dtype_of(parameter) for parameter in parameters}:
            alike = [parameter for parameter in parameters if dtype_of(parameter) is dtype]
            count = sum(parameter.numel() for parameter in alike)
            count = max(1, min(count, IN_FLIGHT * self._most(dtype)))
            if dtype not in self._buckets or len(self._buckets[dtype]) < count:
                self._buckets.pop(dtype, None)  # before the larger one is made
                self._buckets[dtype] = torch.empty(count, dtype=dtype, device=alike[0].device)
        return self.buckets()

    def buckets(self) -> list[torch.Tensor]:
        return [*self._buckets.values()]

    def divide(self, slots: Sequence[GradientSlot]) -> list[Bucket]:
        """Divide the slots among buckets, in the order in which these are summed.

        Slots must agree between the ranks in number, order, count and dtype. A bucket has the memory of the one that is
        ``IN_FLIGHT`` before it.
        """
        buckets: list[Bucket] = []
        for dtype in sorted({slot.dtype for slot in slots}, key=str):
            most, memory = self._most(dtype), self._buckets[dtype].split(self._most(dtype))
            alike = [slot for slot in reversed(slots) if slot.dtype is dtype]
            for number, parts in enumerate(_fill_buckets(alike, most)):
                buckets.append(Bucket(memory[number % IN_FLIGHT], parts))
        return buckets

    def sum(self, slots: Sequence[GradientSlot], factor: float = 1.0) -> None:
        """Sum each slot, times this rank's factor, over all ranks, through the buckets that ``reserve`` made.

        Slots must be laid out. An error in writing a sum is this rank's own: it is raised after the last collective.
        """
        failure: BaseException | None = None
        for bucket in self.divide(slots):
            with uninterrupted():  # nothing is allocated, and a wrong number would be in the sum of all ranks
                bucket.read(factor)
            self.wait(self.start(bucket))  # also after a failure
            failure = failure or attempt(bucket.write)
        if failure is not None:
            raise failure

    def start(self, bucket: Bucket) -> Any:
        """Start the sum of a bucket; return what ``wait`` takes."""
        with self._channel.collective(_SUM):
            return dist.all_reduce(bucket.numbers, group=self._group, async_op=True)

    def wait(self, work: Any) -> None:
        """Wait until a sum is in its bucket."""
        with self._channel.collective(_SUM):
            work.wait()

    def _most(self, dtype: torch.dtype) -> int:
        """Return the most numbers in one bucket."""
        return max(1, self._bucket_bytes // IN_FLIGHT // dtype.itemsize)


def make_loss(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a scalar, the same on each rank, whose ``.grad`` takes the loss: it is summed like a gradient."""
    is_wide = any(parameter.dtype is torch.float64 for parameter in parameters)
    return torch.empty((), dtype=torch.float64 if is_wide else torch.float32, device=parameters[0].device)


def dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which the parameter's gradients are summed over the ranks."""
    dtype = gradient_dtype(parameter)
    return torch.float32 if dtype in NARROW else dtype


def _fill_buckets(slots: Sequence[GradientSlot], most: int) -> Iterator[list[_Part]]:
    """Yield the parts of one bucket after another: slots, or ranges of large ones."""
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


def attempt(action: Callable[..., None], *arguments: object) -> BaseException | None:
    """Return the error of an action, without its frames, which hold parts of the bucket."""
    try:
        action(*arguments)
    except BaseException as error:  # noqa: BLE001 - raised when no other rank waits any more
        return error.with_traceback(None)
    return None


def _lies_like(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether a tensor is laid out in memory as ``torch.empty_like`` would make it."""
    if not is_dense(like):
        return value.is_contiguous()
    return value.stride() == like.stride() and is_dense(value)


def _flatten(value: torch.Tensor) -> torch.Tensor:
    """Return the numbers in their order in memory: a view of a tensor that is laid out like its parameter."""
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
