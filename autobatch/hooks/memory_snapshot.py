"""Writes torch's own memory snapshot when a step runs out of CUDA memory, for torch's viewer."""

from __future__ import annotations

import importlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from autobatch._arguments import check_path
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook, Retried, StepFailed
from autobatch.ledger.database import find_home

__all__ = ["memory_snapshot"]

logger = logging.getLogger("autobatch")


def memory_snapshot(folder: str | os.PathLike[str] | None = None, *, most: int = 3, entries: int = 100_000) -> Hook:
    """Write a snapshot of CUDA's memory each time a step runs out of it, up to so many.

    torch records every allocation from here on, which takes time and the memory of the entries. The files open in
    torch's viewer (pytorch.org/memory_viz). Without CUDA it costs one log line.

    Args:
        folder: Where to; default: ``snapshots`` beside the ledger.
        most: Of one hook; later shortages are like the first ones, and a file takes megabytes.
        entries: How many of the last allocations are in it.

    Raises:
        InvalidArgument: The folder is no path, or a number is no int of at least 1.
    """
    for name, value in (("most", most), ("entries", entries)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"memory_snapshot({name}={show_value(value)}): pass an int of at least 1")
    target = find_home() / "snapshots" if folder is None else check_path("memory_snapshot", folder)
    memory = importlib.import_module("torch").cuda.memory
    recording = _start_recording(memory, entries)
    written: list[Path] = []

    def write(event: Event, /) -> None:
        if not recording or len(written) >= most:
            return
        if isinstance(event, Retried) or (isinstance(event, StepFailed) and event.out_of_memory):
            target.mkdir(parents=True, exist_ok=True)
            moment = time.strftime("%Y%m%d-%H%M%S")
            path = target / f"{moment}-{os.getpid()}-step{event.step}-{len(written)}.pickle"
            memory._dump_snapshot(str(path))  # noqa: SLF001 - documented by torch under this name, with no other
            written.append(path)
            logger.info("autobatch: memory when step %d ran out of it: %s", event.step, path)

    return write


def _start_recording(memory: Any, entries: int) -> bool:
    try:
        memory._record_memory_history(max_entries=entries)  # noqa: SLF001 - as above
    except (RuntimeError, AttributeError, AssertionError) as error:
        logger.warning("autobatch: no memory snapshots will be written: %s", str(error).split("\n")[0])
        return False
    return True
