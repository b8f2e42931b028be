"""What a step of ``Runner`` costs with one of its options, beside a loop by hand that does the same.

    python benchmarks/options.py [--seconds 6]

Covers ``weigh=``, ``max_grad_norm=``, ``scaler=`` and a hook that writes a file, far from the budget, at steps of about
5 ms, where they weigh most. Does not cover a step without options (``runner``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import Batch, classify, make_mlp
from quiet import undisturbed
from runner import Case, Comparison, fit_plan, make_batch, pair_up
from tables import Goal, Table, judge
from torch import nn

import autobatch

__all__ = ["OPTIONS", "Option", "measure"]

_MICRO_BATCHES, _MILLISECONDS, _WANTED = 4, 5.0, 1.08
_SECONDS = 6.0
_WARM_PAIRS = 6
_CASE = Case(256, 2, _MILLISECONDS, passed=False)


class Option(NamedTuple):
    """An option of the runner, and what stands for it in the loop by hand."""

    name: str
    make: Callable[[Path], dict[str, Any]]
    weighs: bool = False
    clips: bool = False
    scales: bool = False


def count_labels(batch: Batch) -> float:
    """The labels of a micro-batch that count, as one would count tokens."""
    return float((batch[1] >= 0).sum())


OPTIONS = (
    Option("weigh=", lambda _: {"weigh": count_labels}, weighs=True),
    Option("max_grad_norm=", lambda _: {"max_grad_norm": 1.0}, clips=True),
    Option("scaler=", lambda _: {"scaler": torch.amp.GradScaler("cpu")}, scales=True),
    Option("hooks=[jsonl]", lambda folder: {"hooks": [autobatch.hooks.jsonl(folder / "events.jsonl")]}),
)


def measure(options: Sequence[Option] = OPTIONS, seconds: float = _SECONDS) -> Table:
    """Each option, for so many seconds, as a table with its goal."""
    compared = [(option, _compare(option, round(500 * seconds / _MILLISECONDS))) for option in options]
    return Table(
        "Time: Runner with one option beside a hand-written loop that does the same",
        f"The model of 2 x 256 of the table above, {_MICRO_BATCHES} micro-batches, far from the budget; "
        f"{torch.get_num_threads()} thread(s). The loop counts, clips or scales as well; for the hook, which writes "
        "each step's numbers into a file, it does nothing.",
        ("option", "step by hand", "pairs", "runner / by hand, median", "95 % interval of the median"),
        [_row(option, comparison) for option, comparison in compared],
        [_goal(option, comparison) for option, comparison in compared],
    )


def _compare(option: Option, pairs: int) -> Comparison:
    torch.manual_seed(0)
    model = make_mlp(_CASE.width, _CASE.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    with undisturbed():
        batch = make_batch(_CASE, model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        given = option.make(Path(folder))
        plan = fit_plan(model, optimizer, batch, passed=False, weigh=given.get("weigh"))
        runner = autobatch.Runner(plan, model, step=classify, optimizer=optimizer, **given)
        by_hand = write_loop(option, model, optimizer, batch)
        with undisturbed():
            timed = pair_up(by_hand, lambda: runner.step(batch), pairs + _WARM_PAIRS)
    return Comparison(timed[_WARM_PAIRS:])


def write_loop(option: Option, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], None]:
    """The loop with the option's work in it, by hand."""
    inputs, labels = batch
    size = -(-len(labels) // _MICRO_BATCHES)
    scaler = torch.amp.GradScaler("cpu", enabled=option.scales)
    count = count_labels if option.weighs else lambda part: len(part[1])

    def by_hand() -> None:
        parts = [*zip(inputs.split(size), labels.split(size), strict=True)]
        total = sum(map(count, parts)) if option.weighs else len(labels)
        for part in parts:
            loss = classify(model, part) * (count(part) / total)
            (scaler.scale(loss) if option.scales else loss).backward()
        if option.scales:
            scaler.unscale_(optimizer)
        if option.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if option.scales:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    return by_hand


def _row(option: Option, comparison: Comparison) -> tuple[str, ...]:
    low, high = comparison.interval()
    median = comparison.quartiles()[1]
    pairs = str(len(comparison.pairs))
    return option.name, f"{comparison.hand_ms:.1f} ms", pairs, f"{median:.3f}", f"{low:.3f} to {high:.3f}"


def _goal(option: Option, comparison: Comparison) -> Goal:
    (low, high), median = comparison.interval(), comparison.quartiles()[1]
    return Goal(
        f"time of a step of {comparison.hand_ms:.1f} ms with {option.name}, beside a loop that does the same",
        f"at most {_WANTED:.2f}",
        f"{median:.3f}",
        judge(median <= _WANTED, sure=not low <= _WANTED <= high),
    )


def main() -> None:
    """All options."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=_SECONDS, help="for an option")
    torch.set_num_threads(1)
    print(measure(seconds=arguments.parse_args().seconds))


if __name__ == "__main__":
    main()
