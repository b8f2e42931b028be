"""The benchmarks in a tiny configuration: they measure what they say, and the page shows it.

Covers each module without peers. Does not cover the numbers themselves, which are the machine's.
"""

from __future__ import annotations

import gc
import logging
import time

import models
import peers
import pytest
import quiet
import recomputed
import results
import runner
import search
import tables


def test_a_case_is_timed_pair_by_pair():
    """Every pair holds two times, and the median of the ratios lies between its quartiles."""
    compared = runner.compare(runner.Case(width=8, depth=1, milliseconds=0.2, near=True), pairs=6)
    lower, median, upper = compared.quartiles()
    assert len(compared.pairs) == 6
    assert all(seconds > 0 for pair in compared.pairs for seconds in pair)
    assert lower <= median <= upper
    assert compared.interval()[0] <= median <= compared.interval()[1]


def test_the_order_in_a_pair_alternates_and_times_stay_with_their_side():
    """Neither side always follows the other, and what the first took is never counted for the second."""
    order = []

    def by_hand():
        order.append("hand")
        time.sleep(0.02)

    pairs = runner.pair_up(by_hand, lambda: order.append("runner"), pairs=2)
    assert order == ["hand", "runner", "runner", "hand"]
    assert len(pairs) == 2
    assert all(slow >= 0.02 for slow, _ in pairs)
    assert all(fast < slow for slow, fast in pairs)


def test_the_loop_by_hand_and_the_runner_peak_alike():
    """The runner keeps nothing beside what the loop keeps, on every kind of model."""
    table = runner.measure_peaks(samples=8, width=4)
    assert len(table.rows) == 4
    assert all(float(row[-1]) < 1.05 for row in table.rows)


def test_the_runner_keeps_what_is_clean_and_is_never_wrong():
    """On one model it runs as many samples as the same rule by hand, fewer than a restart, and no gradient is wrong."""
    training = models.make_trainings(recomputed.SAMPLES, width=4, depth=1, dtype=recomputed.torch.float64)[3]
    table = recomputed.measure(every=9, trainings=[training])
    assert [row[0] for row in table.rows] == [training.name, "all"]
    runner_samples, clean_samples, restart_samples, naive_samples = (
        float(cell.split(",")[0]) for cell in table.rows[0][1:]
    )
    assert naive_samples == recomputed.SAMPLES + recomputed.MICRO_BATCH
    assert naive_samples < runner_samples < restart_samples
    assert abs(runner_samples - clean_samples) < 2
    assert [cell.split(", ")[1].split()[0] for cell in table.rows[0][1:4]] == ["0", "0", "0"]
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
