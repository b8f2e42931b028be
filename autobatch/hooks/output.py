"""Makes hooks that write events to a file as JSON or to stderr as text, and torch's memory snapshots."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from autobatch._arguments import check_path
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook, Retried, StepFailed
from autobatch.ledger.ledger import find_home

logger = logging.getLogger("autobatch")


def jsonl(path: str | os.PathLike[str]) -> Hook:
    """Append each event to a file: its ``event``, its ``time`` (seconds since 1970, UTC), and its fields.

    Several processes may write to one file: a line is appended in one piece.

    Args:
        path: The file; its folder is made if it does not exist. On a full disk a line may be cut: the hook raises,
            and the next event begins a new line.

    Raises:
        InvalidArgument: The argument is not a path, or the file cannot be written.
    """
    target = check_path("jsonl", path, "events.jsonl")
    try:
        with suppress(FileExistsError):  # a file in the place of a folder, which open() explains better
            target.parent.mkdir(parents=True, exist_ok=True)
        target.open("ab").close()
    except OSError as error:
        raise InvalidArgument(
            f"jsonl({show_value(str(path))}) cannot be written ({error.strerror}): name a file that can be written"
        ) from None
    before = b""

    def write(event: Event, /) -> None:
        nonlocal before
        line = json.dumps({"event": type(event).__name__, "time": time.time(), **event.model_dump(mode="json")})
        content = before + line.encode() + b"\n"
        with target.open("ab", buffering=0) as file:
            written = file.write(content)
        before = b"" if written == len(content) else b"\n"
        if before:
            raise OSError(f"{written} of {len(content)} bytes of a line were written to {target}")

    return write


def console(level: int = logging.INFO, write: Callable[[str], object] | None = None) -> Hook:
    """Write a line on stderr for each event of at least this level, above a bar of tqdm if there is one.

    Args:
        level: Level of ``logging``: finished steps are ``DEBUG``, retries ``WARNING``.
        write: Function that prints a line, such as the ``Console.print`` of rich.

    Raises:
        InvalidArgument: The level is not a number, or ``write`` cannot be called.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        raise InvalidArgument(f"console(level={show_value(level)}): pass a level of logging, such as logging.INFO")
    if write is not None and not callable(write):
        raise InvalidArgument(f"console(write={show_value(write)}) cannot be called: pass write(line)")

    def show(event: Event, /) -> None:
        if event.level >= level:
            (write or _write_above_bars)(f"autobatch: {event}")

    return show


def _write_above_bars(line: str) -> None:
    tqdm = sys.modules.get("tqdm")  # a program with a bar has imported it
    if tqdm is not None and hasattr(tqdm, "tqdm"):
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")


def memory_snapshot(folder: str | os.PathLike[str] | None = None, *, most: int = 3, entries: int = 100_000) -> Hook:
    """Write a snapshot of CUDA's memory each time a step runs out of it, up to so many.

    torch records every allocation from now on, which takes time and the memory of the entries. The files open in
    torch's viewer (pytorch.org/memory_viz). Without CUDA it costs one log line.

    Args:
        folder: Folder of the files; default: ``snapshots`` beside the ledger.
        most: Most files of one hook. Later shortages are like the first ones, and a file takes megabytes.
        entries: Number of the last allocations in a file.

    Raises:
        InvalidArgument: The folder is not a path, or a number is not an int of at least 1.
    """
    for name, value in (("most", most), ("entries", entries)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"memory_snapshot({name}={show_value(value)}): pass an int of at least 1")
    target = find_home() / "snapshots" if folder is None else check_path("memory_snapshot", folder, "snapshots")
    memory = importlib.import_module("torch").cuda.memory
    left = most
    try:
        memory._record_memory_history(max_entries=entries)  # noqa: SLF001 - documented by torch under this name only
    except (RuntimeError, AttributeError, AssertionError) as error:
        logger.warning("no memory snapshots will be written: %s", str(error).split("\n")[0])
        left = 0

    def write(event: Event, /) -> None:
        nonlocal left
        if left and (isinstance(event, Retried) or (isinstance(event, StepFailed) and event.out_of_memory)):
            target.mkdir(parents=True, exist_ok=True)
            moment = time.strftime("%Y%m%d-%H%M%S")
            path = target / f"{moment}-{os.getpid()}-step{event.step}-{most - left}.pickle"
            memory._dump_snapshot(str(path))  # noqa: SLF001 - the same
            left -= 1
            logger.info("memory when step %d ran out of it: %s", event.step, path)

    return write
