"""Asks NVIDIA's driver about a card: its memory, and the other processes that hold some of it.

Inside a container the driver may number processes as the host does. Then this process looks like another one.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autobatch.records import Record, Tenant

logger = logging.getLogger("autobatch")
_logged = threading.Event()  # set once a line is logged

# A process with a compute and a graphics context is in both lists, with the same total.
_PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


class CardReading(Record):
    """A card, or a MIG slice of one, as the driver sees it."""

    uuid: str  # with its prefix: "GPU-..." or "MIG-..."
    total_bytes: int  # the driver's own part included; 0 if the card shares the host's memory
    free_bytes: int  # 0 as above
    tenants: tuple[Tenant, ...] = ()  # other processes whose memory the driver reports, the largest first
    driver: str = ""
    name: str = ""
    divided: bool = False  # into MIG slices, whose memory is not read here


def query(uuid: str) -> CardReading | None:
    """Read one card or slice, by its uuid with or without prefix; return ``None`` and log one line if that fails.

    It takes no index, since CUDA and NVML number cards differently.
    """
    try:
        with _session() as nvml:
            return _read_card(nvml, *_find(nvml, uuid))
    except Exception as error:  # noqa: BLE001 (a missing or wrong module, ctypes, the driver: all mean unknown)
        _log_once(f"{type(error).__name__}: {error}")
        return None


def query_all() -> tuple[CardReading, ...]:
    """Read every card of the driver, in its order; raise LookupError if the driver cannot be asked."""
    try:
        with _session() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return tuple(_read_card(nvml, _text(nvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles)
    except Exception as error:
        raise LookupError(f"{type(error).__name__}: {error}") from error


def read_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver can run, such as ``(13, 0)``; ``None`` without a driver."""
    try:
        with _session() as nvml:
            version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except Exception:  # noqa: BLE001 (as in query)
        return None
    return version // 1000, version % 1000 // 10


@contextmanager
def _session() -> Iterator[Any]:
    # The driver counts these calls, so other uses of it are not affected.
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _read_card(nvml: Any, uuid: str, handle: Any) -> CardReading:
    total, free = _read_memory(nvml, handle)
    tenants = (
        Tenant(pid=pid, used_bytes=used, name=_name_program(_text(_ask(nvml, "nvmlSystemGetProcessName", pid))))
        for pid, used in _list_processes(nvml, handle).items()
        if pid != os.getpid()
    )
    return CardReading(
        uuid=uuid,
        total_bytes=total,
        free_bytes=free,
        tenants=tuple(sorted(tenants, key=lambda tenant: (-tenant.used_bytes, tenant.pid))),
        driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)),
        divided=_is_divided(nvml, handle),
    )


def _name_program(command: str) -> str:
    """Return the program without its folder and arguments, which may be private."""
    return command.rpartition("\\")[2] if "\\" in command else command.partition(" ")[0].rpartition("/")[2]


def _read_memory(nvml: Any, handle: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except getattr(nvml, "NVMLError_NotSupported", ()):
        return 0, 0
    return int(memory.total), int(memory.free)


def _find(nvml: Any, uuid: str) -> tuple[str, Any]:
    names = (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")
    for name in names:
        handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", name)
        if handle is None:
            continue
        if _is_divided(nvml, handle):
            raise LookupError(f"{name} is divided into MIG slices, and which one is ours is not known")
        return name, handle
    raise LookupError(f"the driver knows no device {' or '.join(names)}")


def _is_divided(nvml: Any, handle: Any) -> bool:
    """Return whether this is a whole card divided into MIG slices. Its totals say nothing about our slice."""
    modes = _ask(nvml, "nvmlDeviceGetMigMode", handle)  # current and pending; refused for a slice and for old cards
    return modes is not None and bool(modes[0])


def _list_processes(nvml: Any, handle: Any) -> dict[int, int]:
    held: dict[int, int] = {}
    # Many cards refuse one or two lists (no graphics on a slice, no MPS in an old driver), and nothing is missed.
    lists = [_ask(nvml, name, handle) for name in _PROCESS_LISTS]
    if all(processes is None for processes in lists):
        _log_once("the driver lists no processes")
    for process in (process for processes in lists for process in processes or ()):
        if process.usedGpuMemory is None:  # on Windows, or for a slice without permission
            _log_once(f"the memory of process {process.pid} is not available")
        else:
            held[process.pid] = max(held.get(process.pid, 0), int(process.usedGpuMemory))
    return held


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return the driver's answer; ``None`` if it refuses or an old module lacks the function."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError, UnicodeDecodeError):
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _log_once(reason: str) -> None:
    if not _logged.is_set():
        _logged.set()
        logger.info("who else holds memory of the GPU is not fully known: %s", reason)
