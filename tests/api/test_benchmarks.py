"""The benchmarks in a tiny configuration: they measure what they say, and the page shows it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import accuracy
import chain
import child
import lengths
import machine
import models
import peaks
import peers
import pytest
import quiet
import ranks
import recomputed
import results
import runner
import search
import tables
import waiting

from autobatch.errors import InvalidArgument
from autobatch.prediction.predict import MARGIN, MARGIN_REASON
from autobatch.prediction.text import FAMILIES_REASON


def test_a_case_is_timed_pair_by_pair():
    """Every pair holds two times, and the median of the ratios lies between its quartiles."""
    compared = runner.compare(runner.Case(width=8, depth=1, milliseconds=0.2, passed=True), pairs=6)
    lower, median, upper = compared.quartiles()
    assert len(compared.pairs) == 6
    assert all(seconds > 0 for pair in compared.pairs for seconds in pair)
    assert lower <= median <= upper
    assert compared.interval()[0] <= median <= compared.interval()[1]


def test_the_order_in_a_pair_alternates_and_times_stay_with_their_side(monkeypatch):
    """Neither side always follows the other, and what the first took is never counted for the second."""
    order, clock = [], [0.0]
    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock[0])

    def run(name, seconds):
        order.append(name)
        clock[0] += seconds

    pairs = runner.pair_up(lambda: run("hand", 2.0), lambda: run("runner", 1.0), pairs=2)
    assert order == ["hand", "runner", "runner", "hand"]
    assert pairs == [(2.0, 1.0)] * 2


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


def test_a_rank_that_fails_ends_the_others(tmp_path):
    """Its end is an error at once, though the other would go on for a minute."""
    program = tmp_path / "program.py"
    program.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a rank failed: they ended with \[None, 3\]"):
        child.read_ranks(str(program), 2)
    assert time.monotonic() - began < 30
    with pytest.raises(RuntimeError, match=r"the ranks took over 0.1 s"):
        child.read_ranks(str(program), 1, limit_seconds=0.1)


def test_texts_are_timed_padded_and_sorted():
    """Each batch has both times, fewer micro-batches and fewer tokens with lengths, and the goal is the ratio."""
    pytest.importorskip("transformers")
    table = lengths.measure(pairs=1, seeds=(0,), texts=8, longest=64, budget="6MiB")
    [row] = table.rows
    padded, sorted_ = map(int, row[4].split(" and "))
    assert sorted_ <= padded
    assert 1 <= float(row[6]) <= float(row[5])
    assert [goal.wanted for goal in table.goals] == ["at most 0.25"]


def test_a_chain_of_modules_is_timed_with_its_fit():
    """Each depth is a row; the goals are for the chains of 642 and 2,562 modules, whose sizes these are."""
    table = chain.measure(depths=[1], pairs=2)
    assert [row[0] for row in table.rows] == ["7"]
    assert not table.goals
    assert [len([*chain.make_chain(depth).model.modules()]) for depth in (128, 512)] == [*chain.MOST_ADDED_MS]


def test_the_loop_by_hand_and_the_runner_peak_alike():
    """The runner keeps nothing beside what the loop keeps, on every kind of model."""
    table = runner.measure_peaks(samples=8, width=4)
    assert len(table.rows) == 4
    assert all(float(row[-1]) < 1.05 for row in table.rows)


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


def test_going_on_naively_is_seen_to_be_wrong():
    """The oracle is no formality: on gradients that were touched, redoing only the micro-batch that failed shows."""
    training = models.make_trainings(recomputed.SAMPLES, width=4, depth=1, dtype=recomputed.torch.float64)[3]
    outcomes = recomputed.survive_everywhere(recomputed.redo_naively, training, every=5)
    assert any(outcome.error > 1e-3 for outcome in outcomes)


def test_the_quiet_ends():
    """After it, garbage collection sees old objects again, and autobatch logs as before."""
    logger = logging.getLogger("autobatch")
    before = logger.level
    with quiet.undisturbed():
        assert gc.get_freeze_count() > 0
        assert not logger.isEnabledFor(logging.ERROR)
    assert gc.get_freeze_count() == 0
    assert logger.level == before


@pytest.mark.parametrize("fits", [3, 37])
def test_the_search_says_what_was_tried(fits):
    """The size found fits and has run, and every trial is counted."""
    memory = peers.Memory(fits)
    found = search.with_autobatch(memory, 64, headroom=0)
    assert found <= fits
    assert memory.trials >= 1
    assert memory.shortages == 0
    assert any(found <= size <= fits for size in memory.sizes)


def test_a_peer_is_counted_by_the_memory_it_meets():
    """One that halves from 64 in room for 10 is seen to try 64, 32, 16 and 8."""

    def halve(memory, asked):
        while True:
            try:
                return memory.try_once(asked)
            except RuntimeError:
                asked //= 2

    table = search.measure(fits=[10], asked=64, peers=[peers.Peer("halving", "halving", halve)])
    assert table.rows[-1] == ("halving", "10", "8", "8", "8", "4", "3", "4", "120")


def test_a_size_that_never_ran_is_named():
    """A peer that returns more than it tried is shown to."""

    def boast(memory, asked):
        return 2 * memory.try_once(4)

    table = search.measure(fits=[5], asked=64, peers=[peers.Peer("boasting", "boasting", boast)])
    assert "never ran" in table.rows[-1][4]


def test_a_missing_peer_says_what_to_install():
    """Without a peer the rest is measured, and its row tells the way."""

    def missing(memory, asked):
        import no_such_search

        return no_such_search.find(asked)

    table = search.measure(fits=[5], asked=16, peers=[peers.Peer("absent", "no-such-search", missing)])
    assert "pip install no-such-search" in table.rows[-1][2]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert peers.describe_peers([peers.Peer("absent", "no-such-search", missing)]) == {
        "no-such-search": "not installed"
    }


def test_the_page_holds_every_table_and_goal():
    """Date, versions, goals and each table are on the page, and a missed goal is called missed."""
    goal = tables.Goal("some goal", "at most 1", "2", tables.judge(met=False))
    table = tables.Table("Title", "How to read it.", ("a", "b"), [("1", "2")], [goal])
    page = results.write_page([(table, 1.5)])
    assert "| some goal | at most 1 | 2 | MISSED |" in page
    assert "## Title\n\nHow to read it.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |" in page
    assert f"torch {recomputed.torch.__version__}" in page
    assert "make bench" in page


def test_a_part_of_a_page_is_replaced_and_the_others_stay(tmp_path):
    """Two programs write one page, in any order, as often as they like."""
    page = tmp_path / "page.md"
    tables.write_part(page, "second", "# B\n\nold")
    tables.write_part(page, "first", "# A")
    tables.write_part(page, "second", "# B\n\nnew")
    assert page.read_text() == "<!-- first -->\n# A\n\n<!-- second -->\n# B\n\nnew\n"


def make_cells(outside, held_out=False):
    """Cells of models whose peaks are the simulation's and what lies outside, in one half."""
    names = [name for name in map(str, range(200)) if accuracy.is_held_out(name) == held_out][:12]
    return [
        peaks.Cell(name, 8, outside + reserved, reserved, reserved - 90, grouped=False, seconds=1, cpu_seconds=1)
        for name, reserved in zip(names, range(1000, 13_000, 1000), strict=True)
    ]


