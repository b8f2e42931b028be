"""Counts the trials and out-of-memory errors of ``fit`` on cards of 2, 3, 5 and 8 GiB, and of the first steps after it.

    python benchmarks/card_search.py [--output FILE] [--models gpt2 bert] [--gibibytes 2 8]

Covers ten kinds of training on this machine's card with the card's memory as the budget; each in a process of its own.
No time is measured, so a card that stands in for a real one serves as well. Does not cover a second plan of a process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from card_models import TRAININGS
from tables import Goal, Table, judge, write_part

import autobatch

__all__ = ["Search", "measure_search"]

_GIBIBYTES = (2, 3, 5, 8)
_STEPS = 3
_TARGETS = {"mlp": 60_000}
_TARGET = 4000
_MOST_TRIALS = 3


class Search(NamedTuple):
    """One training on one card."""

    model: str
    gibibytes: int
    size: int
    trials: int
    out_of_memory: int
    retries: int  # in the first steps
    allocator_retries: int  # in the first steps: memory that went back to the driver
    shrunk: int  # steps with smaller micro-batches than planned
    sizes: str  # that were tried, each with its outcome where it did not fit

    @property
    def is_good(self) -> bool:
        """Few trials, none out of memory, and nothing to repair in the steps."""
        return self.trials <= _MOST_TRIALS and self.out_of_memory == self.retries == self.shrunk == 0


def measure_search(name: str, gibibytes: int) -> Search:
    """A plan in this budget, and some steps of the whole target with it."""
    import torch  # noqa: PLC0415 - only the processes that measure need it

    training = TRAININGS[name]
    model = training.make_model().cuda()
    optimizer = training.make_optimizer(model)
    target = _TARGETS.get(name.partition("_")[0], _TARGET)
    options: dict[str, Any] = {"batch": training.make_batch(2), "step": training.step, "optimizer": optimizer}
    plan = autobatch.fit(model, target, budget=gibibytes * 2**30, reuse=False, check=None, progress=False, **options)
    runner = autobatch.Runner(plan, model, step=training.step, optimizer=optimizer)
    few = min(target, 4 * plan.micro_batch_size)  # as many micro-batches as it takes to show what stays between them
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    results = [runner.step(training.make_batch(few)) for _ in range(_STEPS)]
    return Search(
        model=name,
        gibibytes=gibibytes,
        size=plan.micro_batch_size,
        trials=len(plan.trials),
        out_of_memory=sum(trial.outcome == "oom" for trial in plan.trials),
        retries=sum(result.retries for result in results),
        allocator_retries=torch.cuda.memory_stats()["num_alloc_retries"] - before,
        shrunk=sum(max(result.micro_batch_sizes) < plan.micro_batch_size for result in results),
        sizes=",".join(f"{t.micro_batch_size}{'' if t.outcome == 'fits' else t.outcome}" for t in plan.trials),
    )


def _measure_apart(name: str, gibibytes: int) -> Search:
    command = [sys.executable, __file__, "--one", "--models", name, "--gibibytes", str(gibibytes)]
    environment = os.environ | {"AUTOBATCH_LEDGER": "off"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    model, *numbers, sizes = done.stdout.splitlines()[-1].split()
    print(done.stdout.splitlines()[-1], flush=True)
    return Search(model, *map(int, numbers), sizes=sizes)


def _show(searches: Sequence[Search]) -> Table:
    rows = [
        (
            search.model,
            f"{search.gibibytes} GiB",
            str(search.size),
            str(search.trials),
            str(search.out_of_memory),
            f"{search.retries} + {search.shrunk} + {search.allocator_retries}",
            search.sizes.replace(",", ", "),
        )
        for search in searches
    ]
    good, trials = sum(search.is_good for search in searches), mean(search.trials for search in searches)
    explanation = (
        f"{len(searches)} searches, {trials:.2f} trials in the mean; {good} with no fault. "
        "After it: retries, smaller steps and retries of the allocator in three steps of four micro-batches."
    )
    goal = Goal("at most 3 trials, 0 out of memory", "all", f"{good} of {len(searches)}", judge(good == len(searches)))
    columns = ("model", "card", "found", "trials", "out of memory", "after it", "tried")
    return Table("The search on small cards", explanation, columns, rows, (goal,))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=[*TRAININGS], choices=[*TRAININGS])
    parser.add_argument("--gibibytes", nargs="+", type=int, default=[*_GIBIBYTES])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(*measure_search(arguments.models[0], arguments.gibibytes[0]), flush=True)
        return
    table = _show([_measure_apart(name, size) for name in arguments.models for size in arguments.gibibytes])
    print(table)
    if arguments.output:
        write_part(arguments.output, "search", str(table))


if __name__ == "__main__":
    _main()
