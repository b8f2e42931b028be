"""Sums gradients over the ranks, once a step, through buckets that were allocated before.

Every rank takes part until the end, even if it fails: the others wait for it inside the collectives. Gradients in
bfloat16 or float16 are summed in float32, because another rank may hold a float32 sum of many micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence

import torch
import torch.distributed as dist

from autobatch.distributed.channel import Channel, uninterrupted
from autobatch.memory.oom import is_oom
from autobatch.torch_internals.storages import is_dense
from autobatch.undo.gradients import NARROW, gradient_dtype

_BUCKET_BYTES = 25 * 1024**2  # the default of DistributedDataParallel (bucket_cap_mb)


class GradientSlot:
    """A parameter's gradient in the sum, as numbers in their order in memory, which is the same on each rank."""

    def __init__(self, parameter: torch.Tensor, sums: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
        """Read nothing yet.

        Args:
            parameter: Its ``.grad`` becomes the sum over the ranks, rounded once to its own dtype.
            sums: Gradients that were summed in float32, by parameter; a written one is dropped.
        """
        self.parameter, self.sums = parameter, sums
        self.dtype, self.count = dtype_of(parameter), parameter.numel()
        self._result: torch.Tensor | None = None

    def has_any(self) -> bool:
        """Return whether this rank has a gradient of the parameter."""
        return self.parameter.grad is not None or self.parameter in self.sums

    def read(self) -> torch.Tensor | None:
        """Return this rank's numbers, 1-d; ``None`` if all are 0."""
        value = self.sums.get(self.parameter, self.parameter.grad)
        return None if value is None else _flatten(value, self.parameter)

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
        _flatten(self._result, parameter)[start:stop].copy_(numbers)
        if stop == self.count:
            parameter.grad = self._result
            self.sums.pop(parameter, None)


class LossSlot:
    """The loss of a rank in the sum, which becomes the loss of all ranks."""

    count = 1  # of its numbers

    def __init__(self, loss: torch.Tensor | None, result: torch.Tensor) -> None:
        """``loss`` is ``None`` if this rank ran nothing; ``result`` takes the sum, one number."""
        self.loss, self.result, self.dtype = loss, result, result.dtype

    def read(self) -> torch.Tensor | None:
        """Return the loss, 1-d."""
        return None if self.loss is None else self.loss.reshape(1)

    def write(self, numbers: torch.Tensor, start: int) -> None:
        """Write the sum into ``result``."""
        self.result.copy_(numbers[start])


Slot = GradientSlot | LossSlot
_Part = tuple[Slot, int, int]  # numbers of a slot, from start to stop


class Reduction:
    """Sums over the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, channel: Channel, bucket_bytes: int = _BUCKET_BYTES) -> None:
        """Allocate nothing yet.

        Args:
            group: The user's process group, over which the model is parallel.
            channel: Names the lost rank if a collective breaks off.
            bucket_bytes: Most bytes of one collective.
        """
        self._group, self._channel, self._bucket_bytes = group, channel, bucket_bytes
        self._buckets: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, parameters: Sequence[torch.Tensor], device: torch.device | None = None) -> list[torch.Tensor]:
        """Allocate missing buckets for the gradients of these parameters and for the loss; return all buckets.

        Args:
            parameters: Parameters; none if only a loss is summed.
            device: Device of the buckets. Default: that of the parameters.
        """
        device = device or (parameters[0].device if parameters else torch.device("cpu"))
        for dtype in {torch.float32, torch.float64, *map(dtype_of, parameters)}:
            of_dtype = [parameter for parameter in parameters if dtype_of(parameter) is dtype]
            count = 1 + sum(parameter.numel() for parameter in of_dtype)
            count = max(1, min(count, self._bucket_bytes // dtype.itemsize))
            if dtype not in self._buckets or len(self._buckets[dtype]) < count:
                self._buckets.pop(dtype, None)  # before the larger one is made
                self._buckets[dtype] = torch.empty(count, dtype=dtype, device=device)
        return self.buckets()

    def buckets(self) -> list[torch.Tensor]:
        """Return the allocated buckets."""
        return [*self._buckets.values()]

    @torch.no_grad()
    def sum(self, slots: Sequence[Slot], factor: float = 1.0) -> None:
        """Sum each slot over all ranks. Collective: slots must agree in number, order, count and dtype.

        Args:
            slots: Gradients for which ``reserve`` was called, and the loss.
            factor: Factor of this rank's numbers.

        Raises:
            RankLost: A collective broke off.
            Exception: Something failed on this rank; raised after the last collective.
        """
        failures: list[BaseException] = []
        for dtype in sorted({slot.dtype for slot in slots}, key=str):
            bucket = self._buckets[dtype]
            for parts in _fill_buckets([slot for slot in slots if slot.dtype is dtype], len(bucket)):
                with uninterrupted():
                    used = bucket[: sum(stop - start for _, start, stop in parts)]
                _attempt(failures, lambda used=used, parts=parts: _read(used, parts, factor))  # type: ignore[misc]
                self._sum_bucket(used)  # also after a failure
                _attempt(failures, lambda used=used, parts=parts: _write(used, parts))  # type: ignore[misc]
        if failures:
            raise failures.pop()

    def _sum_bucket(self, bucket: torch.Tensor) -> None:
        try:
            with uninterrupted():
                dist.all_reduce(bucket, group=self._group)
        except RuntimeError as error:
            what = "ran out of memory in" if is_oom(error) else "could not complete"
            reason = f"this rank {what} the sum of the gradients: {error}".strip().partition("\n")[0]
            raise self._channel.lose(reason) from error


def dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which the parameter's gradients are summed over the ranks."""
    dtype = gradient_dtype(parameter)
    return torch.float32 if dtype in NARROW else dtype


def _fill_buckets(slots: Sequence[Slot], most: int) -> Iterator[list[_Part]]:
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


def _attempt(failures: list[BaseException], action: Callable[[], None]) -> None:
    """Do the action unless one failed before; keep an error without its frames, which hold parts of the bucket."""
    if failures:
        return
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - raised when no other rank waits any more
        failures.append(error.with_traceback(None))


def _lies_like(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether a tensor is laid out in memory as ``torch.empty_like`` would make it."""
    if not is_dense(like):
        return value.is_contiguous()
    return value.stride() == like.stride() and is_dense(value)


def _flatten(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers in their order in memory: a view if it is laid out like ``like``, else of a copy that is."""
    if not _lies_like(value, like):
        value = torch.empty_like(like, dtype=value.dtype).copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
