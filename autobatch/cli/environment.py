"""Reads software, driver, settings and limits of this machine without torch, and lists its devices."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from autobatch._formatting import format_bytes
from autobatch.cli.output import Answer, Table
from autobatch.memory.host_limit import HostMemory, read_host_memory
from autobatch.memory.nvml import CardReading, query_all, read_cuda_version
from autobatch.prediction.workspaces import find_libraries
from autobatch.records import Record

_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
    "AUTOBATCH_HOME",
)


class Environment(Record):
    """Software, hardware and settings of this machine; a text is empty if there is nothing."""

    torch: str  # version of the package, as below
    torch_cuda: str  # CUDA version of the build
    torch_hip: str
    cudnn: str  # version of the package, if cuBLASLt is there too
    nvml: str  # nvidia-ml-py
    pynvml: str  # the deprecated distribution that takes the same module's name
    cards: tuple[CardReading, ...]
    no_cards_because: str  # reason why there are no cards
    driver_cuda: tuple[int, int] | None  # the newest CUDA that it runs
    settings: dict[str, str]  # environment variables that are set
    is_wsl: bool  # whether this Linux runs inside Windows
    host: HostMemory
    shared_memory_bytes: int  # size of /dev/shm, through which loader processes pass batches; 0 if there is none
    home: str  # folder of the ledger
    ledger_error: str  # reason why nothing can be stored
    server: str = ""  # address of the team's server, and name and role of the token there
    server_error: str = ""  # reason why nothing can be handed in


def read_environment(environment: Mapping[str, str], home: str, ledger_error: str) -> Environment:
    """Read everything; ``environment`` is ``os.environ``, other arguments become fields."""
    cards, missing = _read_cards()
    build = _read_torch_build()
    return Environment(
        torch=_version("torch"),
        torch_cuda=build.get("cuda", ""),
        torch_hip=build.get("hip", ""),
        cudnn=_read_cudnn(),
        nvml=_version("nvidia-ml-py"),
        pynvml=_version("pynvml"),
        cards=cards,
        no_cards_because=missing,
        driver_cuda=read_cuda_version(),
        settings={name: environment[name] for name in _SETTINGS if name in environment},
        is_wsl="microsoft" in platform.release().lower(),
        host=read_host_memory(),
        shared_memory_bytes=_shared_memory_bytes(),
        home=home,
        ledger_error=ledger_error,
    )


def _read_cards() -> tuple[tuple[CardReading, ...], str]:
    """Return the cards as NVIDIA's driver sees them, and the reason if it cannot be asked."""
    try:
        return query_all(), ""
    except LookupError as error:
        return (), str(error)


def _version(distribution: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def _read_cudnn() -> str:
    if find_libraries() is None:
        return ""
    return next(filter(None, map(_version, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"))), "9")


def _read_torch_build() -> dict[str, str]:
    """Read torch's version.py, since importing torch takes a second."""
    specification = importlib.util.find_spec("torch")
    if specification is None or specification.origin is None:
        return {}
    file = Path(specification.origin).with_name("version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))


def _shared_memory_bytes(folder: str = "/dev/shm") -> int:  # noqa: S108 - its size is read, nothing is written
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):
        return 0
    return found.f_frsize * found.f_blocks


def list_devices() -> Answer:
    host = read_host_memory()
    cards, missing = _read_cards()
    free = f"{format_bytes(host.available_bytes)} free of {format_bytes(host.total_bytes)}"
    rows = [*_card_rows(cards), ("CPU", free, f"the limit is the {host.source}'s")]
    none = [] if cards else [f"no NVIDIA card: {missing or 'the driver has none'}"]
    return Answer([*none, Table(rows)], {"cards": cards, "no_cards_because": missing, "cpu": host})


def _card_rows(cards: tuple[CardReading, ...]) -> Iterator[tuple[str, str, str]]:
    for card in cards:
        free = f"{format_bytes(card.free_bytes)} free of {format_bytes(card.total_bytes)}"
        slices = "divided into MIG slices; " if card.divided else ""
        about = f"{slices}driver {card.driver or 'unknown'}; {card.uuid}"
        yield card.name, free if card.total_bytes else "shares the host's memory", about
        for tenant in card.tenants:
            yield "", format_bytes(tenant.used_bytes), f"process {tenant.pid} {tenant.name}".rstrip()
