"""A step that runs again must begin as the first attempt did, and fit must leave no trace."""

from __future__ import annotations

from planted_bugs import bug

ACCUMULATION = "tests/training/test_accumulation.py"
FAULTS = "tests/training/test_faults.py"
MOVING_STATE = "tests/undo/test_moving_state.py"


@bug(
    "autobatch.undo.random_state.RandomState.restore",
    "tests/undo/test_random_state.py::test_after_a_restore_the_same_numbers_come",
)
def generators_stay(real, self):
    """A retried step draws other dropout than its first attempt."""


@bug("autobatch.undo.undo.Undo._restore_values", "tests/undo/test_undo.py::test_a_forward_pass_is_undone")
def running_statistics_stay(real, self):
    """A retried step keeps what BatchNorm wrote."""


@bug(
    "autobatch.undo.module_state.ModuleState.restore",
    "tests/training/test_faults.py::test_the_proof",
)
def attributes_stay(real, self):
    """A counter that a module keeps in an attribute counts a retried step twice."""


@bug("autobatch.undo.undo.Undo.restart", f"{FAULTS}::test_an_oom_at_any_operation_of_a_step")
def gradients_of_a_failed_attempt_stay(real, self):
    """Micro-batches that ran before memory ran out are counted twice in the gradient."""
    kept = [parameter.grad for parameter in self.gradients.parameters]
    real(self)
    for parameter, gradient in zip(self.gradients.parameters, kept, strict=True):
        parameter.grad = gradient


@bug(
    "autobatch.undo.gradients.Float32Sums.clear",
    f"{FAULTS}::test_memory_that_ends_twice[bfloat16, AdamW fused]",
)
def float32_sums_of_a_failed_attempt_stay(real, self):
    """Half-precision gradients of a failed attempt are counted twice."""


@bug(
    "autobatch.undo.gradients.EarlierGradients.add",
    f"{ACCUMULATION}::test_earlier_gradients_are_added_and_keep_their_identity",
)
def earlier_gradients_are_lost(real, self):
    """Gradients from before accumulate() are dropped instead of added to."""


@bug(
    "autobatch.undo.gradients.EarlierGradients.restore",
    f"{ACCUMULATION}::test_memory_that_never_suffices_restores_everything_and_raises",
)
def earlier_gradients_are_not_put_back(real, self):
    """A step that could not be done has taken the gradients from before it."""


@bug(
    "autobatch.undo.undo.Undo.refuse_lost",
    f"{MOVING_STATE}::test_a_write_that_was_never_seen_before_is_an_error_and_never_a_wrong_result",
)
def a_step_that_cannot_be_undone_runs_again(real, self, reason):
    """A step that wrote into memory without a copy is run again on what it wrote."""


@bug(
    "autobatch.undo.written_memory.WrittenMemory.save",
    f"{MOVING_STATE}::test_a_write_that_was_seen_in_an_earlier_step_is_put_back",
)
def a_teacher_that_moves_is_not_copied(real, self):
    """An average of weights that forward() updates moves twice in a retried step."""
    return {}


@bug("autobatch.undo.user_objects.UserObjects.restore", f"{MOVING_STATE}::test_a_named_object_rides_on_the_step")
def a_metric_counts_twice(real, self):
    """A metric that keep= names counts the samples of a failed attempt."""


@bug(
    "autobatch.undo.undo.Undo.release",
    "tests/training/test_step_lifetimes.py::test_what_hangs_on_a_parameter_is_free_when_the_step_lets_go_of_it",
)
def the_record_outlives_its_step(real, self):
    """Activations of a finished step are held while the next one runs."""
    self.is_released = True


@bug("autobatch.undo.training_state.TrainingState.restore", "tests/fitting/test_fitting.py::test_fit_leaves_no_trace")
def fit_trains_the_model(real, self):
    """fit() leaves the weights, buffers and optimizer state of its trials."""


@bug(
    "autobatch.training.update.forget_state",
    "tests/training/test_update.py::test_what_was_prepared_can_be_cancelled",
)
def state_for_an_undone_update_stays(real, optimizer, parameters):
    """An update that was undone leaves optimizer state for parameters that had none."""


@bug(
    "autobatch.undo.gradients.join_sparse_rows",
    "tests/undo/test_sparse_gradients.py::test_a_trial_holds_the_rows_of_a_whole_step",
)
def sparse_gradients_grow(real, parameters, sums, widen_to=0):
    """The gradient of a sparse embedding grows with every micro-batch."""
    return False
