"""The benchmarks in a tiny configuration: they measure what they say, and the page shows it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import models
import pytest
import ranks
import recomputed
import runner
import waiting

from autobatch.prediction.predict import MARGIN, MARGIN_REASON


@pytest.mark.parametrize("name", ["accuracy", "chain", "peaks", "peers", "recomputed", "results", "search"])
def test_a_benchmark_can_be_imported(name):
    """The package has the names that it uses."""
    assert importlib.import_module(name).__doc__


@pytest.mark.slow
def test_a_case_is_timed_pair_by_pair():
    """Every pair holds two times, and the median of the ratios lies between its quartiles."""
    compared = runner.compare(runner.Case(width=8, depth=1, milliseconds=0.2, passed=True), pairs=6)
    lower, median, upper = compared.quartiles()
    assert len(compared.pairs) == 6
    assert all(seconds > 0 for pair in compared.pairs for seconds in pair)
    assert lower <= median <= upper
    assert compared.interval()[0] <= median <= compared.interval()[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_waits_are_measured_in_fresh_processes():
    """Every wait has a time of the clock and one of the processor, and the goals are among them."""
    table = waiting.measure(processes=2)
    names = [row[0] for row in table.rows]
    assert names == ["import autobatch", "fit, the first of the process", "fit, in a budget", "predict"]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in table.rows)
    assert [goal.what for goal in table.goals] == [f"seconds of {name}" for name in (names[0], names[2])]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_are_timed_together():
    """Each row has the times of both ranks, and what is held against a goal is in the row."""
    exchanges = ranks.measure_exchanges([2], times=20)
    assert exchanges.rows[0][0] == "2"
    assert 0 < float(exchanges.rows[0][1]) <= float(exchanges.rows[0][2])
    cases = [ranks.Case(8, 1, milliseconds=1, micro_batches=1), ranks.Case(8, 1, milliseconds=1, micro_batches=2)]
    steps = ranks.measure_steps(cases, seconds=0.02)
    assert [row[1:4] for row in steps.rows] == [("162", "1", "20"), ("162", "2", "20")]
    assert len(steps.goals) == 1
    assert steps.goals[0].found == steps.rows[0][4]
    shares = ranks.measure_shares(times=2)
    assert shares.rows[0][:3] == ("equal", "48 and 48", "48 and 16 + 16 + 16")
    assert shares.rows[1][0] == "speed"
    assert [float(goal.found) > 0 for goal in shares.goals] == [True]


@pytest.mark.slow
def test_the_runner_runs_no_more_again_than_a_restart_by_hand_and_is_never_wrong():
    """On one model; running only the failed micro-batch again would take fewer samples."""
    training = models.make_trainings(recomputed.SAMPLES, width=4, depth=1, dtype=recomputed.torch.float64)[3]
    table = recomputed.measure(every=3, trainings=[training])
    assert [row[0] for row in table.rows] == [training.name, "all"]
    runner_samples, restart_samples, naive_samples = (float(cell.split(",")[0]) for cell in table.rows[0][1:])
    assert naive_samples == recomputed.SAMPLES + recomputed.MICRO_BATCH
    assert naive_samples < runner_samples < restart_samples + 1
    assert [cell.split(", ")[1].split()[0] for cell in table.rows[0][1:3]] == ["0", "0"]
    assert table.goals[-1].verdict == "met"


ROOT = Path(__file__).resolve().parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


def rows_of(title):
    """The cells of each row of a table on the page of results, below its two lines of head."""
    _, _, rest = RESULTS.partition(f"\n## {title}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_margins_reason_is_what_was_measured():
    """The cells of the half that was held out, and the share of them that was above the margin, as shipped."""
    [row] = [
        row
        for row in rows_of("Prediction beside published peaks")
        if row[0].startswith("as shipped") and row[1] == "held out"
    ]
    assert f"{MARGIN:.0%}" == "10%"
    assert MARGIN_REASON.startswith(f"at which {row[8].removesuffix('%')} % of {row[2]} published peaks were above")


@pytest.mark.slow
@pytest.mark.timeout(400)  # three frameworks are imported, one of them in three processes
def test_what_others_leave_behind_is_what_the_page_says():
    """Run again with the versions that are installed, in a process of its own: every row is on the page of results."""
    for name in ("accelerate", "pytorch_lightning", "transformers"):
        pytest.importorskip(name)
    ran = subprocess.run(
        [sys.executable, "-c", "import aftermath; print(*aftermath.measure(), sep='\\n')"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    shown = [line for line in ran.stdout.splitlines() if line.startswith(("| ", "The Trainer", "64 samples"))]
    assert len(shown) == 2 + 2 + 2 + 3 + 2
    assert [line for line in shown if line not in RESULTS] == []
