"""Runs commands that start processes of their own, such as torchrun, and leaves none of these behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
_MARK = "AUTOBATCH_TEST_LAUNCH"


class Launched(NamedTuple):
    """The result of a command, and its processes that were still there after it."""

    code: int
    output: str
    errors: str
    left_behind: Sequence[str] = ()

    def line(self, beginning: str) -> str:
        """The one line of the output that begins so."""
        assert self.code == 0, f"ended with {self.code}\n{self.output[-2000:]}\n{self.errors[-6000:]}"
        found = [line for line in self.output.splitlines() if line.startswith(beginning)]
        assert len(found) == 1, f"{len(found)} lines begin with {beginning!r}\n{self.output}\n{self.errors[-6000:]}"
        return found[0]


def torchrun(*arguments: str, ranks: int = 2, endpoint: str = "127.0.0.1:0") -> list[str]:
    """The beginning of a command, for one machine on loopback."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1"]
    return [*launcher, "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", *arguments]


def launch(
    *commands: Sequence[str], limit_seconds: float = 180.0, grace_seconds: float = 10.0, **environment: str
) -> list[Launched]:
    """Run commands beside each other, until all have ended or the limit is reached."""
    mark = uuid.uuid4().hex
    common = {"OMP_NUM_THREADS": "1", "AUTOBATCH_LEDGER": "off", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="home") as home:
        whole = os.environ | common | {"HOME": home, _MARK: mark} | environment
        # Of a pipe no end is seen while a process that was left behind holds it.
        files = [(Path(home) / f"{index}.out", Path(home) / f"{index}.err") for index in range(len(commands))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, (output, errors) in zip(commands, files, strict=True):
                processes.append(_start(command, output, errors, whole))
            end = time.monotonic() + limit_seconds
            while time.monotonic() < end and any(process.poll() is None for process in processes):
                time.sleep(0.05)
            hung = [process for process in processes if process.poll() is None]
            left = [] if hung else _wait_for_the_rest(mark, grace_seconds)
        finally:
            _kill(processes, mark)
        codes = [process.wait() for process in processes]
        texts = [(out.read_text("utf-8"), err.read_text("utf-8")) for out, err in files]
    return [Launched(code, *text, left) for code, text in zip(codes, texts, strict=True)]


def launch_nodes(arguments: Sequence[str], **environment: str) -> list[Launched]:
    """Run two torchruns with one rank each; they meet in this process, so that no port has to be guessed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = ["--rdzv-id=nodes", "--rdzv-conf=is_host=0", *arguments]
    command = torchrun(*meeting, ranks=1, endpoint=f"127.0.0.1:{store.port}")
    return launch(command, command, **environment)


def _start(command: Sequence[str], output: Path, errors: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with output.open("wb") as out, errors.open("wb") as err:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


def _wait_for_the_rest(mark: str, grace_seconds: float) -> list[str]:
    """The command lines of what is still there some time after the commands have ended."""
    end = time.monotonic() + grace_seconds
    while (found := _find_marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return list(found.values())


def _kill(processes: Iterable[subprocess.Popen[bytes]], mark: str) -> None:
    """The groups of the commands, and what they started in other groups."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for _ in range(100):  # one that is being killed may just have started another
        for number in _find_marked(mark):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
        if not _find_marked(mark):
            return


def _find_marked(mark: str) -> dict[int, str]:
    """Processes by number, with their command lines. Launchers put their workers in groups of their own, so by name."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
        except OSError:  # it has ended, or is another user's
            continue
    return found
