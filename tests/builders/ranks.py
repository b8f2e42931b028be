"""Runs a function on several ranks: processes of their own that are joined by gloo on loopback, within a time limit."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

_IMPORTED = ["pytest", "torch._dynamo", "torch.distributed.fsdp", "autobatch.fitting.fit", "autobatch.runner"]
"""By the process that forks the ranks, once: in each of them it would take two seconds."""


class Answer(NamedTuple):
    """The result of one rank: its value, its error with the trace, or the end of its process."""

    value: Any = None
    error: str = ""
    end: str = "well"
    seconds: float = 0.0


class _Group(NamedTuple):
    size: int
    port: int
    folder: str
    timeout_seconds: float
    has_own_store: bool
    environment: dict[str, str]


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    size: int = 2,
    timeout_seconds: float = 60.0,
    limit_seconds: float = 200.0,
    options: Sequence[dict[str, Any]] = (),
    has_own_store: bool = False,
) -> list[Answer]:
    """Call ``function(*arguments)`` on each rank, with its own options; nothing outlives the limit."""
    context = make_context()
    import torch.distributed

    with tempfile.TemporaryDirectory() as folder:
        # In this process, as torchrun has it in its own: it outlives each rank.
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        if has_own_store:
            del store  # its port is free again
        group = _Group(size, port, folder, timeout_seconds, has_own_store, dict(os.environ))
        processes = [
            context.Process(target=_run, args=(rank, group, function, arguments, dict(*options[rank : rank + 1])))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + limit_seconds
        while time.monotonic() < end and not all(map(_has_come_to_an_end, processes)):
            time.sleep(0.05)
        return [_answer(process, Path(folder) / str(rank)) for rank, process in enumerate(processes)]


def make_context() -> multiprocessing.context.ForkServerContext:
    """Processes are forked from one that has imported torch, and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def values_of(answers: Sequence[Answer]) -> list[Any]:
    """The value of each rank; an error of any fails the test with its trace."""
    reported = [
        f"rank {rank}: {answer.end}\n{answer.error}"
        for rank, answer in enumerate(answers)
        if answer.error or answer.end != "well"
    ]
    assert not reported, "\n".join(reported)
    return [answer.value for answer in answers]


def wait_at_most(seconds: float) -> None:
    """Let this rank's groups wait so long from now on: when all ranks have started, and have made a first step."""
    import torch
    import torch.distributed

    from autobatch.distributed import channel

    owner: Any = torch.distributed.distributed_c10d._get_default_group()
    owner._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=seconds)
    for opened in channel._open:
        opened.timeout = timedelta(seconds=seconds)
        opened._group._set_default_timeout(opened.timeout)


def _has_come_to_an_end(process: Any) -> bool:
    """Whether it has ended, or was stopped for good."""
    if not process.is_alive():
        return True
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
    except OSError:  # it has just ended, or this is no Linux
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def _answer(process: Any, path: Path) -> Answer:
    if process.is_alive():
        process.kill()
        process.join()
        return Answer(end="hung")
    if path.exists():
        found: Answer = pickle.loads(path.read_bytes())
        return found
    return Answer(end=f"ended with {process.exitcode}")


def _run(
    rank: int, group: _Group, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> None:
    os.environ.clear()  # that of the process which forks them is of when it was started
    os.environ |= group.environment
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(group.port),
        "RANK": str(rank),
        "WORLD_SIZE": str(group.size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(group.size),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": str(not group.has_own_store),
        # A rank may be done, and gone, while two others still connect: gloo then fails on one and waits on the other.
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=group.timeout_seconds))
        del os.environ["TORCH_DIST_INIT_BARRIER"]  # ranks need not agree on the name of a group of some of them
        began = time.monotonic()
        answer = Answer(function(*arguments, **options), seconds=time.monotonic() - began)
    except BaseException as error:
        name = f"{type(error).__name__}: {error}"
        answer = Answer(error=f"{name}\n{traceback.format_exc()}", seconds=time.monotonic() - began)
    whole = Path(group.folder) / f"{rank}.part"
    whole.write_bytes(pickle.dumps(answer))
    whole.rename(Path(group.folder) / str(rank))
    os._exit(0)  # a group whose peers are gone may wait for them as it is taken down
