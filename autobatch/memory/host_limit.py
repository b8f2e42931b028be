"""Reads how much memory this process may use on the host: the container's limit, or the machine's RAM.

Linux has control groups, version 1 and 2, each with all its parents, and ``/proc/meminfo``. Windows has a call. Other
systems report only the installed RAM.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autobatch.records import Record

# By version: the files with limit and use, and the line of `memory.stat` with the page cache that can be dropped.
_GROUP_FILES = {
    "cgroup v2": ("memory.max", "memory.current", "inactive_file "),
    "cgroup v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
}


class HostMemory(Record):
    """Memory of the host for this process, in bytes."""

    total_bytes: int  # the tightest limit, whoever uses how much
    available_bytes: int  # until any limit is met; page cache that can be dropped counts as free
    source: str  # origin of ``total_bytes``: "cgroup v2", "cgroup v1" or "RAM"


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    limits = [_read_ram(root), *_control_groups(root)]
    tightest = min(limits, key=lambda limit: limit.total_bytes)
    return tightest.model_copy(update={"available_bytes": min(limit.available_bytes for limit in limits)})


def _read_ram(root: Path) -> HostMemory:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        if sys.platform == "win32":
            return _read_windows()
        if not hasattr(os, "sysconf"):
            raise OSError(
                "this platform does not report how much memory it has; pass budget= (bytes, or a text such as '8GiB')"
            ) from None
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HostMemory(total_bytes=total, available_bytes=available, source="RAM")


def _read_windows() -> HostMemory:
    """Call ``GlobalMemoryStatusEx``. Its structure begins with its own size and a percentage."""
    status = (ctypes.c_uint64 * 8)(64)
    windll: Any = getattr(ctypes, "windll", None)
    if not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("Windows does not report how much memory it has; pass budget= (bytes, or a text such as '8GiB')")
    return HostMemory(total_bytes=status[1], available_bytes=status[2], source="RAM")


def _control_groups(root: Path) -> Iterator[HostMemory]:
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            mount, source = root / "sys/fs/cgroup", "cgroup v2"
        elif "memory" in controllers.split(","):
            mount, source = root / "sys/fs/cgroup/memory", "cgroup v1"
        else:
            continue
        # Inside a container the path is often the host's and does not exist here. Then the mount is our own group.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            if (limit := _read_group(mount.joinpath(*parts[:depth]), source)) is not None:
                yield limit


def _read_group(folder: Path, source: str) -> HostMemory | None:
    *names, cache = _GROUP_FILES[source]
    try:
        limit, used = (int((folder / name).read_text()) for name in names)  # no limit is "max", a ValueError
    except (OSError, ValueError):
        return None
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        droppable = next(int(line.split()[1]) for line in lines if line.startswith(cache))
    except (OSError, ValueError, StopIteration, IndexError):
        droppable = 0
    held = max(used - droppable, 0)
    return HostMemory(total_bytes=limit, available_bytes=max(limit - held, 0), source=source)
