"""What is wrong with the surroundings of a training process, and what to type.

Covers judgement alone: what was found goes in, findings come out, the worst first. Does not cover the finding
(``surroundings``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal

from autobatch._formatting import format_bytes, plural, show_value
from autobatch.cli.environment import Environment
from autobatch.ledger.retention import read_days
from autobatch.records import Record

__all__ = ["Finding", "examine"]

Level = Literal["wrong", "beware", "fine"]
_ORDER = ("wrong", "beware", "fine")

_MOVE_LEDGER = "set AUTOBATCH_HOME to a folder that can be written to"
_OLDEST_TORCH = (2, 8)
_SMALL_SHARED_MEMORY = 256 * 2**20
"""Docker gives 64 MiB by default: one loader process with large images fills that."""

_OPTIONS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "graph_capture_record_stream_reuse",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "pinned_background_threads",
        "pinned_max_register_threads",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
        "use_on_oom",
    }
)
"""What torch's AllocatorConfig.cpp and CUDAAllocatorConfig.h know, of 2.8 to 2.13."""


class Finding(Record):
    """One thing that was looked at.

    Attributes:
        level: ``"wrong"`` keeps training from working or from being measured; ``"beware"`` may; ``"fine"`` does not.
        what: What was found.
        advice: What to type or change; empty where it is fine.
    """

    level: Level
    what: str
    advice: str = ""


def examine(found: Environment) -> tuple[Finding, ...]:
    """Everything that is looked at, the worst first."""
    looks: tuple[Callable[[Environment], Iterator[Finding]], ...] = (
        _look_at_torch,
        _look_at_driver,
        _look_at_module,
        _look_at_settings,
        _look_at_cards,
        _look_at_windows,
        _look_at_host,
        _look_at_ledger,
    )
    findings = chain.from_iterable(look(found) for look in looks)
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.level)))


def _look_at_torch(found: Environment) -> Iterator[Finding]:
    if not found.torch:
        yield Finding(level="wrong", what="torch is not installed", advice="pip install torch")
        return
    release = tuple(int(part) for part in found.torch.split("+")[0].split(".")[:2] if part.isdigit())
    if release < _OLDEST_TORCH:
        yield Finding(level="wrong", what=f"torch {found.torch} is older than 2.8", advice="pip install 'torch>=2.8'")
        return
    yield Finding(level="fine", what=f"torch {found.torch}, built for {_spell_build(found)}")


def _spell_build(found: Environment) -> str:
    if found.torch_cuda:
        return f"CUDA {found.torch_cuda}"
    return f"ROCm {found.torch_hip}" if found.torch_hip else "the CPU alone"


def _look_at_driver(found: Environment) -> Iterator[Finding]:
    if not found.cards:
        what = f"no NVIDIA card: {found.no_cards_because or 'the driver has none'}"
        advice = "install NVIDIA's driver, or start the container with its cards (--gpus all)"
        is_missed = bool(found.torch_cuda)
        yield Finding(level="beware" if is_missed else "fine", what=what, advice=advice if is_missed else "")
        return
    if found.torch and not found.torch_cuda:
        yield Finding(
            level="wrong",
            what=f"{plural(len(found.cards), 'NVIDIA card')} here, but torch {found.torch} was built without CUDA",
            advice="install the CUDA build of torch that pytorch.org names for this system",
        )
    needed = tuple(int(part) for part in found.torch_cuda.split(".") if part.isdigit())
    if needed and found.driver_cuda is not None:
        # Within one major version of CUDA any driver runs any build; a newer driver runs older ones.
        if found.driver_cuda[0] < needed[0]:
            yield Finding(
                level="wrong",
                what=f"torch was built for CUDA {found.torch_cuda}, and the driver runs CUDA up to "
                f"{found.driver_cuda[0]}.{found.driver_cuda[1]}",
                advice=f"update NVIDIA's driver, or install torch for CUDA {found.driver_cuda[0]}",
            )
        else:
            yield Finding(level="fine", what=f"the driver runs CUDA {found.driver_cuda[0]}.{found.driver_cuda[1]}")


