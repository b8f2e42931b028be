"""No size is promised that was not tried, and memory that comes back is used."""

from __future__ import annotations

from dataclasses import replace

from planted_bugs import bug

PACING = "tests/planning/test_pacing.py"


@bug("autobatch.planning.next_trial.choose_size", "tests/fitting/test_fitting.py::test_the_plans_size_has_always_run")
def an_untried_size_is_promised(real, question, trials, objective="throughput"):
    """fit() returns the next larger size, which nobody has tried."""
    chosen = real(question, trials, objective)
    return None if chosen is None else min((size for size in question.sizes if size > chosen), default=chosen)


@bug(
    "autobatch.planning.next_trial.fits", "tests/planning/test_next_trial.py::test_a_trial_above_the_limit_does_not_fit"
)
def the_headroom_is_used_up(real, question, trial):
    """A size that ran only in the headroom becomes the plan."""
    return trial.outcome == "fits"


@bug(
    "autobatch.planning.pacing.Pace.after_clean_step",
    f"{PACING}::test_after_an_unexplained_oom_the_size_is_back_after_one_clean_step",
)
def the_size_never_grows_back(real, self, largest):
    """One shortage makes all later steps slower."""
    return self


@bug("autobatch.planning.pacing.Pace.after_shortage", f"{PACING}::test_the_size_after_an_oom_by_example")
def the_size_that_failed_is_taken_again(real, self, failed, limit_bytes, least=1):
    """A step that ran out of memory is run again at the same size."""
    return replace(real(self, failed, limit_bytes, least), size=min(failed, self.ladder[-1]))


@bug(
    "autobatch.planning.pacing.Pace.before_step",
    "tests/training/test_runner.py::test_a_step_shrinks_first_when_less_is_free_and_grows_back_later",
)
def other_processes_are_not_noticed(real, self, most_bytes, limit_bytes):
    """Each step runs out of memory where another process has taken some."""
    return self


@bug(
    "autobatch.planning.reuse._why_not",
    "tests/planning/test_reuse.py::test_a_plan_that_needs_more_than_there_is_today_is_refused",
)
def a_plan_from_a_larger_card_is_used(real, plan, wanted):
    """A remembered plan that needs more memory than there is today is used."""
    return ""


@bug(
    "autobatch.planning.reuse.why_not_confirmed",
    "tests/fitting/test_reuse.py::test_a_change_that_the_fingerprint_cannot_see_is_found_by_the_trial",
)
def every_trial_confirms_a_plan(real, plan, trial, limit_bytes):
    """A remembered plan is used although its trial took other memory than then."""
    return ""


@bug(
    "autobatch.planning.sizes_by_length.edge_above",
    "tests/planning/test_sizes_by_length.py::test_a_longer_sample_than_any_that_was_tried_is_refused",
)
def long_samples_run_as_many_as_short_ones(real, sizes, length):
    """A micro-batch of long texts has as many as ran of short ones."""
    return sizes[0]
