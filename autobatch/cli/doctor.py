"""Checks what a training process would find here, and says what to type: ``autobatch doctor``.

Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from autobatch._formatting import format_bytes, plural
from autobatch.cli.environment import Environment, read_environment
from autobatch.cli.output import DONE, NO, Answer, Table
from autobatch.cli.plans import find_fault
from autobatch.errors import InvalidArgument
from autobatch.torch_internals import OLDEST, OLDEST_TO_PREDICT, format_release, read_release

_LEVELS = ("wrong", "beware", "fine")
_SMALL_SHARED_MEMORY = 256 * 2**20  # Docker gives 64 MiB by default: one loader process with large images fills it


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        level: ``"wrong"`` prevents training or measuring it; ``"beware"`` may; ``"fine"`` does not.
        what: Description of what was found.
        advice: Command to type or setting to change; empty if it is fine.
    """

    level: Literal["wrong", "beware", "fine"]
    what: str
    advice: str = ""


_wrong, _beware, _fine = partial(Finding, "wrong"), partial(Finding, "beware"), partial(Finding, "fine")


def check_machine() -> Answer:
    environment = read_environment(os.environ, *find_fault()).model_copy(update=_ask_server())
    findings = examine(environment)
    rows = [
        (
            "WRONG " if one.level == "wrong" else f"{one.level:<6}",
            f"{one.what}\n-> {one.advice}" if one.advice else one.what,
        )
        for one in findings
    ]
    data = {"findings": findings, "environment": environment}
    return Answer([Table(rows)], data, NO if findings[0].level == "wrong" else DONE)


def _ask_server() -> dict[str, str]:
    """Ask the team's server, if there is one, as whom it knows us."""
    if not os.environ.get("AUTOBATCH_SERVER", "").strip():
        return {}
    from autobatch.cli.team import find_server  # noqa: PLC0415 - most users have none
    from autobatch.ledger.server import Refused, ServerAway  # noqa: PLC0415

    try:
        server = find_server("doctor")
        me = server.ask_in_time("GET", "/me")
        known = f"{server.url}, as {me['name']} ({me['role']})"
        return {"server": known, "server_error": "the token may only read" if me["role"] == "reader" else ""}
    except (InvalidArgument, ServerAway) as error:
        return {"server_error": str(error)}
    except (Refused, KeyError, TypeError):
        return {"server_error": "it is another server"}


def examine(environment: Environment) -> list[Finding]:
    """Return all findings, the worst first."""
    findings = [
        *_check_torch(environment),
        *_check_cudnn(environment),
        *_check_driver(environment),
        *_check_nvml(environment),
        *_check_settings(environment),
        *_check_cards(environment),
        *_check_host(environment),
        *_check_ledger(environment),
        *_check_server(environment),
    ]
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


def _check_torch(found: Environment) -> Iterator[Finding]:
    release, oldest, predicts = read_release(found.torch), format_release(OLDEST), format_release(OLDEST_TO_PREDICT)
    if not found.torch:
        yield _wrong("torch is not installed", "pip install torch")
    elif release < OLDEST:
        yield _wrong(f"torch {found.torch} is older than {oldest}", f"pip install 'torch>={oldest}'")
    else:
        if release < OLDEST_TO_PREDICT:
            yield _beware(
                f"torch {found.torch} is older than {predicts}: all but predict() works",
                f"pip install 'torch>={predicts}'",
            )
        builds = {"CUDA": found.torch_cuda, "ROCm": found.torch_hip}
        built_for = next((f"{name} {version}" for name, version in builds.items() if version), "the CPU alone")
        yield _fine(f"torch {found.torch}, built for {built_for}")


def _check_cudnn(found: Environment) -> Iterator[Finding]:
    version = tuple(int(part) for part in found.cudnn.split(".")[:2] if part.isdigit())
    if not version:
        yield _fine(
            "no cuDNN that predict could ask what convolutions take (torch-autobatch[cudnn]): it follows a rule"
        )
    elif version < (9, 8):
        yield _fine(f"cuDNN {found.cudnn} is older than 9.8, so predict follows a rule for what convolutions take")
    else:
        yield _fine(f"cuDNN {found.cudnn}, which predict asks what convolutions take")


def _check_driver(found: Environment) -> Iterator[Finding]:
    if not found.cards:
        what = f"no NVIDIA card: {found.no_cards_because or 'the driver has none'}"
        advice = "install NVIDIA's driver, or start the container with its cards (--gpus all)"
        yield _beware(what, advice) if found.torch_cuda else _fine(what)
        return
    if found.torch and not found.torch_cuda:
        yield _wrong(
            f"{plural(len(found.cards), 'NVIDIA card')} here, but torch {found.torch} was built without CUDA",
            "install the CUDA build of torch that pytorch.org names for this system",
        )
    if not found.torch_cuda or found.driver_cuda is None:
        return
    newest = f"the driver runs CUDA up to {found.driver_cuda[0]}.{found.driver_cuda[1]}"
    # Within one major version of CUDA any driver runs any build; a newer driver runs older ones.
    if found.driver_cuda[0] < int(found.torch_cuda.split(".")[0]):
        yield _wrong(
            f"torch was built for CUDA {found.torch_cuda}, and {newest}",
            f"update NVIDIA's driver, or install torch for CUDA {found.driver_cuda[0]}",
        )
    else:
        yield _fine(newest)


