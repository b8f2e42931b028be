"""A trial must hold what training holds."""

from __future__ import annotations

from planted_bugs import bug

PROBE = "tests/fitting/test_probe.py"


@bug("autobatch.fitting.probe.Probe._accumulate", f"{PROBE}::test_the_second_micro_batch_is_what_peaks")
def a_trial_runs_one_micro_batch(real, self, batches, size):
    """A plan fits the first micro-batch, and the second has gradients beside it."""
    return real(self, batches[:1], size)


@bug("autobatch.fitting.probe.Probe._update", f"{PROBE}::test_the_optimizers_own_peak_is_measured")
def a_trial_has_no_optimizer(real, self):
    """A plan has no room for the optimizer's state."""


@bug(
    "autobatch.undo.training_state.TrainingState.rewind",
    "tests/fitting/test_fitting.py::test_a_real_budget_on_the_cpu_is_kept",
)
def a_trial_begins_where_the_last_one_ended(real, self):
    """Trials train: a model with a memory becomes another one from trial to trial."""


@bug(
    "autobatch.step.fingerprint.fingerprint",
    "tests/fitting/test_reuse.py::test_what_is_not_the_same_is_searched_for",
)
def all_models_are_the_same(real, *arguments, **options):
    """A remembered plan of another model is tried."""
    return "same"


@bug(
    "autobatch.fitting.probe.Probe._measure",
    "tests/training/test_held_activations.py::test_the_plans_size_runs_in_every_step",
)
def what_the_last_step_holds_is_forgotten(real, self, size):
    """A model that keeps activations runs out of memory in its second step."""
    self._holds_activations = False
    real(self, size)
    self._holds_activations = False
