"""What a step of ``Runner`` costs where a team's server gets its runs, beside a Runner without a server.

    python benchmarks/served.py [--seconds 25]

Both write the local ledger. The server is a process of its own on this machine, so its work counts too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from models import classify, make_mlp
from quiet import undisturbed
from runner import Case, Comparison, fit_plan, make_batch, pair_up
from tables import Goal, Table, judge

import autobatch

_WANTED = 1.01
_SECONDS = 25.0  # long enough for two of the reports that come every ten seconds
_WARM_PAIRS = 20
CASES = (Case(256, 2, 5.0, passed=False), Case(512, 2, 20.0, passed=False))


def measure(cases: Sequence[Case] = CASES, seconds: float = _SECONDS) -> Table:
    """Each case, for so many seconds, as a table with its goal."""
    compared = [_compare(case, round(500 * seconds / case.milliseconds)) for case in cases]
    return Table(
        "Time: Runner with a team's server beside one without",
        f"Models of 2 layers, four micro-batches, far from the budget; {torch.get_num_threads()} thread(s). Both write "
        "the local ledger. A thread of the second hands in what is new every ten seconds; *in all* counts that too.",
        ("step without", "pairs", "with / without, median", "95 % interval of the median", "in all"),
        [_row(comparison) for comparison in compared],
        [_goal(comparison) for comparison in compared],
    )


def _compare(case: Case, pairs: int) -> Comparison:
    with TemporaryDirectory() as folder, _serving(Path(folder)) as address:
        steps = []
        for name, server in (("without", ""), ("with", address)):
            home = {"AUTOBATCH_HOME": f"{folder}/{name}", "AUTOBATCH_SERVER": server, "AUTOBATCH_LEDGER": "on"}
            with patch.dict(os.environ, home):
                steps.append(_make_step(case))
        with undisturbed():
            timed = pair_up(*steps, pairs + _WARM_PAIRS)
        if not any(mark.stat().st_size for mark in Path(folder, "with", "outbox").iterdir()):  # one was taken
            raise RuntimeError("the second runner has handed in nothing")
    return Comparison(timed[_WARM_PAIRS:])


def _make_step(case: Case) -> Callable[[], object]:
    torch.manual_seed(0)
    model = make_mlp(case.width, case.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    with undisturbed():
        batch = make_batch(case, model, optimizer)
    plan = fit_plan(model, optimizer, batch, passed=False)
    runner = autobatch.Runner(plan, model, step=classify, optimizer=optimizer)
    return lambda: runner.step(batch)


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    """Run the service, which lets anyone on this machine in; yields its address."""
    words = ["serve", "--open", "--port", "0", "--database", f"sqlite:///{folder / 'service.db'}"]
    words = [sys.executable, "-m", "autobatch", *words]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own command
    try:
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
        yield address
    finally:
        server.terminate()
        server.communicate()


def _row(comparison: Comparison) -> tuple[str, ...]:
    (low, high), median = comparison.interval(), comparison.quartiles()[1]
    count = str(len(comparison.pairs))
    interval, in_all = f"{low:.3f} to {high:.3f}", f"{comparison.ratio_of_sums:.3f}"
    return f"{comparison.hand_ms:.1f} ms", count, f"{median:.3f}", interval, in_all


def _goal(comparison: Comparison) -> Goal:
    (low, high), median = comparison.interval(), comparison.quartiles()[1]
    return Goal(
        f"time of a step of {comparison.hand_ms:.1f} ms with a team's server, beside one without",
        f"at most {_WANTED:.2f}",
        f"{median:.3f}",
        judge(median <= _WANTED, sure=not low <= _WANTED <= high),
    )


def main() -> None:
    """Both models."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=_SECONDS, help="for a model")
    torch.set_num_threads(1)
    print(measure(seconds=arguments.parse_args().seconds))


if __name__ == "__main__":
    main()
