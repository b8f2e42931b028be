"""What ranks, or kinds of batches, make of the rules that each has found; the class of labels that one rank ignores."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from autobatch.integrations.transformers.cuts import CollatedSamples, Rows, TrimmedRows
from autobatch.integrations.transformers.known_rules import KnownRules, agree, choose_likeliest, entries_of, join
from autobatch.integrations.transformers.loss_rule import READINGS, LossRule

DIVIDED, SHIFTED, LABELS, SAMPLES = READINGS
STEP: Any = None
exact = partial(LossRule, step=STEP, is_exact=True)
ROWS, TRIMMED = Rows(), TrimmedRows()


@pytest.mark.parametrize("turned", [False, True])
def test_what_one_rank_has_refuted_no_rank_takes(turned):
    """On one rank labels are ignored, and the other could not tell a mean over labels from one over samples."""
    rules = [exact(ROWS, SAMPLES, open=(LABELS,)), exact(ROWS, LABELS)]
    agreed = agree(rules[::-1] if turned else rules)
    assert agreed is not None
    assert (agreed.reading, agreed.open) == (LABELS, ())


def test_readings_that_no_rank_could_tell_apart_stay_open():
    """Both have equally many labels in each sample."""
    agreed = agree([exact(ROWS, SHIFTED, open=(LABELS, SAMPLES)), exact(ROWS, SHIFTED, open=(SAMPLES,))])
    assert agreed is not None
    assert (agreed.reading, agreed.open) == (SHIFTED, (SAMPLES,))


def test_ranks_with_no_reading_in_common_have_no_rule():
    """A mean on one and a sum on the other; where that has to do, it is known not to be exact."""
    rules = [exact(ROWS, SAMPLES), exact(TRIMMED, DIVIDED)]
    assert agree(rules) is None
    assert join(rules) is None
    assert choose_likeliest(rules) == LossRule(ROWS, SAMPLES, STEP)


def test_the_cut_is_the_one_that_was_tried_last():
    """A rank without padding could not see that padding must not be cut off."""
    agreed = agree([exact(TRIMMED, SAMPLES, is_tried=False), exact(ROWS, SAMPLES)])
    assert agreed is not None
    assert agreed.cut is ROWS
    assert [cut.place for cut in (TRIMMED, ROWS, CollatedSamples(list))] == [0, 1, 2]


def test_a_rank_that_had_nothing_to_compare_refutes_nothing():
    """What the other has found holds for it; where none could compare, the next batch is asked."""
    guess = LossRule(ROWS, SAMPLES, STEP, is_guess=True)
    assert agree([guess, exact(ROWS, LABELS)]) == exact(ROWS, LABELS)
    assert (agreed := agree([guess, guess])) is not None
    assert agreed.is_guess


def test_what_is_open_for_one_kind_is_open_for_a_step_with_it():
    """Of two losses the one may be another reading, be trimmed or not, and be a guess."""
    open_one = exact(TRIMMED, SHIFTED, open=(LABELS,), is_tried=False)
    joined = join([exact(TRIMMED, SHIFTED), open_one])
    assert joined == open_one
    assert (joined := join([exact(ROWS, SAMPLES), LossRule(ROWS, DIVIDED, STEP, is_guess=True)])) is not None
    assert (joined.reading, joined.is_guess, joined.is_exact) == (SAMPLES, True, False)


def find(known, *tasks):
    """The rule for a step in which each rank's batch is of one of these tasks."""
    return known.find([entries_of({"task": task}) for task in tasks])


def test_kinds_that_are_known_need_no_search_in_one_step():
    """Ranks are at one kind each: found apart, they are divided together where one rule is exact for both."""
    known = KnownRules("Trainer")
    for task, reading in (("one", SAMPLES), ("other", SAMPLES), ("sum", DIVIDED)):
        assert find(known, task, task) is None
        assert known.add([exact(ROWS, reading)] * 2) == exact(ROWS, reading)
    assert find(known, "one", "other") == exact(ROWS, SAMPLES)
    assert find(known, "one", "sum") is None
    assert known.add([exact(ROWS, SAMPLES), exact(ROWS, DIVIDED)]) is None
    known.insist(LossRule(ROWS, SAMPLES, STEP))
    assert find(known, "sum", "one") == LossRule(ROWS, SAMPLES, STEP)
    assert find(known, "sum", "sum") == exact(ROWS, DIVIDED)


def test_a_checkpoint_has_what_was_left_out_and_what_is_a_guess():
    """A resumed training asks as the undisturbed one does."""
    known, resumed = KnownRules("Trainer"), KnownRules("Trainer")
    for number in range(8):
        find(known, f"file {number}")
        known.add([exact(ROWS, SAMPLES)])
    rule = LossRule(ROWS, SAMPLES, STEP, is_guess=True)
    assert resumed.load(known.state(rule), [ROWS], STEP) == rule
    assert find(resumed, "file 9") == rule
