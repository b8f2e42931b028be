"""Sums gradients over the ranks, once a step, through buckets that were allocated before.

Every rank takes part until the end, even if it fails: the others wait for it inside the collectives. Gradients in
bfloat16 or float16 are summed in float32, because another rank may hold a float32 sum of many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence

import torch
import torch.distributed as dist

from autobatch.distributed.channel import Channel, uninterrupted
from autobatch.torch_internals.storages import is_dense
from autobatch.undo.gradients import NARROW, gradient_dtype

_BUCKET_BYTES = 25 * 1024**2  # the default of DistributedDataParallel (bucket_cap_mb)


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
        """Lay this rank's gradient out like the parameter, so that reading it needs no copy."""
        value = self.sums.get(self.parameter, self.parameter.grad)
        if value is None or _lies_like(value, self.parameter):
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


class Reduction:
    """Sums over the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, channel: Channel, bucket_bytes: int = _BUCKET_BYTES) -> None:
        """Allocate nothing yet; no collective has more than ``bucket_bytes``."""
        self._group, self._channel, self._bucket_bytes = group, channel, bucket_bytes
        self._buckets: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocate missing buckets for the gradients of these parameters; return all buckets."""
        for dtype in {dtype_of(parameter) for parameter in parameters}:
            alike = [parameter for parameter in parameters if dtype_of(parameter) is dtype]
            count = sum(parameter.numel() for parameter in alike)
            count = max(1, min(count, self._bucket_bytes // dtype.itemsize))
            if dtype not in self._buckets or len(self._buckets[dtype]) < count:
                self._buckets.pop(dtype, None)  # before the larger one is made
                self._buckets[dtype] = torch.empty(count, dtype=dtype, device=alike[0].device)
        return self.buckets()

    def buckets(self) -> list[torch.Tensor]:
        return [*self._buckets.values()]

    @torch.no_grad()
    def sum(self, slots: Sequence[GradientSlot], factor: float = 1.0) -> None:
        """Sum each slot, times this rank's factor, over all ranks, through the buckets that ``reserve`` made.

        Slots must agree in number, order, count and dtype, and be laid out. An error in writing a sum is this rank's
        own: it is raised after the last collective.
        """
        failure: BaseException | None = None
        for dtype in sorted({slot.dtype for slot in slots}, key=str):
            bucket = self._buckets[dtype]
            for parts in _fill_buckets([slot for slot in slots if slot.dtype is dtype], len(bucket)):
                with uninterrupted():  # nothing is allocated, and a wrong number would be in the sum of all ranks
                    used = bucket[: sum(stop - start for _, start, stop in parts)]
                    _read(used, parts, factor)
                self._sum_bucket(used)  # also after a failure
                failure = failure or _attempt(_write, used, parts)
        if failure is not None:
            raise failure

    def _sum_bucket(self, bucket: torch.Tensor) -> None:
        with self._channel.collective("the sum of the gradients"):
            dist.all_reduce(bucket, group=self._group)


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


def _attempt(action: Callable[..., None], *arguments: object) -> BaseException | None:
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
