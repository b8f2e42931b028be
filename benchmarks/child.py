"""Runs a benchmark's own program again, in a process of its own or in one for each rank, and reads what it prints.

Covers cells that need an allocator of their own, whose settings torch reads once, and ranks that are joined by gloo on
loopback. Does not cover what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import NoReturn

from torch.distributed import TCPStore

__all__ = ["end", "read_lines", "read_ranks"]


def read_lines(program: str, *arguments: object, **environment: str) -> list[str]:
    """What the program prints, with these environment variables in addition.

    Raises:
        subprocess.CalledProcessError: The program failed.
    """
    command = [sys.executable, program, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout.splitlines()


def read_ranks(program: str, size: int, *arguments: object, limit_seconds: float = 600.0) -> list[str]:
    """What the first of so many ranks prints, after all have ended well; none outlives the limit.

    Raises:
        RuntimeError: A rank failed, or did not end in time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, as torchrun has it in its own
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "AUTOBATCH_LEDGER": "off",
    }
    command = [sys.executable, program, *map(str, arguments)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:  # a pipe that nobody empties would be full
        ranks = [
            subprocess.Popen(  # noqa: S603 - our own program
                command, env=os.environ | shared | {"RANK": str(rank)}, stdout=None if rank else printed
            )
            for rank in range(size)
        ]
        try:
            _wait_for(ranks, limit_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        printed.seek(0)
        return printed.read().splitlines()


def _wait_for(ranks: list[subprocess.Popen[bytes]], limit_seconds: float) -> None:
    """Until all have ended well."""
    last = time.monotonic() + limit_seconds
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        if time.monotonic() > last:
            raise RuntimeError(f"the ranks took over {limit_seconds:g} s")
        time.sleep(0.05)
    if any(codes):
        raise RuntimeError(f"a rank failed: they ended with {codes}")


def end() -> NoReturn:
    """Ends this process, with what it printed, and without the interpreter's own end.

    A process whose interpreter ends within milliseconds of a backward pass on a GPU can abort: autograd's thread wants
    the interpreter once more, to release the pass (torch 2.13: three lines of plain torch did in 18 of 36 runs, on a
    busy machine).
    """
    sys.stdout.flush()
    os._exit(0)
