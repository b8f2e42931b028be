"""Measures how long a rank works in a step without the others: by CUDA events, or by the clock."""

from __future__ import annotations

import time
from collections import deque

import torch

__all__ = ["OwnTime"]


class OwnTime:
    """Seconds between ``start`` and ``stop``, of the last pair that the device has passed."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is measured yet."""
        self._device, self._seconds = device, 0.0
        self._clock = 0.0
        self._event: torch.cuda.Event | None = None
        # On CUDA the host is ahead of the device: what has just been enqueued is not over.
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """Here the rank begins to work on its own."""
        if self._device.type == "cuda":
            self._event = self._mark()
        self._clock = time.perf_counter()

    def stop(self) -> None:
        """Here it has what it says to the others."""
        if self._event is not None:
            self._pending.append((self._event, self._mark()))
        else:
            self._seconds = time.perf_counter() - self._clock

    def read(self) -> float:
        """Seconds of the last pair; on CUDA of the last one that the device has passed, 0 before the first."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds = first.elapsed_time(last) / 1000
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