def _look_at_module(found: Environment) -> Iterator[Finding]:
    major = found.pynvml.split(".")[0]
    if major.isdigit() and int(major) < 12:
        yield Finding(
            level="wrong",
            what=f"the deprecated package pynvml {found.pynvml} stands where nvidia-ml-py should",
            advice="pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    elif not found.nvml:
        yield Finding(
            level="beware",
            what="nvidia-ml-py is not installed, so other processes on a card cannot be seen",
            advice="pip install nvidia-ml-py",
        )


def _look_at_settings(found: Environment) -> Iterator[Finding]:
    variables = [name for name in found.settings if name.endswith("ALLOC_CONF")]
    values = {found.settings[name] for name in variables}
    if len(values) > 1:
        yield Finding(
            level="beware",
            what=f"{' and '.join(variables)} differ, and which of them counts depends on torch's version",
            advice=f"unset {variables[-1]}",
        )
    for name in variables:
        yield from _look_at_options(name, found.settings[name], is_wsl=found.is_wsl)
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in found.settings:  # torch asks whether it is there, not what it says
        yield Finding(
            level="wrong",
            what="PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch has no allocator whose peaks could be measured",
            advice="unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    if found.settings.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield Finding(
            level="beware", what="CUDA_LAUNCH_BLOCKING=1 makes training slow", advice="unset CUDA_LAUNCH_BLOCKING"
        )
    if found.cards and found.settings.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        yield Finding(
            level="beware",
            what="CUDA_VISIBLE_DEVICES hides every card from torch",
            advice="unset CUDA_VISIBLE_DEVICES",
        )


def _look_at_options(variable: str, value: str, *, is_wsl: bool) -> Iterator[Finding]:
    parts = (part.partition(":") for part in _split("".join(value.split())))
    options = {name: setting for name, _, setting in parts}
    for name in options:
        if name not in _OPTIONS:
            yield Finding(
                level="wrong",
                what=f"{variable} has {name!r}, which torch does not know: it stops at the first tensor",
                advice=f"mend or unset {variable}",
            )
    if options.get("backend") == "cudaMallocAsync":
        yield Finding(
            level="beware",
            what=f"{variable} chooses cudaMallocAsync: what torch holds is the driver's to say, and predictions are of "
            f"the other one",
            advice=f"leave backend: out of {variable}",
        )
    if is_wsl and options.get("expandable_segments", "").lower() == "true":
        yield Finding(
            level="beware",
            what=f"{variable} asks for expandable segments, which are not there under Windows",
            advice=f"unset {variable}",
        )


def _split(value: str) -> list[str]:
    """Options are divided by commas, but for those inside brackets."""
    parts, depth = [""], 0
    for character in value:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]


def _look_at_cards(found: Environment) -> Iterator[Finding]:
    for card in found.cards:
        held = sum(tenant.used_bytes for tenant in card.tenants)
        if card.divided:
            yield Finding(level="fine", what=f"{card.name} is divided into MIG slices; each is a card of its own")
        elif held > card.total_bytes // 10:
            first = card.tenants[0]
            yield Finding(
                level="beware",
                what=f"{plural(len(card.tenants), 'other process', 'other processes')} hold {format_bytes(held)} of "
                f"{card.name}, process {first.pid} {first.name} most of it".replace("  ", " "),
                advice=f"end it if it is yours: kill {first.pid}",
            )
        else:
            free = f"{format_bytes(card.free_bytes)} of {format_bytes(card.total_bytes)}"
            yield Finding(level="fine", what=f"{card.name}: {free} free")


def _look_at_windows(found: Environment) -> Iterator[Finding]:
    if found.is_wsl:
        yield Finding(
            level="beware",
            what="under Windows the driver moves tensors to RAM where a card is full: slow, and no error tells of it",
            advice="NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem "
            "Fallback; or give fit() a budget=",
        )


def _look_at_host(found: Environment) -> Iterator[Finding]:
    host = found.host
    free = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)}"
    yield Finding(level="fine", what=f"CPU: {free} free, by the {host.source}'s limit")
    if 0 < found.shared_memory_bytes < _SMALL_SHARED_MEMORY:
        yield Finding(
            level="beware",
            what=f"loader processes hand batches over in /dev/shm, which has {format_bytes(found.shared_memory_bytes)}",
            advice="start the container with --shm-size=8g, or use num_workers=0",
        )


def _look_at_ledger(found: Environment) -> Iterator[Finding]:
    if not found.home:
        yield Finding(level="fine", what="plans are not kept: AUTOBATCH_LEDGER turns that off")
    elif found.ledger_error:
        yield Finding(
            level="wrong" if found.settings.get("AUTOBATCH_HOME", "").strip() else "beware",
            what=f"plans cannot be kept in {found.home}: {found.ledger_error}",
            advice="look at that disk" if "is damaged" in found.ledger_error else _MOVE_LEDGER,
        )
    else:
        yield Finding(level="fine", what=f"plans are kept in {found.home}")
    days = found.settings.get("AUTOBATCH_RETENTION_DAYS", "").strip()
    if days and read_days(days) is None:
        yield Finding(
            level="wrong",
            what=f"AUTOBATCH_RETENTION_DAYS={show_value(days)} is no positive number of days",
            advice="set it to a number such as 400, or unset AUTOBATCH_RETENTION_DAYS",
        )
