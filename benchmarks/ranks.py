"""What several ranks cost: their exchanges, their steps beside DistributedDataParallel's own, and unlike devices.

    python benchmarks/ranks.py [--seconds 4]

Covers gloo on loopback, with one thread in each rank. Does not cover NCCL, nor a network: there an exchange takes
longer, and summing while the backward pass runs saves more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import child
from rank_process import MOST, SAMPLE_SECONDS, TARGET
from runner import Comparison
from tables import Goal, Table, judge

__all__ = ["CASES", "Case", "measure_exchanges", "measure_shares", "measure_steps"]

_PROGRAM = str(Path(__file__).resolve().with_name("rank_process.py"))
_SIZES = (2, 3, 4)
_EXCHANGES = 1000
_STEP_MS = 50
_MOST_MS = 0.3
_MOST_OF_A_STEP = 0.01

_SECONDS = 4.0
"""Of the steps of DistributedDataParallel in one case: 800 of 5 ms, 20 of 200 ms."""
_MOST_RATIO = 1.05
_MOST_GAIN = 1.5


class Case(NamedTuple):
    """An MLP of ``depth`` layers, how long a step of DistributedDataParallel is to take, and in how many parts."""

    width: int
    depth: int
    milliseconds: float
    micro_batches: int


CASES = tuple(
    Case(width, depth, milliseconds, micro_batches)
    for micro_batches in (1, 4)
    for width, depth, milliseconds in ((128, 2, 5), (128, 2, 50), (512, 8, 50), (128, 2, 200), (1024, 8, 200))
)


def measure_exchanges(sizes: Sequence[int] = _SIZES, times: int = _EXCHANGES) -> Table:
    """So many exchanges one after the other, on each number of ranks."""
    found = [(size, _run(size, "exchanges", times)) for size in sizes]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    goals = [goal for size, one in found if size <= cores for goal in _judge_exchange(size, one["exchange"])]
    return Table(
        "Ranks: one exchange",
        f"{times} exchanges of a step's message, one after the other, by gloo on loopback, in milliseconds; each is "
        f"that of the slowest rank. A step has one, or two if gradients are summed in its last "
        f"backward pass. Beside it gloo's own sum of 16 numbers. A goal is held against "
        f"numbers of ranks for which this machine has a core each ({cores}).",
        (
            *("ranks", "exchange, median", "9 of 10 within", f"of a step of {_STEP_MS} ms"),
            *("gloo's sum, median", "9 of 10 within"),
        ),
        [_exchange_row(size, one) for size, one in found],
        goals,
    )


def measure_steps(cases: Sequence[Case] = CASES, seconds: float = _SECONDS, size: int = 2) -> Table:
    """Each case, for so many seconds, as a table with a goal for one micro-batch."""
    compared = [(case, *_compare(case, seconds, size)) for case in cases]
    return Table(
        "Ranks: a step beside DistributedDataParallel's own",
        f"{size} ranks, MLPs of Linear and GELU, AdamW, one thread a rank; samples are chosen on the spot. Three "
        f"copies of a model train in turn in the same processes, in changing order, each step from a barrier to the "
        f"end of the slowest rank; ratios are taken turn by turn. *Sum after*: DistributedDataParallel with no_sync() "
        f"in each micro-batch and autobatch's sum of the gradients after the last backward pass: what is lost where "
        f"nothing is summed meanwhile. *Runner*: its sum, of several buckets in the last backward pass, its exchanges, "
        f"and what it costs on one rank.",
        (
            *("step of DDP", "parameters", "micro-batches", "turns", "sum after / DDP, median", "95 % interval"),
            *("Runner / DDP, median", "95 % interval"),
        ),
        [_step_row(*one) for one in compared],
        [goal for one in compared if one[0].micro_batches == 1 for goal in _judge_steps(*one)],
    )


def measure_shares(times: int = 20) -> Table:
    """Equal shares and shares by speed, on a rank and one that is slower and has less memory."""
    found = {share: _run(2, "shares", share, times) for share in ("equal", "speed")}
    milliseconds = {share: 1000 * statistics.median(one["seconds"]) for share, one in found.items()}
    gain = milliseconds["equal"] / milliseconds["speed"]
    return Table(
        "Ranks: unlike devices",
        f"Two ranks, {TARGET} samples a step. One takes {1000 * SAMPLE_SECONDS[0]:g} ms a sample, in which it only "
        f"waits, and has memory for {MOST[0]}; the other takes {1000 * SAMPLE_SECONDS[1]:g} ms and has memory for "
        f"{MOST[1]} (`FakeDevice`). The median of {times} steps, each to the end of the slowest rank.",
        ("share=", "samples", "micro-batches", "step, ms"),
        [(share, *_share_cells(one), f"{milliseconds[share]:.0f}") for share, one in found.items()],
        [
            Goal(
                "equal shares beside shares by speed",
                f"at least {_MOST_GAIN}",
                f"{gain:.2f}",
                judge(gain >= _MOST_GAIN),
            )
        ],
    )


def _run(size: int, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(child.read_ranks(_PROGRAM, size, *arguments)[-1])
    return found


def _exchange_row(size: int, found: dict[str, list[float]]) -> tuple[str, ...]:
    (exchange, most), (plain, most_plain) = (_describe(found[name]) for name in ("exchange", "all_reduce"))
    share = exchange / _STEP_MS
    return (
        *(str(size), f"{exchange:.2f}", f"{most:.2f}", f"{share:.1%}"),
        *(f"{plain:.2f}", f"{most_plain:.2f}"),
    )


def _judge_exchange(size: int, seconds: list[float]) -> list[Goal]:
    median, _ = _describe(seconds)
    share = median / _STEP_MS
    return [
        Goal(f"an exchange of {size} ranks", f"under {_MOST_MS:g} ms", f"{median:.2f} ms", judge(median < _MOST_MS)),
        Goal(
            f"an exchange of {size} ranks, of a step of {_STEP_MS} ms",
            f"under {_MOST_OF_A_STEP:.0%}",
            f"{share:.1%}",
            judge(share < _MOST_OF_A_STEP),
        ),
    ]


def _describe(seconds: list[float]) -> tuple[float, float]:
    """Milliseconds: half, and nine of ten, take at most these."""
    return 1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=10)[-1]


def _compare(case: Case, seconds: float, size: int) -> tuple[int, Comparison, Comparison]:
    """Parameters, the sum afterwards and the Runner beside DistributedDataParallel."""
    found = _run(size, "steps", *case, max(3, round(1000 * seconds / case.milliseconds)))
    after, runner = (Comparison([*zip(found["ddp"], found[way], strict=True)]) for way in ("after", "runner"))
    return found["parameters"], after, runner


def _step_row(case: Case, parameters: int, after: Comparison, runner: Comparison) -> tuple[str, ...]:
    return (
        *(f"{after.hand_ms:.1f} ms", f"{parameters:,}", str(case.micro_batches), str(len(after.pairs))),
        *(
            cell
            for one in (after, runner)
            for cell in (f"{_ratio(one):.3f}", "{:.3f} to {:.3f}".format(*one.interval()))
        ),
    )


def _judge_steps(case: Case, parameters: int, after: Comparison, runner: Comparison) -> list[Goal]:
    where = f"at one micro-batch, a step of {after.hand_ms:.1f} ms and {parameters:,} parameters"
    named = [(f"summing after the backward pass, {where}", after)]
    if case.milliseconds >= _STEP_MS:
        named.append((f"the Runner beside DistributedDataParallel, {where}", runner))
    return [Goal(what, f"at most {_MOST_RATIO}", f"{_ratio(one):.3f}", _judge_ratio(one)) for what, one in named]


def _judge_ratio(found: Comparison) -> str:
    low, high = found.interval()
    return judge(_ratio(found) <= _MOST_RATIO, sure=not low <= _MOST_RATIO <= high)


def _ratio(found: Comparison) -> float:
    return statistics.median(found.ratios)


def _share_cells(found: dict[str, Any]) -> tuple[str, str]:
    sizes = " and ".join(" + ".join(map(str, one)) for one in found["sizes"])
    return " and ".join(map(str, found["shares"])), sizes


def main() -> None:
    """All three tables."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=_SECONDS, help="for a case")
    print(measure_exchanges())
    print(measure_steps(seconds=arguments.parse_args().seconds))
    print(measure_shares())


if __name__ == "__main__":
    main()
