"""Runs all benchmarks and writes what they found, goals beside results, as one page.

    make bench
    python benchmarks/results.py [--output benchmarks/RESULTS.md]

Covers the page: when, where, with which versions, how to repeat it. Does not cover how a number is measured.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import chain
import clip_training
import contrastive
import lengths
import options
import peers
import ranks
import recomputed
import runner
import search
import served
import torch
import waiting
from machine import describe_machine
from tables import Table, show_goals, write_part

import autobatch

__all__ = ["measure_all", "write_page"]

_PAGE = Path(__file__).resolve().with_name("RESULTS.md")


_HOW = (
    "Times are compared within this run only: both sides run in turn in one process, every other pair in the opposite "
    "order, and the ratio is taken pair by pair. A goal is met or missed by the median of these ratios; *within the "
    "noise* says that the 95 % interval of that median reaches over the goal."
)
_PARTS: tuple[Callable[[], Table], ...] = (
    runner.measure_times,
    options.measure,
    served.measure,
    chain.measure,
    runner.measure_peaks,
    recomputed.measure,
    contrastive.measure,
    clip_training.measure,
    search.measure,
    waiting.measure,
    lengths.measure,
    ranks.measure_exchanges,
    ranks.measure_steps,
    ranks.measure_shares,
)


def measure_all(parts: Sequence[Callable[[], Table]] = _PARTS) -> list[tuple[Table, float]]:
    """Every benchmark, at its full size, with its seconds; one after the other: they would slow each other down."""
    measured = []
    for measure in parts:
        started = time.perf_counter()
        table = measure()
        measured.append((table, time.perf_counter() - started))
        print(f"{measured[-1][1]:5.0f} s  {table.title}", flush=True)
    return measured


def write_page(measured: Sequence[tuple[Table, float]]) -> str:
    """The page as Markdown.

    Args:
        measured: What was found in this run, each with the seconds that it took.
    """
    tables = [table for table, _ in measured]
    seconds = " + ".join(f"{seconds:.0f}" for _, seconds in measured)
    versions = {"torch": torch.__version__, "torch-autobatch": autobatch.__version__, **peers.describe_peers()}
    lines = [
        "# Results",
        f"Measured by `make bench` on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC in {seconds} s, part by part.",
        f"Machine: {describe_machine()}.",
        f"Versions: Python {platform.python_version()}, {', '.join(f'{k} {v}' for k, v in versions.items())}.",
        "To repeat it: `make bench` in a checkout, with nothing else running; one part: `python benchmarks/runner.py`.",
        _HOW,
        f"## Goals\n\n{show_goals(tables)}",
        *(str(table).rstrip() for table in tables),
    ]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Measure, write, and show the goals."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--output", type=Path, default=_PAGE)
    output = arguments.parse_args().output
    torch.set_num_threads(1)  # more threads only add noise where something else runs
    measured = measure_all()
    write_part(output, "bench", write_page(measured))
    print(show_goals([table for table, _ in measured]))
    print(f"written to {output}")


if __name__ == "__main__":
    main()
