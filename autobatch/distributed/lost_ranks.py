"""Finds the lost ranks after a collective broke off, so that every rank names the same ones.

A rank is lost if ``/proc`` shows that its process has ended (Linux, same machine), or if it does not answer in the
store.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_SECONDS = 2.0


class Process(NamedTuple):
    """A process, as another one on the same machine finds it."""

    host: str
    namespace: str  # of the process number; empty if unknown
    pid: int
    started: int  # in ticks of the kernel's clock: the kernel may use the number again later


class LostRanks:
    """Names the ranks of a process group in messages, and finds the lost ones.

    Attributes:
        processes: Process of each rank; empty until all ranks have exchanged theirs.
    """

    def __init__(self, members: Sequence[int], rank: int, group_name: str) -> None:
        """``members`` are numbers in the default process group; ``rank`` is this process's position among them."""
        self.processes: Sequence[Process] = ()
        self._members, self._rank, self._world_size = members, rank, dist.get_world_size()
        self._prefix = f"autobatch/{group_name}/"

    def name(self, rank: int) -> str:
        """Return the number of a rank among all ranks of the job."""
        return f"rank {self._members[rank]} of {self._world_size}"

    def name_absent(self, store: Any) -> str:
        """Name the ranks that have not set ``came/<rank>`` in this store, which each does before it waits."""
        ranks = range(len(self._members))
        absent = _ask_store(lambda _: [rank for rank in ranks if not store.check([f"came/{rank}"])])
        return ", ".join(map(self.name, absent or ())) or f"a rank of {self._name_all()}"

    def find(self, reason: str, occasion: int, timeout: timedelta) -> str:
        """Describe the lost ranks. All ranks use the words of the first one that noticed the loss.

        ``occasion`` is the number of the collective, the same on each rank.
        """
        listed = "; ".join(map(self._describe, self._find_silent(occasion)))
        if not listed:
            listed = f"a rank of {self._name_all()} is gone or did not answer within {show_seconds(timeout)}"
        return self.publish(f"{listed} ({reason})")

    def has_lost(self) -> bool:
        """Return whether a rank has published why it cannot continue, or its process has ended."""
        published = _ask_store(lambda store: store.check([f"{self._prefix}lost"]))
        return bool(published or self._find_in_state("has ended"))

    def publish(self, reason: str) -> str:
        """Put the reason into the store for all ranks; return the one that another rank put there first, if any."""
        first = _ask_store(lambda store: store.compare_set(f"{self._prefix}lost", "", reason))
        return reason if first is None else str(first.decode())

    def _find_silent(self, occasion: int) -> Sequence[int]:
        """Return the ranks whose process has ended, or else those that do not answer in the store within two seconds.

        A killed process closes its sockets a moment before the kernel shows it as ended.
        """
        missing = [rank for rank in range(len(self._members)) if rank != self._rank]
        end, prefix = time.monotonic() + _SECONDS, f"{self._prefix}{occasion}/"

        def find_absent(store: Any) -> list[int]:
            return [rank for rank in missing if not store.check([f"{prefix}{rank}"])]

        has_store = _ask_store(lambda store: store.set(f"{prefix}{self._rank}", "here") or True)
        while missing and time.monotonic() < end:
            if ended := self._find_in_state("has ended"):
                return ended
            absent = _ask_store(find_absent) if has_store else None
            has_store, missing = absent is not None, missing if absent is None else absent
            time.sleep(0.05)
        return missing if has_store else self._find_in_state("is stopped")

    def _find_in_state(self, wanted: str) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if describe_state(process) == wanted]

    def _describe(self, rank: int) -> str:
        state = describe_state(self.processes[rank]) if self.processes else ""
        if state == "has ended":
            return f"{self.name(rank)} is gone: its process {self.processes[rank].pid} has ended"
        known = f", and its process {self.processes[rank].pid} {state}" if state else ""
        return f"{self.name(rank)} did not answer{known}"

    def _name_all(self) -> str:
        size = len(self._members)
        return f"{size}" if size == self._world_size else f"{[*self._members]}"


def _ask_store(question: Callable[[Any], Any]) -> Any:
    """Ask the store of the default process group; return ``None`` if it is gone or silent for two seconds.

    A thread asks: if the process that holds the store is stopped, torch waits without end.
    """
    answers: list[Any] = []

    def ask() -> None:
        with suppress(RuntimeError, AttributeError):
            answers.append(question(dist.distributed_c10d._get_default_store()))  # noqa: SLF001 - no public name

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return answers[0] if answers else None


def show_seconds(limit: timedelta) -> str:
    """Show a time limit in seconds, or in minutes from two minutes on."""
    seconds = limit.total_seconds()
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


def find_process() -> Process:
    """Return this process."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return Process(socket.gethostname(), namespace, os.getpid(), _read_stat(os.getpid())[1])


def describe_state(process: Process) -> str:
    """Return ``"has ended"``, ``"is stopped"`` or ``"is running"``; ``""`` if this process cannot see it."""
    here = find_process()
    if not here.namespace or here[:2] != process[:2]:
        return ""
    state, started = _read_stat(process.pid)
    if started != process.started or state in {"Z", "X"}:
        return "has ended"
    return "is stopped" if state in {"T", "t"} else "is running"


def _read_stat(pid: int) -> tuple[str, int]:
    """Read the state and the start time of a process (``man 5 proc``); ``("", 0)`` if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[19])
