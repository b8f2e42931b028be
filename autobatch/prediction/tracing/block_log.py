"""Logs the blocks of a traced step: bytes, purpose, and the order of their allocations and ends."""

# ruff: noqa: SLF001 - torch has no public name for the thread that runs

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autobatch.prediction.cudnn.convolution import Convolution
from autobatch.prediction.timeline import Block, Kind, Phase, Stream, TracedStep
from autobatch.prediction.tracing.convolutions import find_calls
from autobatch.prediction.tracing.kernels import find_sum, uses_cublas
from autobatch.prediction.tracing.operators import is_on_device


class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows which block belongs to its storage."""

    __slots__ = ("block",)

    block: int


class BlockLog:
    """The blocks that one step has made and freed so far."""

    def __init__(self, module: Callable[[], str]) -> None:
        self.phase: Phase = "before"
        self.sizes: list[int] = []  # bytes by block
        self.labels: list[tuple[Phase, Kind, str, Stream]] = []  # by block
        self.events: list[int | StorageReference] = []  # as TracedStep.order, with weak references of ended storages
        self._module = module
        self._stream: Stream = "compute"
        self._convolutions: dict[int, Convolution] = {}  # by the block of its workspace
        self._handles: set[bool] = set()  # whether in autograd's thread

    def make(self, size: int, kind: Kind) -> int:
        """Log a new block, and return its entry in the order; the negative entry is its end."""
        self.sizes.append(size)
        self.labels.append((self.phase, kind, self._module(), self._stream))
        self.events.append(len(self.sizes))
        return len(self.sizes)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Allocate on that stream within this block."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def record_kernel(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Log what the operator's kernel takes beside tensors."""
        for call in find_calls(func, args, result) if is_on_device(args[0] if args else None) else ():
            self._borrow(*((copied, "temporary") for copied in call.copied_bytes), (0, "cuDNN workspace"))
            self._convolutions[len(self.sizes) - 1] = call.convolution
        counts = find_sum(func, args, result)
        if counts is not None and is_on_device(args[0]):
            self._borrow((counts[0], "addends"), (counts[1], "partial sums"))
        if uses_cublas(func) and is_on_device(result):
            self._take_handle()

    def record_buffers(self, sizes: Sequence[int], order: Sequence[int], record_results: Callable[[], None]) -> None:
        """Log an operator's buffers (``find_buffers``) around its results."""
        blocks: dict[int, int] = {}
        for entry in order:
            if entry == 0:
                record_results()
            elif entry < 0:
                self.events.append(-blocks[-entry])
            else:
                blocks[entry] = self.make(sizes[entry - 1], "temporary")

    def finish(self, samples: int) -> TracedStep:
        """Return all that was logged."""
        made = {
            (phase, kind, module, stream): Block(phase=phase, kind=kind, module=module, stream=stream)
            for phase, kind, module, stream in dict.fromkeys(self.labels)
        }
        return TracedStep(
            samples=samples,
            order=tuple(event if isinstance(event, int) else -(event.block + 1) for event in self.events),
            sizes=tuple(self.sizes),
            blocks=tuple(made[label] for label in self.labels),
            convolutions=self._convolutions,
        )

    def _borrow(self, *blocks: tuple[int, Kind]) -> None:
        entries = [self.make(byte_count, kind) for byte_count, kind in blocks]
        self.events += [-entry for entry in entries]

    def _take_handle(self) -> None:
        # Each thread has a handle of cuBLAS: the caller's, and autograd's for the backward pass.
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward not in self._handles:
            self._handles.add(is_backward)
            self.make(0, "cuBLAS workspace")