def _check_nvml(found: Environment) -> Iterator[Finding]:
    major = found.pynvml.split(".")[0]
    if major.isdigit() and int(major) < 12:
        yield _wrong(
            f"the deprecated package pynvml {found.pynvml} is installed instead of nvidia-ml-py",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    elif not found.nvml:
        yield _beware(
            "nvidia-ml-py is not installed, so other processes on a card cannot be seen", "pip install nvidia-ml-py"
        )


def _check_settings(found: Environment) -> Iterator[Finding]:
    variables = [name for name in found.settings if name.endswith("ALLOC_CONF")]
    if len({found.settings[name] for name in variables}) > 1:
        yield _beware(
            f"{' and '.join(variables)} differ, and which of them counts depends on torch's version",
            f"unset {variables[-1]}",
        )
    for name in variables:
        yield from _check_options(name, found.settings[name], is_wsl=found.is_wsl)
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in found.settings:  # torch asks whether it is set, not what it says
        yield _wrong(
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch has no allocator whose peaks could be measured",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    if found.settings.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield _beware("CUDA_LAUNCH_BLOCKING=1 makes training slow", "unset CUDA_LAUNCH_BLOCKING")
    if found.cards and found.settings.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        yield _beware("CUDA_VISIBLE_DEVICES hides every card from torch", "unset CUDA_VISIBLE_DEVICES")


def _check_options(variable: str, value: str, *, is_wsl: bool) -> Iterator[Finding]:
    options = "".join(value.split()).lower()
    if "backend:cudamallocasync" in options:
        yield _beware(
            f"{variable} chooses cudaMallocAsync: the driver decides what torch holds, and predictions are of torch's "
            f"own allocator",
            f"leave backend: out of {variable}",
        )
    if is_wsl and "expandable_segments:true" in options:
        yield _beware(f"{variable} asks for expandable segments, which Windows does not have", f"unset {variable}")


def _check_cards(found: Environment) -> Iterator[Finding]:
    for card in found.cards:
        used = sum(tenant.used_bytes for tenant in card.tenants)
        if card.divided:
            yield _fine(f"{card.name} is divided into MIG slices; each is a card of its own")
        elif not card.total_bytes:
            yield _fine(f"{card.name} shares the host's memory, of which a part is left to the system")
        elif used > card.total_bytes // 10:
            first = card.tenants[0]
            others = plural(len(card.tenants), "other process", "other processes")
            most = f"process {first.pid} {first.name}".rstrip()
            yield _beware(
                f"{others} hold {format_bytes(used)} of {card.name}, {most} most of it",
                f"end it if it is yours: kill {first.pid}",
            )
        else:
            yield _fine(f"{card.name}: {format_bytes(card.free_bytes)} of {format_bytes(card.total_bytes)} free")
    if found.is_wsl:
        yield _beware(
            "under Windows the driver moves tensors to RAM where a card is full: slow, and without an error",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback; "
            "or give fit() a budget=",
        )


def _check_host(found: Environment) -> Iterator[Finding]:
    host = found.host
    free = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)}"
    yield _fine(f"CPU: {free} free, by the {host.source}'s limit")
    if 0 < found.shared_memory_bytes < _SMALL_SHARED_MEMORY:
        yield _beware(
            f"loader processes pass batches through /dev/shm, which has {format_bytes(found.shared_memory_bytes)}",
            "start the container with --shm-size=8g, or use num_workers=0",
        )


def _check_ledger(found: Environment) -> Iterator[Finding]:
    if not found.home:
        yield _fine("plans are not stored: AUTOBATCH_LEDGER turns that off")
    elif found.ledger_error:
        what = f"plans cannot be stored in {found.home}: {found.ledger_error}"
        judge = _wrong if found.settings.get("AUTOBATCH_HOME", "").strip() else _beware
        yield judge(what, "set AUTOBATCH_HOME to a folder that can be written to")
    else:
        yield _fine(f"plans are stored in {found.home}")


def _check_server(found: Environment) -> Iterator[Finding]:
    if found.server_error:
        what = f"plans and runs cannot be handed in to AUTOBATCH_SERVER: {found.server_error}"
        yield _beware(what, "check AUTOBATCH_SERVER and AUTOBATCH_TOKEN; an admin makes a token that may write")
    elif found.server:
        yield _fine(f"plans and runs are handed in to {found.server}")
