"""A split that is not exact must be named, and an exact one must not."""

from __future__ import annotations

from planted_bugs import bug

CAUSES = "tests/exactness/test_causes.py"
ROUNDING = "tests/exactness/test_rounding.py"


@bug("autobatch.exactness.verification.compare_few", f"{CAUSES}::test_causes_are_those_that_are_there")
def every_split_is_exact(real, *given):
    """verify() calls a BatchNorm exact."""
    return real(*given).model_copy(update={"exact": True, "causes": ()})


@bug("autobatch.exactness.gradients.Scales.judge", f"{ROUNDING}::test_a_small_part_that_is_wrong_is_found_and_named")
def one_norm_judges_all_parameters(real, self, apart):
    """A wrong gradient of a small parameter is hidden by a large one."""
    return [one / max(*self.sizes, 1e-30) for one in apart]


@bug("autobatch.exactness.gradients.Scales.floor", f"{ROUNDING}::test_no_false_alarm_where_float64_cannot_be_run")
def rounding_is_a_difference(real, self, index):
    """An exact step is called inexact because of its last bits."""
    return 0.0


@bug(
    "autobatch.exactness.sample_numbers.SampleNumbers.begin",
    "tests/exactness/test_per_sample_random.py::test_what_each_sample_draws_for_itself_is_exact",
)
def each_part_draws_as_the_first(real, self, rows, samples):
    """Dropout makes an exact step look inexact."""
    real(self, range(len(rows)), samples)


@bug(
    "autobatch.exactness.verification.compare_many",
    "tests/exactness/test_full_size.py::test_a_right_step_is_exact_at_full_size",
)
def a_few_samples_are_enough(real, comparison, few, planned, samples=None):
    """A step that is exact on four samples and not on a hundred is called exact."""
    return few


@bug(
    "autobatch.exactness.verification.check_update",
    "tests/exactness/test_updates.py::test_an_optimizer_that_reads_more_than_the_gradient_is_named",
)
def the_update_is_not_compared(real, verdict, *others):
    """An optimizer that counts micro-batches is called exact."""
    return verdict


@bug("autobatch.exactness.diagnosis.find_causes", f"{CAUSES}::test_causes_are_those_that_are_there")
def no_cause_is_named(real, measured, partitions, exact=None):
    """verify() says that a split is inexact, and not why."""
    return ()
