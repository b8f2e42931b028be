"""Writes a line for each event: as JSON to a file (``jsonl``), or as text for a person (``console``).

Covers lines that stay whole when a run is killed or a progress bar of tqdm is shown. Does not cover rich's bars: its
``Console.print`` can be given as ``write``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable

from autobatch._arguments import check_path
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook

__all__ = ["console", "jsonl"]


def jsonl(path: str | os.PathLike[str]) -> Hook:
    """Append each event to a file: its ``event``, its ``time`` (seconds since 1970, UTC), and its fields.

    Several processes may write to one file: a line is appended in one piece.

    Args:
        path: The file; its folder is made if it does not exist. On a full disk a line may be cut: that is an error,
            and the next one begins on a line of its own.

    Raises:
        InvalidArgument: It is no path, or a folder.
        OSError: Its folder cannot be made.
    """
    target = check_path("jsonl", path)
    if target.is_dir():
        raise InvalidArgument(f"jsonl({str(path)!r}) is a folder: name a file in it")
    target.parent.mkdir(parents=True, exist_ok=True)
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
    """Write a line on stderr for each event of at least this level, above a bar of tqdm if one is shown.

    Args:
        level: As in ``logging``: steps that went well are ``DEBUG``, retries ``WARNING``.
        write: What prints a line instead.

    Raises:
        InvalidArgument: The level is no number, or ``write`` cannot be called.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        raise InvalidArgument(f"console(level={show_value(level)}): pass a level of logging, such as logging.INFO")
    if write is not None and not callable(write):
        raise InvalidArgument(f"console(write={show_value(write)}) cannot be called: pass write(line)")

    def show(event: Event, /) -> None:
        if event.level >= level:
            (write or _write_above_bars)(str(event))

    return show


def _write_above_bars(line: str) -> None:
    # Who has a bar has imported tqdm; nobody else needs it.
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and hasattr(tqdm, "tqdm"):
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")