def test_the_constants_of_a_rule_are_found_again():
    """Also beside a few peaks that obey no rule, as workspaces that are taken now and then."""
    cells = make_cells(1700)
    found = accuracy.fit_constants([*cells, dataclasses.replace(cells[0], peak=9000.0)])
    assert found.outside == 1700
    assert accuracy.score(cells, accuracy.Constants(1700))[:3] == ("12", "0.0%", "0.0%")
    assert accuracy.Constants(1700, counts_cudnn=False).error(cells[-1]) < 0


def test_half_of_all_models_are_held_out():
    """The same ones always, in every process."""
    held_out = [name for name in map(str, range(1000)) if accuracy.is_held_out(name)]
    assert 400 < len(held_out) < 600
    assert [accuracy.is_held_out(name) for name in ("resnet50", "vit_tiny_patch16_224", "convnext_small")] == [
        True,
        True,
        True,
    ]


def test_without_its_table_the_benchmark_says_what_it_needs(tmp_path):
    """The table is not part of the repository."""
    with pytest.raises(SystemExit, match="this needs a CSV file with the columns model, batch, peak_mib"):
        accuracy.main(["--table", str(tmp_path / "none.csv")])


def test_a_table_is_read_up_to_the_cards_end(tmp_path):
    """Peaks near the end of the card are cut off there, and say nothing."""
    table = tmp_path / "table.csv"
    table.write_text("model,batch,peak_mib\na,8,100\na,16,39000\nb,8,200\n")
    assert peaks.read_table(table) == {"a": {8: 100.0}, "b": {8: 200.0}}


