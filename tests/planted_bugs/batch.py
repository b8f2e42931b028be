"""Each sample must run once, together with what belongs to it."""

from __future__ import annotations

from planted_bugs import bug


@bug(
    "autobatch.training.accumulation.cut_weighed",
    "tests/training/test_accumulation.py::test_the_split_gradient_is_the_full_batch_gradient",
)
def the_last_micro_batch_is_dropped(real, *arguments):
    """The last samples of a batch are never trained on."""
    parts = real(*arguments)
    return parts[:-1] or parts


@bug(
    "autobatch.batch.cut.divide",
    "tests/training/test_smallest_piece.py::test_a_plan_without_trials_finds_out_and_leaves_no_damage",
)
def one_sample_is_left_alone(real, group, largest, smallest=1):
    """A last micro-batch of one sample ends in BatchNorm's error."""
    return real(group, largest, 1)


@bug(
    "autobatch.batch.cut._check_each_once",
    "tests/training/test_given_cut.py::test_a_sample_that_is_lost_or_comes_twice_is_refused",
)
def a_cut_may_lose_samples(real, groups, count):
    """A cut= that gives a sample twice or not at all trains on another batch."""


@bug(
    "autobatch.batch.lengths.PlannedLengths._trim",
    "tests/training/test_sample_lengths.py::test_what_counts_behind_what_does_not_is_not_trimmed_off",
)
def texts_are_cut_off(real, self, length, padded):
    """Texts that run together are cut off before the end of the longest."""
    return real(self, max(length - 1, 1), padded)


@bug(
    "autobatch.batch.rules._refuse_to_guess",
    "tests/batch/test_layout_rules.py::test_what_can_be_read_in_two_ways_is_asked",
)
def a_list_is_guessed(real, unclear):
    """Two tensors that may be samples or fields are divided in the wrong dimension."""


@bug("autobatch.batch.example._Source._measure", "tests/batch/test_largest.py::test_a_dict_is_asked_for_its_keys")
def the_largest_samples_are_not_looked_for(real, self, entry):
    """fit() tries the first samples of a dataset, and training runs out of memory at the longest."""
    return 0, 0.0, 0
