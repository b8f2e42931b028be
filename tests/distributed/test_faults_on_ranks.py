"""The proof on several ranks: memory may end at any operation on one of them, and the result is never a wrong one."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import Counter

import pytest
from builders.rank_faults import RANK_CASES, SHARDED_CASES, describe, needs_sharding, prove_on_ranks
from builders.ranks import run_ranks, values_of

STRIDE = os.environ.get("STRIDE", "")
"""Every how many operations: ``make proof`` says each."""

LIMIT = 3500
"""Seconds of one part of the proof, after which a rank counts as hung."""

NAMES = [case.name for case in RANK_CASES]


SHARDED = [case.name for case in SHARDED_CASES]


def prove(names, stride, **options):
    """By name: what came of it, what was wrong, and the seconds that it took."""
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        began = time.monotonic()
        found[name] = (*prove_on_ranks(name, stride, **options), time.monotonic() - began)
    return found


@pytest.fixture(scope="module")
def total(request):
    """What all cases came to by the number of ranks, printed at the end."""
    tallies, seconds = {}, Counter()
    yield tallies, seconds
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for size, tally in tallies.items():
            print(f"\nall on {size} ranks: {describe(tally)}; {seconds[size]:.0f} s")  # noqa: T201 - the proof


def test_an_oom_at_operations_of_a_step_on_each_rank(capsys):
    """One small model in every run."""
    check(NAMES[:1], 2, 3, capsys, ({}, Counter()))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 100)
@pytest.mark.parametrize(("size", "stride"), [(2, 11), (3, 29)] if not STRIDE else [(2, int(STRIDE)), (3, int(STRIDE))])
@pytest.mark.parametrize("part", range(3))
def test_the_proof_on_ranks(part, size, stride, capsys, total):
    """Every rank ends bitwise as if each had used its committed micro-batches, or nothing has happened on any."""
    check(NAMES[part::3], size, stride, capsys, total)


@needs_sharding
def test_an_oom_at_operations_of_a_step_with_sharded_parameters(capsys):
    """One small model in every run, in a step whose passes are known and in one whose are not."""
    for earlier_steps in (0, 1):
        check(SHARDED[:1], 2, 23, capsys, ({}, Counter()), sharded=True, earlier_steps=earlier_steps)


@needs_sharding
@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 100)
@pytest.mark.parametrize(
    ("size", "stride"), [(2, 59), (3, 193)] if not STRIDE else [(2, int(STRIDE)), (3, int(STRIDE))]
)
@pytest.mark.parametrize("earlier_steps", [0, 1])
def test_the_proof_with_sharded_parameters(size, stride, earlier_steps, capsys, total):
    """A rank that fails inside a pass takes part in its rest, and all ranks drop it: bitwise as above."""
    check(SHARDED, size, stride, capsys, total, sharded=True, earlier_steps=earlier_steps)


def check(names, size, stride, capsys, total, **options):
    """Print a line for each case and add to the total; none may be wrong or have hung."""
    options = [options] * size
    found = run_ranks(prove, names, stride, size=size, timeout_seconds=60, limit_seconds=LIMIT, options=options)
    answers, kind = values_of(found), "sharded, " if options[0] else ""
    for name, (tally, wrong, seconds) in answers[0].items():
        with capsys.disabled():
            print(f"\n{size} ranks, {kind}{name}: {describe(tally)}; {seconds:.0f} s")  # noqa: T201 - the numbers are the proof
        total[0].setdefault(size, Counter()).update(tally)
        total[1][size] += seconds
        assert not wrong, (name, wrong[:5])
        assert all(one[name][:2] == (tally, wrong) for one in answers)