def test_models_are_chosen_from_all_families_in_turn():
    """A large family is not most of the sample; the same models always, the first of them in any larger sample."""
    table = {name: {8: 100.0} for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2")}
    chosen = peaks.choose(table, 5, lambda name: name[0])
    assert sorted(name[0] for name in chosen) == ["a", "a", "b", "c", "c"]
    assert peaks.choose(dict(reversed(table.items())), 3, lambda name: name[0]) == chosen[:3]
    assert sorted(peaks.choose(table, 99, lambda name: name[0])) == sorted(table)


def test_a_family_is_shown_by_itself_only_with_enough_models():
    """The worst one first; the rest together."""
    cells = make_cells(accuracy.SHIPPED.outside)
    few = [dataclasses.replace(cell, family="few", peak=2 * cell.peak) for cell in cells[:2]]
    many = [dataclasses.replace(cell, family="many") for cell in cells[2:]]
    rows = accuracy.by_family([*few, *many], accuracy.SHIPPED)
    assert [row[:4] for row in rows] == [("all others", "2", "2", "50.0%"), ("many", "10", "10", "0.0%")]
    assert [row[5] for row in rows] == ["100.0%", "0.0%"]


def test_a_model_that_fails_prints_no_other_models_seconds(monkeypatch, tmp_path, capsys):
    """Its line says that it failed, and what the page says of it is why."""

    def simulate(name, *_):
        if name == "b":
            raise InvalidArgument("it needs values")
        return iter(make_cells(1000, held_out=name == "c"))

    monkeypatch.setattr(accuracy, "simulate", simulate)
    monkeypatch.setattr(accuracy, "families", lambda: lambda name: name)
    path = tmp_path / "table.csv"
    path.write_text("model,batch,peak_mib\na,8,100\nb,8,100\nc,8,100\n")
    tables_found = accuracy.measure(path, 3)
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines == {"a": ["1.0", "s"], "b": ["could", "not", "be", "traced"], "c": ["1.0", "s"]}
    assert "1 models could not be traced: b: it needs values" in tables_found[0].explanation


@pytest.mark.parametrize(
    ("name", "goal"), [("_MOST_ERROR", 0), ("_MOST_UNDER", 1), ("_MOST_SECONDS", 2), ("_MOST_CPU_SECONDS", 3)]
)
def test_a_goal_is_the_number_that_it_says(monkeypatch, name, goal):
    """What is wanted and what is judged by are one constant."""
    cells = [*make_cells(1000), *make_cells(accuracy.SHIPPED.outside, held_out=True)]
    wanted = accuracy.tabulate(cells, [])[0].goals[goal].wanted
    monkeypatch.setattr(accuracy, name, -1)
    changed = accuracy.tabulate(cells, [])[0].goals[goal]
    assert changed.verdict == "MISSED"
    assert changed.wanted != wanted


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


def test_what_is_said_of_the_worst_families_is_what_was_measured():
    """How many they are, and how much of theirs was above the prediction with its margin."""
    shares = [float(row[5].removesuffix("%")) for row in rows_of("By family") if row[0] != "all others"]
    bad = [share for share in shares if share >= 20]
    assert FAMILIES_REASON.startswith(f"in {len(bad)} of {len(shares)} families")
    assert (round(min(bad)), round(max(bad))) == (27, 33)
    assert "a quarter to a third of the peaks" in FAMILIES_REASON


def test_goals_are_judged_by_what_ships():
    """On the half that was held out; a prediction that is wrong by half misses them."""
    fitted = make_cells(1000)
    exact = make_cells(accuracy.SHIPPED.outside, held_out=True)
    halved = [dataclasses.replace(cell, peak=2 * cell.peak) for cell in exact]
    met, missed = (accuracy.tabulate([*fitted, *own], [])[0].goals for own in (exact, halved))
    assert [goal.verdict for goal in met] == ["met"] * 4
    assert [goal.verdict for goal in missed] == ["MISSED", "MISSED", "met", "met"]


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


NOT_COMPUTED = re.compile(r"(?<!simulated )(?<!a simulated )\b(NVIDIA )?(A100|H100|L4|T4)\b")


def test_a_card_that_computed_nothing_is_called_simulated():
    """In every line of the chapter that the stand-in card has made, its titles and tables included."""
    page = Path(machine.__file__).with_name("RESULTS.md").read_text(encoding="utf-8")
    chapter = page.partition("<!-- card -->")[2].partition("<!-- ")[0]
    assert "which computes nothing" in chapter
    for line in chapter.splitlines():
        assert not NOT_COMPUTED.search(line), line
        if line.startswith("#"):
            assert "simulated" in line


@pytest.mark.parametrize(("preloaded", "name"), [("/venv/card/libcard.so", "a simulated A100"), ("", "NVIDIA A100")])
def test_a_name_says_whether_its_card_is_there(preloaded, name, monkeypatch):
    """What the next page is made with."""
    monkeypatch.setenv("LD_PRELOAD", preloaded)
    assert machine.describe_card("NVIDIA A100") == name
