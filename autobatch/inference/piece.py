"""Runs a function on the next samples that fit, measures what they take, and goes on with fewer after a shortage.

Every piece is work that is kept: nothing is searched for beforehand. Running out of memory costs the one piece in which
it happened; any other error is the user's, and the sample that raises it is looked for. Does not cover which size is
next (``planning.piece_size``), which samples (``samples``), nor what becomes of results (``mapping``).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autobatch._formatting import format_bytes
from autobatch._user_errors import add_note
from autobatch.batch.tree import map_tensors
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument
from autobatch.events import Hook, MapFinished, PieceFinished, PieceRetried, emit
from autobatch.inference.guards import WatchedArrays, eval_mode, set_attributes
from autobatch.inference.results import Indices, check_result
from autobatch.inference.samples import Waiting
from autobatch.memory.device import Device
from autobatch.memory.devices import Allowance
from autobatch.memory.oom import describe_error, ends_context, is_oom
from autobatch.planning.piece_size import Piece, PieceSizes
from autobatch.records import MemoryUsage
from autobatch.undo.random_state import RandomState

__all__ = ["Done", "PieceRunner"]


@dataclass(frozen=True, eq=False)
class Done:
    """A piece that has run.

    Attributes:
        indices: Of its samples.
        result: What the function returned, with one entry a sample.
    """

    indices: Indices
    result: Any


@dataclass
class PieceRunner:
    """Runs one function on one device, piece by piece.

    Attributes:
        function: Called with a batch.
        modules: Those that it reaches, which are in eval mode meanwhile.
        device: Where pieces run.
        allowance: The budget that is enforced, and the limit that sizes aim at.
        sizes: What pieces took up to now.
        to: Where results go; ``None``: they stay where they are.
        hooks: Called with each event.
    """

    function: Callable[[Any], Any]
    modules: Sequence[nn.Module]
    device: Device
    allowance: Allowance
    sizes: PieceSizes
    to: torch.device | None = None
    hooks: Sequence[Hook] = ()
    samples: int = 0  # that are done
    pieces: int = 0
    smallest: int = 0  # of these
    largest: int = 0
    shortages: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    _before_error: deque[Done] = field(default_factory=deque)
    _error: Exception | None = None
    _last: int = 0  # samples in the last piece
    _once_more: bool = False  # whether the next sample ran out of memory by itself

    def run_next(self, waiting: Waiting) -> Done | None:
        """Run the next piece, after as many shortages as it takes; ``None`` where no sample is left.

        Raises:
            DoesNotFit: One sample alone runs out of memory, twice.
            Exception: The user's own, once all samples that ran before it were handed over.
        """
        while not self._before_error and self._error is None:
            length = waiting.head(self._last)
            if length is None:
                return None
            samples = 1 if self._once_more else self.sizes.next_samples(length, self._room(), waiting.left())
            indices = waiting.ready(samples)
            try:
                done, reason = self._attempt(waiting, indices, length)
            except Exception as raised:  # noqa: BLE001 - the user's own, which is raised below
                self._error = raised
            else:
                if done is not None:
                    self._once_more = False
                    return done
                self._shrink(indices, length, reason)
                continue
            self._search(waiting, indices, length, self._error)
        if self._before_error:
            return self._before_error.popleft()
        error, self._error = self._error, None
        try:
            assert error is not None  # noqa: S101 - else the loop would go on
            raise error
        finally:
            del error  # its traceback has this frame

    @property
    def may_send_results(self) -> bool:
        """Whether ``to="cpu"`` would leave more memory on the device."""
        return self.device.torch_device.type != "cpu" and (self.to is None or self.to.type != "cpu")

    def report(self) -> None:
        """Say what was done, in one line."""
        event = MapFinished(
            samples=self.samples,
            pieces=self.pieces,
            smallest=self.smallest,
            largest=self.largest,
            shortages=self.shortages,
            peak_bytes=self.peak_bytes,
            budget_bytes=self.allowance.budget_bytes,
            device=self.device.describe().name,
            seconds=self.seconds,
        )
        emit(event)

    def _attempt(self, waiting: Waiting, indices: Indices, length: int) -> tuple[Done | None, str]:
        """Run these samples; where memory ended, returns why, and leaves generators as before."""
        tensors = [tensor for tensor in waiting.tensors(len(indices)) if not tensor.is_inference()]
        versions, arrays, wrote = [tensor._version for tensor in tensors], WatchedArrays(waiting.arrays(indices)), False
        self.device.watch(tensors)
        random, before = None, self.device.usage()
        self.device.reset_peak()
        started, handled, reason = time.perf_counter(), sys.exc_info()[1], ""
        try:
            random = RandomState(self.device.torch_device)
            try:
                result = self._run(waiting, indices)
            finally:
                wrote = arrays.put_back()  # also after an error, whose sample is looked for in what was given
        except Exception as error:
            if not is_oom(error, handled=handled):
                raise
            reason = describe_error(error, handled=handled)
        self.seconds += time.perf_counter() - started
        if wrote or any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
            raise InvalidArgument(
                "fn wrote into its batch in place, so a piece that is run again would see it changed; work on a copy"
            )
        # After the ``except`` block, whose error holds the piece's tensors.
        if reason:
            self.device.reclaim()
            if random is not None:
                random.restore()
            return None, reason
        self._note(len(indices), length, before, time.perf_counter() - started)
        waiting.drop(len(indices))
        return Done(indices, result), ""

    def _run(self, waiting: Waiting, indices: Indices) -> Any:
        samples = len(indices)
        with (
            torch.no_grad(),
            eval_mode(self.modules),
            self.device.limit(self.allowance.budget_bytes),
            self.device.micro_batch(samples) or nullcontext(),
        ):
            result = self.function(waiting.batch(indices, self.device))
            check_result(result, samples)
            return result if self.to is None else map_tensors(result, lambda tensor: tensor.to(self.to))

    def _note(self, samples: int, length: int, before: MemoryUsage, seconds: float) -> None:
        """Learn from a piece that ran."""
        after = self.device.usage()
        # What the allocator holds from larger pieces is no need of this one.
        took_more = after.peak_reserved > before.reserved
        peak = max(after.peak_allocated, after.peak_reserved if took_more else 0)
        tensors = max(after.peak_allocated - before.allocated, 0)
        piece = Piece(samples, length, max(peak - before.allocated, 0), tensors)
        self.sizes = self.sizes.after_piece(piece, thrashed=after.alloc_retries > before.alloc_retries)
        self.peak_bytes = max(self.peak_bytes, after.peak_reserved, after.peak_allocated)
        self.samples, self.pieces, self._last = self.samples + samples, self.pieces + 1, samples
        self.smallest, self.largest = min(self.smallest or samples, samples), max(self.largest, samples)
        event = PieceFinished(
            samples=samples,
            samples_done=self.samples,
            peak_bytes=max(after.peak_reserved, after.peak_allocated),
            budget_bytes=self.allowance.budget_bytes,
            seconds=seconds,
        )
        emit(event, self.hooks)

    def _shrink(self, indices: Indices, length: int, reason: str) -> None:
        self.shortages += 1
        used, budget = self.device.usage().allocated, self.allowance.budget_bytes
        if len(indices) == 1 and self._once_more:
            advice = ", or send results to the host with to='cpu'" if self.may_send_results else ""
            error = DoesNotFit(
                f"sample {indices[0]} alone does not fit: {format_bytes(used)} of a budget of {format_bytes(budget)} "
                f"were held before it; {reason}: free memory, or pass a larger budget="
                f"{advice}"
            )
            error.sample_index = indices[0]
            raise error
        if len(indices) == 1:
            self._once_more = True  # another process may have taken the memory for a moment
        else:
            self.sizes = self.sizes.after_shortage(len(indices), length)
        emit(PieceRetried(samples=len(indices), used_bytes=used, budget_bytes=budget, reason=reason), self.hooks)

    def _room(self) -> int:
        """Bytes that a piece may take now, with the headroom left free."""
        return self.device.limit_bytes(self.allowance.limit_bytes) - self.device.usage().allocated

    def _search(self, waiting: Waiting, indices: Indices, length: int, error: Exception) -> None:
        """Find the sample of a piece that raises this error, and note it on the error.

        Halves are run until one sample is left. The results of those before it are kept, so no sample that is well is
        run twice after this. Where no sample raises it alone, the whole piece is named.
        """
        if isinstance(error, AutobatchError):
            return  # says itself what is wrong, with all samples
        bad = indices[0] if len(indices) == 1 else None
        if bad is None and not ends_context(error):
            bad = self._halve(waiting, indices, length, type(error))
        where = f"samples {min(indices)} to {max(indices)}, of which none alone was found to raise it"
        add_note(error, f"autobatch.map: raised by {where if bad is None else f'sample {bad}'}")
        set_attributes(error, sample_index=bad)

    def _halve(self, waiting: Waiting, indices: Indices, length: int, kind: type[Exception]) -> int | None:
        suspects, is_sure = indices, False
        while not is_sure:
            is_sure = len(suspects) == 1
            half = waiting.ready(max(len(suspects) // 2, 1))
            done, raised = None, False
            try:
                done, _ = self._attempt(waiting, half, length)
            except Exception as error:  # noqa: BLE001 - the first one of its kind is raised
                raised = type(error) is kind
            if done is not None:
                self._before_error.append(done)
                if is_sure:
                    return None
                suspects = suspects[len(half) :]
            elif raised:
                suspects, is_sure = half, len(half) == 1
            else:
                return None
        return suspects[0]
