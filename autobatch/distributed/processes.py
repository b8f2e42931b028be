"""Says where the process of each rank runs, and whether one on this machine still does.

Covers Linux, by ``/proc``; elsewhere, and for a rank on another machine, nothing is known. Does not cover whether a
rank is making progress.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process", "describe_state", "find_process"]

_STOPPED = frozenset("Tt")
_ENDED = frozenset("ZX")


class Process(NamedTuple):
    """A process, as another one on the same machine finds it.

    Attributes:
        host: The machine's name.
        namespace: Within which the number counts; empty where that is unknown.
        pid: Its number.
        started: When it started, in ticks of the kernel's clock: a number may be given to another process later.
    """

    host: str
    namespace: str
    pid: int
    started: int


def find_process() -> Process:
    """This process."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    _, started = _read_stat(os.getpid())
    return Process(socket.gethostname(), namespace, os.getpid(), started)


def describe_state(process: Process) -> str:
    """What has become of it: ``"has ended"``, ``"is stopped"``, ``"is running"``, or ``""`` where that is unknown."""
    here = find_process()
    if not here.namespace or here[:2] != process[:2]:
        return ""
    state, started = _read_stat(process.pid)
    if started != process.started or state in _ENDED:
        return "has ended"
    return "is stopped" if state in _STOPPED else "is running"


def _read_stat(pid: int) -> tuple[str, int]:
    """State and start of a process (``man 5 proc``); ``("", 0)`` if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[19])
