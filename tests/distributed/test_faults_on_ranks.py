"""The proof on several ranks: memory may end at any operation on one of them, and the result is never a wrong one."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
from builders.rank_faults import RANK_CASES, SHARDED_CASES, prove_on_ranks
from builders.ranks import run_ranks, values_of

STRIDE = os.environ.get("STRIDE", "")
"""Every how many operations: ``make proof`` says each."""

NAMES = [case.name for case in RANK_CASES]


def prove(names, stride):
    """By name."""
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return {name: prove_on_ranks(name, stride) for name in names}


def test_an_oom_at_operations_of_a_step_on_each_rank():
    """One small model in every run."""
    check(NAMES[:1], size=2, stride=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("size", "stride"), [(2, 11), (3, 29)] if not STRIDE else [(2, int(STRIDE)), (3, int(STRIDE))])
@pytest.mark.parametrize("part", range(3))
def test_the_proof_on_ranks(part, size, stride, capsys):
    """Every rank ends bitwise as if each had used its committed micro-batches, or nothing has happened on any."""
    for line in check(NAMES[part::3], size, stride):
        with capsys.disabled():
            print(f"\n{line}")  # noqa: T201 - the numbers are the proof


def check(names, size, stride):
    """No case may be wrong; returns a line for each."""
    answers = run_ranks(prove, names, stride, size=size, timeout_seconds=60, limit_seconds=3500)
    found = values_of(answers)
    assert all(one == found[0] for one in found)
    for name, (_, wrong) in found[0].items():
        assert not wrong, (name, wrong[:5])
    return [f"{size} ranks, {name}: {dict(tally)}" for name, (tally, _) in found[0].items()]
