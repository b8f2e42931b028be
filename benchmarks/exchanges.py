"""What one exchange costs a rank: messages, bytes and processor time, on up to 64 processes of one machine.

    python benchmarks/exchanges.py [--sizes 2 8 32 64]

Covers gloo on loopback, between processes that are forked from one, so that 64 fit in memory. The system's calls are
counted (``/proc/self/io``), not wall time: more processes than cores wait for each other. Does not cover a network.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from tables import Table

from autobatch.distributed.channel import Channel

__all__ = ["measure_exchanges"]

_SIZES = (2, 8, 32, 64)
_TIMES = 50
_WAYS = ("equal messages", "messages that differ", "gloo's sum of 16 numbers")
_MESSAGE = {"call": "step 1234 of Runner 1, update", "gradients": "0" * 16, "trains": "0" * 16, "rates": [1e-3]}

_Cost = tuple[float, float, float]
"""Writes to sockets, bytes in them, and milliseconds of processor time; of one rank in one exchange."""


def measure_exchanges(sizes: Sequence[int] = _SIZES) -> Table:
    """The mean over all ranks of each number of them."""
    found = {size: _run(size) for size in sizes}
    return Table(
        "Ranks: what one exchange costs each of many",
        f"The mean of {_TIMES} exchanges and of all ranks, by gloo on loopback. A step of training has one, of equal "
        f"messages unless the ranks differ. A write is a system call; gloo announces what it sends and receives, so "
        f"a message takes three. The last column is the memory of one process, without what all share.",
        ("ranks", *(f"{way}: writes, bytes, ms of processor" for way in _WAYS), "memory"),
        [
            (str(size), *(f"{w:.0f}, {b:,.0f}, {ms:.2f}" for w, b, ms in costs), f"{mib:.0f} MiB")
            for size, (costs, mib) in found.items()
        ],
    )


def _run(size: int) -> tuple[list[_Cost], float]:
    """The costs of each way, and the memory of one process in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            if (child := os.fork()) == 0:
                _measure(rank, size, Path(folder))
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
        if any(codes):
            raise RuntimeError(f"a rank failed: they ended with {codes}")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text("utf-8")) for rank in range(size)]
    ways = zip(*(costs for costs, _ in found), strict=True)
    return [(*map(fmean, zip(*way, strict=True)),) for way in ways], fmean(mib for _, mib in found)


def _measure(rank: int, size: int, folder: Path) -> None:
    """One rank, whose process ends here."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    channel, numbers = Channel(None), torch.zeros(16)
    ways: list[Callable[[], object]] = [
        lambda: channel.exchange(_MESSAGE, [1.0] * 8),
        lambda: channel.exchange({**_MESSAGE, "rank": rank}),
        lambda: dist.all_reduce(numbers),
    ]
    costs = [_cost_of(way) for way in ways]
    shown = Path("/proc/self/smaps_rollup").read_text("ascii")
    private = sum(int(line.split()[1]) for line in shown.splitlines() if line.startswith("Private_"))
    (folder / f"{rank}.json").write_text(json.dumps([costs, private / 1024]), "utf-8")
    dist.barrier()
    os._exit(0)


def _cost_of(way: Callable[[], object]) -> _Cost:
    way()
    dist.barrier()
    before, began = _read_writes(), time.process_time()
    for _ in range(_TIMES):
        way()
    spent, after = time.process_time() - began, _read_writes()
    return (after[0] - before[0]) / _TIMES, (after[1] - before[1]) / _TIMES, 1000 * spent / _TIMES


def _read_writes() -> tuple[int, int]:
    """The writes of this process so far, and their bytes."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    counts = {name: int(count) for name, count in (line.split(": ") for line in lines)}
    return counts["syscw"], counts["wchar"]


def main() -> None:
    """The table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sizes", type=int, nargs="+", default=_SIZES)
    print(measure_exchanges(arguments.parse_args().sizes))


if __name__ == "__main__":
    main()
