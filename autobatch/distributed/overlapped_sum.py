"""Sums gradients over the ranks while the last backward pass of a step runs, bucket by bucket.

1. A hook on each parameter notes that its gradient is there. A bucket whose gradients are all there is summed.
2. Buckets have the same order on all ranks. A late bucket makes those behind it wait on its own rank alone.
3. After the backward pass the other buckets are summed. This rank takes part in all of them, even if its pass failed:
   the other ranks wait for it, and all run the step again or restore it.

A gradient that was written after its bucket had been read makes the sum doubtful, and so does one that is missing or
was not expected. Then all ranks run the step again, and sum after the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from autobatch.distributed.channel import uninterrupted
from autobatch.distributed.own_time import OwnTime
from autobatch.distributed.reduction import IN_FLIGHT, Bucket, GradientSlot, Reduction, attempt
from autobatch.errors import InvalidArgument, RankLost

SPARSE = "sparse gradients are not summed over ranks: use nn.Embedding(sparse=False)"


class KnownGradients(NamedTuple):
    """The gradients of the last step, which all ranks had; the next step's are expected to be of the same parameters.

    Attributes:
        trained: All trained parameters.
        flags: Which of them have a gradient.
    """

    trained: Sequence[torch.Tensor]
    flags: Sequence[bool]

    def are_of(self, trained: Sequence[torch.Tensor]) -> bool:
        """Return whether the same parameters are trained now."""
        return [*map(id, self.trained)] == [*map(id, trained)]


class OverlappedSum(AbstractContextManager[None]):
    """The block of a last backward pass whose gradients are summed over the ranks meanwhile.

    It raises the block's own error, or else what failed on this rank beside the sum, once no other rank waits for it.

    Attributes:
        is_doubtful: Whether this rank's gradients may not be those that were summed.
    """

    def __init__(
        self,
        reduction: Reduction,
        slots: Sequence[GradientSlot],
        factor: float,
        others: Sequence[torch.Tensor],
        own_time: OwnTime,
    ) -> None:
        """Start nothing yet.

        Args:
            reduction: Has memory for these slots.
            slots: The expected gradients, the same on each rank; those of tensors that are not trained are there.
            factor: This rank's factor.
            others: Trained parameters that are not expected to have a gradient.
            own_time: Counts this pass, without the sums.
        """
        self.is_doubtful = False
        self._reduction, self._slots, self._factor, self._others = reduction, slots, factor, others
        self._own_time = own_time
        self._parameters = [slot.parameter for slot in slots if slot.parameter.requires_grad]
        self._waiting, self._running = deque[Bucket](), deque[tuple[Bucket, Any]]()
        self._written = {slot.parameter for slot in slots if not slot.parameter.requires_grad}
        self._missing: set[torch.Tensor] = set()  # whose gradients the next bucket lacks
        self._stamps: dict[torch.Tensor, tuple[Any, int]] = {}  # of gradients that a bucket has read
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._failure: BaseException | None = None
        self._stream: torch.Stream | None = None
        self._is_late = True  # whether no bucket is started before the backward pass has ended

    def __enter__(self) -> None:
        """Hook the parameters; if that fails, the sum comes after the backward pass, and then the error."""
        self._own_time.resume()
        self._waiting.extend(self._reduction.divide(self._slots))
        self._failure = attempt(self._hook)

    def _hook(self) -> None:
        self._stream = self._find_stream()
        self._look_at_next()
        for parameter in self._parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))
        self._is_late = False

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Sum the buckets that are left, and wait for all."""
        self._own_time.stop()
        for hook in self._hooks:
            hook.remove()
        if isinstance(error, RankLost):
            return
        self.is_doubtful |= any(map(self._has_changed, self._stamps))
        self.is_doubtful |= any(one.grad is not None for one in self._others)
        while self._waiting:
            self._start_next()
        while self._running:
            self._end_first()
        self._stamps.clear()  # which hold gradients
        if error is None and self._failure is not None:
            raise self._failure

    def _note(self, parameter: torch.Tensor) -> None:
        """Start the buckets for which only this gradient was missing."""
        self._written.add(parameter)
        self._missing.discard(parameter)
        # A gradient of another stream may not be there yet; when the pass has ended, torch has waited for all streams.
        self._is_late = self._is_late or self._find_stream() != self._stream
        while self._waiting and not self._missing and not self._is_late:
            self._own_time.stop()
            self._start_next()  # which may wait for other ranks
            self._own_time.resume()
            self._look_at_next()

    def _find_stream(self) -> torch.Stream | None:
        device = self._slots[0].parameter.device
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def _look_at_next(self) -> None:
        parameters = {slot.parameter for slot in self._waiting[0].slots()} if self._waiting else set[torch.Tensor]()
        self._missing = parameters - self._written

    def _start_next(self) -> None:
        bucket = self._waiting.popleft()
        if len(self._running) == IN_FLIGHT:
            self._end_first()
        self._failure = attempt(self._read, bucket) or self._failure
        self._running.append((bucket, self._reduction.start(bucket)))

    def _read(self, bucket: Bucket) -> None:
        for slot in bucket.slots():
            if slot.is_sparse():
                raise InvalidArgument(SPARSE)
            self.is_doubtful |= not slot.has_any()
            slot.lay_out()
            if slot.parameter in self._stamps:  # a part of it was read before
                self.is_doubtful |= self._has_changed(slot.parameter)
            else:
                self._stamp(slot.parameter)
        with uninterrupted():
            bucket.read(self._factor)

    def _end_first(self) -> None:
        bucket, work = self._running.popleft()
        self._reduction.wait(work)
        parameters = {slot.parameter for slot in bucket.slots()}
        self.is_doubtful |= any(map(self._has_changed, parameters & self._stamps.keys()))
        self._failure = attempt(bucket.write) or self._failure
        for parameter in parameters:
            self._stamp(parameter)

    def _stamp(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        self._stamps[parameter] = (gradient, -1 if gradient is None else gradient._version)

    def _has_changed(self, parameter: torch.Tensor) -> bool:
        gradient, version = self._stamps[parameter]
        now = parameter.grad
        return now is not gradient or (now is not None and now._version != version)
