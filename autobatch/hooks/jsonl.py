"""A file with a line of JSON for each event.

Covers writing it so that a run that is killed leaves whole lines. Does not cover reading it: any tool does.
"""

from __future__ import annotations

import json
import os
import time

from autobatch._arguments import check_path
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook

__all__ = ["jsonl"]


def jsonl(path: str | os.PathLike[str]) -> Hook:
    """Append each event to a file: its ``event``, its ``time`` (seconds since 1970, UTC), and its fields.

    Several processes may write to one file: a line is appended in one piece.

    Args:
        path: The file; its folder is made where it is not there. On a full disk a line may be cut: that is an error,
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
