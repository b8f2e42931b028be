"""Runs a function on the next samples that fit, measures what they take, and continues with fewer after a shortage.

1. ``planning.piece_size`` chooses a size, and ``samples`` the next samples. They run in eval mode, without gradients.
2. If memory runs out, random generators are restored, and the same samples run again in smaller pieces.
3. Any other error is the user's. Halves of the piece run until the sample that raises it is found, without the tensors
   of the piece; the error of that sample is raised as it is.

Every piece is work that is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from autobatch._formatting import format_bytes
from autobatch._user_errors import add_note, clear_frames, contextmanager
from autobatch.batch.tree import map_tensors
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument
from autobatch.events import Hook, MapFinished, PieceFinished, PieceRetried, emit
from autobatch.inference.results import Indices, check_result
from autobatch.inference.samples import Waiting, set_attributes
from autobatch.memory.device import Device
from autobatch.memory.devices import Allowance
from autobatch.memory.oom import describe_error, ends_context, is_oom
from autobatch.planning.piece_size import Piece, PieceSizes
from autobatch.records import MemoryUsage
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.undo import Undo

Done = tuple[Indices, Any]  # the samples of a piece that has run, and its result with one entry for each


@dataclass
class PieceRunner:
    """Runs one function on one device, piece by piece."""

    function: Callable[[Any], Any]
    modules: Sequence[nn.Module]  # that the function reaches
    device: Device
    allowance: Allowance
    sizes: PieceSizes
    to: torch.device | None = None  # where results go; ``None``: they stay where they are
    hooks: Sequence[Hook] = ()
    _ran: list[int] = field(default_factory=list)  # samples of each piece
    _shortages: int = 0
    _peak_bytes: int = 0
    _seconds: float = 0.0
    _is_last_try: bool = False  # of one sample that ran out of memory alone
    _suspects: int = 0  # samples that come next, of which one raises an error
    _error: Exception | None = None  # of all suspects at once; its frames hold nothing
    _raised_by: Indices = range(0)

    def run(self, several: Iterable[Waiting]) -> Iterator[Done]:
        """Run all samples, piece by piece.

        Raises:
            DoesNotFit: One sample alone runs out of memory, twice.
            Exception: The user's own, once all samples that ran before it were handed over.
        """
        for waiting in several:
            while (length := waiting.head(self._ran[-1] if self._ran else 0)) is not None:
                indices = waiting.ready(self._choose_size(waiting, length))
                if (done := self._run_or_search(waiting, indices, length)) is not None:
                    yield done
                del done  # not held while the next piece runs
                if self._error is not None and not self._suspects:
                    self._raise(self._error, self._raised_by)  # no sample was found to raise it alone

    def _run_or_search(self, waiting: Waiting, indices: Indices, length: int) -> Done | None:
        """Run these samples; ``None`` if fewer of them have to run, to fit or to find the one that raises an error."""
        handled = sys.exc_info()[1]
        try:
            done, reason = self._attempt(waiting, indices, length)
            if done is None:
                self._shrink(indices, length, reason)
                return None
        except Exception as error:
            if isinstance(error, DoesNotFit) and self._error is not None:
                self._suspects = 0  # the search ends here, with the error that it is about
                return None
            if isinstance(error, AutobatchError):  # which names its samples
                raise
            if len(indices) == 1 or ends_context(error):
                self._raise(error, indices)
            if self._error is None:
                self._error, self._raised_by = error, indices
                clear_frames(error, handled)
            self._suspects = len(indices)
            return None
        self._is_last_try, self._suspects = False, max(self._suspects - len(indices), 0)
        return done

    @property
    def may_send_results(self) -> bool:  # so that ``to="cpu"`` would leave more memory on the device
        return self.device.torch_device.type != "cpu" and (self.to is None or self.to.type != "cpu")

    def report(self) -> None:
        """Report what was done, in one line."""
        done = MapFinished(
            samples=sum(self._ran),
            pieces=len(self._ran),
            smallest=min(self._ran, default=0),
            largest=max(self._ran, default=0),
            shortages=self._shortages,
            peak_bytes=self._peak_bytes,
            budget_bytes=self.allowance.budget_bytes,
            device=self.device.describe().name,
            seconds=self._seconds,
        )
        emit(done)

    def _choose_size(self, waiting: Waiting, length: int) -> int:
        if self._is_last_try:
            return 1
        room = self.device.limit_bytes(self.allowance.limit_bytes) - self.device.usage().allocated
        samples = self.sizes.next_samples(length, room, waiting.left())
        return min(samples, max(self._suspects // 2, 1)) if self._suspects else samples

    def _raise(self, error: Exception, indices: Indices) -> NoReturn:
        """Raise an error of the user's function with the sample that raised it, or the samples."""
        self._error, sample = None, indices[0] if len(indices) == 1 else None
        where = f"samples {min(indices)} to {max(indices)}, of which none alone was found to raise it"
        add_note(error, f"autobatch.map: raised by {where if sample is None else f'sample {sample}'}")
        set_attributes(error, sample_index=sample)
        try:
            raise error
        finally:
            del error  # its traceback has this frame

    def _attempt(self, waiting: Waiting, indices: Indices, length: int) -> tuple[Done | None, str]:
        """Run these samples; if memory runs out, restore generators and return the reason."""
        tensors = [tensor for tensor in waiting.tensors(len(indices)) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        self.device.watch(tensors)
        undo, before = None, self.device.usage()
        self.device.reset_peak()
        started, handled, reason = time.perf_counter(), sys.exc_info()[1], ""
        try:
            # Generators only: buffers do not move in eval mode, and those of a quantized model are its weights.
            undo = Undo(None, self.device.torch_device)
            result = self._run(waiting, indices)
        except Exception as error:
            if not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        self._seconds += time.perf_counter() - started
        if [tensor._version for tensor in tensors] != versions:
            raise InvalidArgument(
                "fn wrote into its batch in place, so a piece that is run again would see it changed; work on a copy"
            )
        if reason:  # after the ``except`` block, whose error holds the piece's tensors
            self.device.reclaim()
            if undo is not None:
                undo.restore()
            return None, reason
        self._note(len(indices), length, before, time.perf_counter() - started)
        waiting.drop(len(indices))
        return (indices, result), ""

    def _run(self, waiting: Waiting, indices: Indices) -> Any:
        samples = len(indices)
        with (
            torch.no_grad(),
            eval_mode(self.modules),
            self.device.limit(self.allowance.budget_bytes),
            self.device.micro_batch(samples) or nullcontext(),
        ):
            result = self.function(waiting.batch(samples, self.device))
            check_result(result, samples)
            return result if self.to is None else map_tensors(result, lambda tensor: tensor.to(self.to))

    def _note(self, samples: int, length: int, before: MemoryUsage, seconds: float) -> None:
        """Learn from a piece that ran."""
        after = self.device.usage()
        # What the allocator holds from larger pieces is no need of this one.
        took_more = after.peak_reserved > before.reserved
        growth = max(after.peak_allocated, after.peak_reserved if took_more else 0) - before.allocated
        piece = Piece(samples, length, max(growth, 0), max(after.peak_allocated - before.allocated, 0))
        self.sizes = self.sizes.after_piece(piece, thrashed=after.alloc_retries > before.alloc_retries)
        peak = max(after.peak_reserved, after.peak_allocated)
        self._peak_bytes = max(self._peak_bytes, peak)
        self._ran.append(samples)
        event = PieceFinished(
            samples=samples,
            samples_done=sum(self._ran),
            peak_bytes=peak,
            budget_bytes=self.allowance.budget_bytes,
            seconds=seconds,
        )
        emit(event, self.hooks)

    def _shrink(self, indices: Indices, length: int, reason: str) -> None:
        self._shortages += 1
        used, budget = self.device.usage().allocated, self.allowance.budget_bytes
        if len(indices) == 1 and self._is_last_try:
            advice = ", or send results to the host with to='cpu'" if self.may_send_results else ""
            error = DoesNotFit(
                f"sample {indices[0]} alone does not fit: {format_bytes(used)} of a budget of {format_bytes(budget)} "
                f"were held before it; {reason}: free memory, or pass a larger budget={advice}"
            )
            error.sample_index = indices[0]
            raise error
        if len(indices) == 1:
            self._is_last_try = True  # another process may have taken the memory for a moment
        else:
            self.sizes = self.sizes.after_shortage(len(indices), length)
        emit(PieceRetried(samples=len(indices), used_bytes=used, budget_bytes=budget, reason=reason), self.hooks)


@contextmanager
def eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep all layers of these modules in eval mode inside the block, unless the block changes that."""
    modes = [(layer, layer.training) for module in modules for layer in module.modules()]
    trained = [(module, module.training) for module in modules if any(layer.training for layer in module.modules())]
    try:
        for module, _ in trained:
            module.eval()
        yield
    finally:
        with deferred_interrupts():
            for module, mode in trained:
                module.train(mode)  # by the method, which a module may have of its own: LoRA layers unmerge there
            for layer, mode in modes:
                layer.training = mode
