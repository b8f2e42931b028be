"""Measures how long a rank works without the others."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class OwnTime:
    """Seconds in which this rank works without the others, from ``start`` or ``resume`` to ``stop``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._marks: list[Any] = []  # of the step that runs: the clock's seconds, or on CUDA events
        # The host is ahead of a CUDA device: work that was just queued has not run.
        self._pending: deque[list[Any]] = deque()

    def start(self) -> None:
        """Begin a step."""
        self._marks = [self._mark()]

    def stop(self) -> None:
        """Stop counting; a second call before the next ``start`` or ``resume`` does nothing."""
        if len(self._marks) % 2:
            self._marks.append(self._mark())
            if not self._pending or self._pending[-1] is not self._marks:
                self._pending.append(self._marks)

    def resume(self) -> None:
        """Count on in the same step."""
        if len(self._marks) % 2 == 0:
            self._marks.append(self._mark())

    def read(self) -> float:
        """Return the seconds of the last step that the device has finished; 0 before the first."""
        while self._pending and (self._device.type != "cuda" or self._pending[0][-1].query()):
            marks = self._pending.popleft()
            self._seconds = sum(map(self._measure, marks[::2], marks[1::2]))
        return self._seconds

    def _measure(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last) / 1000 if self._device.type == "cuda" else last - first)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
