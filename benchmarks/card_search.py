"""Counts the trials and out-of-memory errors of ``fit`` on cards of 2, 3, 5 and 8 GiB, and of the first steps after it.

    python benchmarks/card_search.py [--models gpt2 bert] [--gibibytes 2 8]

Covers ten kinds of training on this machine's card with the card's memory as the budget, and whether the next larger
size would have run: a plain loop of three steps of three micro-batches, which autobatch has no part in, within the same
limit. Each is a process of its own.
No time is measured, so a card that stands in for a real one serves as well. Does not cover a second plan of a process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any, NamedTuple

import child
from card_models import TRAININGS
from machine import is_simulated
from tables import Goal, Table, judge
from torch.utils._pytree import tree_map

import autobatch
from autobatch.planning.division import useful_sizes

__all__ = ["Search", "measure", "measure_search"]

_GIBIBYTES = (2, 3, 5, 8)
_STEPS = 3
_TARGETS = {"mlp": 60_000}
_TARGET = 4000
_MOST_TRIALS = 3
_MEAN_TRIALS = 2
_PREDICTION_SECONDS = 300.0
"""A prediction is given up after some seconds; what is counted here must not depend on how busy this machine is."""


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
    next_size: int  # the next larger useful size; 0 where there is none
    limit: int  # bytes
    sizes: str  # that were tried, each with its outcome where it did not fit
    runs: str = ""  # of the plan's size and the next in a plain loop: "yes", "no", or "" where it was not run
    next_runs: str = ""

    @property
    def is_good(self) -> bool:
        """Few trials, none out of memory, and nothing to repair in the steps."""
        return self.trials <= _MOST_TRIALS and self.out_of_memory == self.retries == self.shrunk == 0

    @property
    def is_largest(self) -> bool:
        """Whether the plan's size runs in a plain loop, and the next does not."""
        return self.runs == "yes" and self.next_runs != "yes"


def measure_search(name: str, gibibytes: int) -> Search:
    """A plan in this budget, and some steps of the whole target with it."""
    import torch  # noqa: PLC0415 - only the processes that measure need it

    from autobatch.prediction import prior  # noqa: PLC0415 - as above

    prior._MOST_SECONDS = _PREDICTION_SECONDS  # noqa: SLF001 - not a choice that users have
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
        next_size=next((size for size in useful_sizes(target, target) if size > plan.micro_batch_size), 0),
        limit=plan.budget_bytes - plan.headroom_bytes,
        sizes=",".join(f"{t.micro_batch_size}{'' if t.outcome == 'fits' else t.outcome}" for t in plan.trials),
    )


def runs_undisturbed(name: str, size: int, limit_bytes: int) -> bool:
    """Whether three steps of three micro-batches run within the limit without the allocator giving memory back."""
    import torch  # noqa: PLC0415 - only the processes that measure need it

    training = TRAININGS[name]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(math.nextafter(limit_bytes / total, 1.0))
    model = training.make_model().cuda()
    optimizer = training.make_optimizer(model)
    batch = tree_map(torch.Tensor.cuda, training.make_batch(size))
    try:
        for _ in range(_STEPS):
            for _ in range(_STEPS):
                training.step(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    except torch.OutOfMemoryError:
        return False
    return bool(torch.cuda.memory_stats()["num_alloc_retries"] == 0)


def _run_apart(*arguments: object) -> str:
    return child.read_lines(__file__, *arguments, AUTOBATCH_LEDGER="off")[-1]


def _measure_apart(name: str, gibibytes: int) -> Search:
    model, *numbers, sizes = _run_apart("--search", name, gibibytes).split()
    search = Search(model, *map(int, numbers), sizes=sizes)

    def ask(size: int) -> str:
        return _run_apart("--loop", name, size, search.limit) if size else ""

    search = search._replace(runs=ask(search.size), next_runs=ask(search.next_size))
    print(*search, flush=True)
    return search


def measure(models: Sequence[str] = tuple(TRAININGS), gibibytes: Sequence[int] = _GIBIBYTES) -> Table:
    """Each model on each card, two at a time."""
    cells = [(name, size) for name in models for size in gibibytes]
    with ThreadPoolExecutor(2) as pool:
        return _show([*pool.map(lambda cell: _measure_apart(*cell), cells)])


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
            f"{search.runs}, {search.next_runs or '-'}",
        )
        for search in searches
    ]
    good, trials = sum(search.is_good for search in searches), mean(search.trials for search in searches)
    largest = sum(search.is_largest for search in searches)
    failed = sum(search.out_of_memory for search in searches)
    explanation = (
        f"{len(searches)} searches, {trials:.2f} trials in the mean, {failed} out of memory. After it: retries, "
        "smaller steps and retries of the allocator in three steps of four micro-batches. Runs: whether the size that "
        "was found, and the next larger one, run in a plain loop within the same limit, with no memory given back."
    )
    goals = (
        Goal(
            "at most 3 trials, 0 out of memory, no retry after",
            "all",
            f"{good} of {len(searches)}",
            judge(good == len(searches)),
        ),
        Goal("trials in the mean", "2", f"{trials:.2f}", judge(trials <= _MEAN_TRIALS)),
        Goal("the largest size that runs", "all", f"{largest} of {len(searches)}", judge(largest == len(searches))),
    )
    columns = ("model", "card", "found", "trials", "out of memory", "after it", "tried", "runs")
    title = f"The search on small {'simulated ' if is_simulated() else ''}cards"
    return Table(title, explanation, columns, rows, goals)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=[*TRAININGS], choices=[*TRAININGS])
    parser.add_argument("--gibibytes", nargs="+", type=int, default=[*_GIBIBYTES])
    arguments = parser.parse_args()
    print(measure(arguments.models, arguments.gibibytes))


if __name__ == "__main__":
    if "--search" in sys.argv:
        print(*measure_search(sys.argv[2], int(sys.argv[3]))[:-2])
        child.end()
    elif "--loop" in sys.argv:
        print("yes" if runs_undisturbed(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) else "no")
        child.end()
    else:
        _main()
