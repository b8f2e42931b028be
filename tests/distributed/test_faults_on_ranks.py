"""The proof on several ranks: one of them may run out of memory at any operation, and the result is never wrong."""

import logging
import time
import warnings
from collections import Counter
from itertools import chain

import pytest
from builders.rank_faults import (
    RANK_CASES,
    RECOMPUTED_CASES,
    SHARDED_CASES,
    choose_positions,
    describe,
    needs_sharding,
    prove_on_ranks,
)
from builders.ranks import run_ranks, values_of
from sampling import IN_PROOF, sample

LIMIT = 24 * 3600
"""Seconds of one part of the proof, after which a rank counts as hung; the group's own timeout finds it long before."""

NAMES = [case.name for case in RANK_CASES]
KINDS = ("sharded", "sharded, summed once")
SHARDED = [case.name for case in SHARDED_CASES]
RECOMPUTED = [case.name for case in RECOMPUTED_CASES]
CHOSEN = {"stride": 1} if IN_PROOF else {"count": 1, "every": 3}
"""Operations: each one, or one in each third place of a step, by turns."""


def prove(names, **options):
    """By name: the tally, the wrong outcomes, and the seconds."""
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        began = time.monotonic()
        found[name] = (*prove_on_ranks(name, **options), time.monotonic() - began)
    return found


@pytest.fixture(scope="module")
def total(request):
    """The sum over all cases by the number of ranks, printed at the end."""
    tallies, seconds = {}, Counter()
    yield tallies, seconds
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for size, tally in tallies.items():
            print(f"\nall on {size} ranks: {describe(tally)}; {seconds[size]:.0f} s")  # noqa: T201 - the proof


def test_an_oom_at_operations_of_a_step_on_each_rank(capsys):
    """One small model in every run."""
    check(NAMES[:1], 2, capsys, ({}, Counter()), count=6)


@needs_sharding
def test_an_oom_at_operations_of_a_sharded_step_on_each_rank(capsys):
    """One small model, whose gradients are clipped, in every run."""
    check(SHARDED[:1], 2, capsys, ({}, Counter()), kind=KINDS[0], count=6)


@needs_sharding
def test_an_oom_at_operations_of_a_sharded_step_that_recomputes_blocks(capsys):
    """Memory may end in the recomputation, whole or selective, on one rank."""
    first, second = RECOMPUTED
    chosen = {"stride": 1} if IN_PROOF else {"count": 1, "every": 2}
    check([first], 2, capsys, ({}, Counter()), kind=KINDS[0], **chosen)
    check([second], 2, capsys, ({}, Counter()), kind=KINDS[1], earlier_steps=1, **chosen)


def test_operations_are_chosen_in_each_place():
    """In the shortest as in the longest; and in each place by turns, where only some are wanted."""
    places = ["forward"] * 9 + ["backward"] * 6 + ["clip"] * 3 + ["optimizer"]
    assert choose_positions(places, 1) == [5, 13, 17, 19]
    assert choose_positions(places, 3) == [2, 5, 8, 11, 13, 15, 16, 17, 18, 19]
    parts = [choose_positions(places, 1, every=3, turn=turn) for turn in range(3)]
    assert sorted(chain(*parts)) == choose_positions(places, 1)
    assert [] not in parts


@pytest.mark.timeout(LIMIT + 100)
@pytest.mark.parametrize("size", sample([2, 3], 2))
@pytest.mark.parametrize("part", range(3))
def test_the_proof_on_ranks(part, size, capsys, total):
    """Every rank ends bitwise as if each had used its committed micro-batches, or nothing has happened on any."""
    check(NAMES[part::3], size, capsys, total, **CHOSEN)


@pytest.mark.timeout(LIMIT + 100)
@pytest.mark.parametrize("size", sample([2, 3], 2))
def test_the_proof_with_sums_in_the_last_backward_pass(size, capsys, total):
    """A rank that fails between two buckets takes part in the others: bitwise as above."""
    check(sample(NAMES, 5), size, capsys, total, kind="summed in the last pass", earlier_steps=3, **CHOSEN)


@needs_sharding
@pytest.mark.timeout(LIMIT + 100)
@pytest.mark.parametrize("size", sample([2, 3], 2))
@pytest.mark.parametrize(("earlier_steps", "kind"), [(0, KINDS[0]), (1, KINDS[0]), (0, KINDS[1]), (1, KINDS[1])])
def test_the_proof_with_sharded_parameters(size, earlier_steps, kind, capsys, total):
    """A rank that fails inside a pass takes part in its rest, and all ranks drop it: bitwise as above."""
    first = earlier_steps + 2 * KINDS.index(kind)
    names = sample(SHARDED[first:] + SHARDED[:first], 4 if kind == KINDS[0] else 6)
    check(names, size, capsys, total, kind=kind, earlier_steps=earlier_steps, **CHOSEN)


@needs_sharding
@pytest.mark.timeout(LIMIT + 100)
def test_the_proof_with_replicas_of_shards(capsys, total):
    """A rank that fails takes part in the sums over its replicas, too: bitwise as above."""
    check(sample(SHARDED[1:], len(SHARDED)), 4, capsys, total, kind="hybrid, summed once", earlier_steps=1, **CHOSEN)


def check(names, size, capsys, total, **options):
    """Print a line for each case and add to the total; none may be wrong or have hung."""
    found = run_ranks(prove, names, size=size, timeout_seconds=60, limit_seconds=LIMIT, options=[options] * size)
    answers, kind = values_of(found), f"{options['kind']}, " if "kind" in options else ""
    for name, (tally, wrong, seconds) in answers[0].items():
        with capsys.disabled():
            print(f"\n{size} ranks, {kind}{name}: {describe(tally)}; {seconds:.0f} s")  # noqa: T201 - the numbers are the proof
        total[0].setdefault(size, Counter()).update(tally)
        total[1][size] += seconds
        assert not wrong, (name, wrong[:5])
        assert all(one[name][:2] == (tally, wrong) for one in answers)
