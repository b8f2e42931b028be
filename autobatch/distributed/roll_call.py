"""Finds out which ranks are lost after a collective broke off, so that every rank names the same ones.

A process has ended if ``/proc`` says so (Linux, same machine), or if its rank does not answer in the store.
"""

# ruff: noqa: SLF001 - torch has no public name for its default store

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Process", "RollCall", "describe_state", "find_process", "in_words"]

_SECONDS = 2.0


class RollCall:
    """The ranks of a process group, as messages name them.

    Attributes:
        processes: Of each rank; empty before all have said theirs.
    """

    def __init__(self, members: Sequence[int], rank: int, group_name: str) -> None:
        """``members`` are numbers in the default process group, ``rank`` is this process's place among them."""
        self.processes: Sequence[Process] = ()
        self._members, self._rank, self._world_size = members, rank, dist.get_world_size()
        self._prefix = f"autobatch/{group_name}/"

    def name(self, rank: int) -> str:
        """A rank, by its number among all ranks of the job."""
        return f"rank {self._members[rank]} of {self._world_size}"

    def name_absent(self, store: Any) -> str:
        """Who has set no ``came/<rank>`` in this store, which each does before it waits for the others."""
        ranks = range(len(self._members))
        absent = _ask_store(lambda _: [rank for rank in ranks if not store.check([f"came/{rank}"])])
        return ", ".join(map(self.name, absent or ())) or f"a rank of {self._name_all()}"

    def find_lost(self, reason: str, occasion: int, timeout: timedelta) -> str:
        """Who is gone; all ranks say what the first one to notice found, as its own process may be gone by then.

        Args:
            reason: What the collective raised here.
            occasion: The same number on each rank; another one for each roll call.
            timeout: How long the collective waited.
        """
        lost = self._call(occasion)
        states = self._read_states()
        listed = "; ".join(self._describe(rank, states[rank] if states else "") for rank in lost)
        if not listed:
            listed = f"a rank of {self._name_all()} is gone or did not answer within {in_words(timeout)}"
        return self.publish(f"{listed} ({reason})")

    def publish(self, reason: str) -> str:
        """Put the reason into the store for all ranks; returns another rank's, where one was there before."""
        first = _ask_store(lambda store: store.compare_set(f"{self._prefix}lost", "", reason))
        return reason if first is None else str(first.decode())

    def _call(self, occasion: int) -> Sequence[int]:
        """Whose process has ended, or else who does not answer in the store within two seconds.

        A process that was killed closes its sockets a moment before it counts as ended.
        """
        missing: list[int] = [rank for rank in range(len(self._members)) if rank != self._rank]
        end, place = time.monotonic() + _SECONDS, f"{self._prefix}{occasion}/"
        is_there = _ask_store(lambda store: store.set(f"{place}{self._members[self._rank]}", "here") or True)
        while missing and time.monotonic() < end:
            if ended := self._find("has ended"):
                return ended
            absent = _ask_store(partial(self._find_absent, missing, place)) if is_there else None
            is_there, missing = absent is not None, missing if absent is None else absent
            time.sleep(0.05)
        return missing if is_there else self._find("is stopped")

    def _find_absent(self, ranks: Sequence[int], place: str, store: Any) -> list[int]:
        return [rank for rank in ranks if not store.check([f"{place}{self._members[rank]}"])]

    def _find(self, wanted: str) -> list[int]:
        return [rank for rank, state in enumerate(self._read_states()) if state == wanted]

    def _read_states(self) -> list[str]:
        return [describe_state(process) for process in self.processes]

    def _describe(self, rank: int, state: str) -> str:
        if state == "has ended":
            return f"{self.name(rank)} is gone: its process {self.processes[rank].pid} has ended"
        known = f", and its process {self.processes[rank].pid} {state}" if state else ""
        return f"{self.name(rank)} did not answer{known}"

    def _name_all(self) -> str:
        size = len(self._members)
        return f"{size}" if size == self._world_size else f"{[*self._members]}"


def _ask_store(question: Callable[[Any], Any]) -> Any:
    """Ask the store of the default process group; ``None`` where it is gone or says nothing for two seconds.

    In a thread of its own: where the process that has the store is stopped, torch waits for good.
    """
    answers: list[Any] = []

    def ask() -> None:
        with suppress(RuntimeError, AttributeError):
            answers.append(question(dist.distributed_c10d._get_default_store()))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS)
    return answers[0] if answers else None


def in_words(time_limit: timedelta) -> str:
    """Seconds, or minutes where these are many."""
    seconds = time_limit.total_seconds()
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


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
