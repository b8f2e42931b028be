"""The gradient must be the whole batch's, and the optimizer must step exactly once."""

from __future__ import annotations

import torch
from torch import nn

from planted_bugs import bug

ACCUMULATION = "tests/training/test_accumulation.py"
WEIGHTS = "tests/training/test_weights.py"
RUNNER = "tests/training/test_runner.py"


@bug(
    "autobatch.training.weights.StepLoss.divide",
    f"{ACCUMULATION}::test_sizes_33_33_33_1_are_weighed_by_their_samples",
)
def micro_batches_count_alike(real, self, micro_batch, loss):
    """A short last micro-batch counts as much as a full one."""
    return real(self, micro_batch._replace(weights={"": self.samples / -(-self.samples // micro_batch.size)}), loss)


@bug(
    "autobatch.step.workload.Workload.weights_of",
    f"{ACCUMULATION}::test_class_weights_are_exact_when_weighed_by_their_sum",
)
def weigh_is_ignored(real, self, micro_batch, samples):
    """A mean over tokens is taken over samples."""
    return {"": float(samples)}


@bug(
    "autobatch.training.weights.StepLoss.restart",
    "tests/training/test_faults.py::test_an_oom_at_any_operation_of_a_step",
)
def the_loss_of_a_failed_attempt_stays(real, self):
    """The loss of a retried step has what its failed attempt computed in it."""
    value = getattr(self, "value", None)
    real(self)
    self.value = value


@bug(
    "autobatch.training.whole_batch._is_same",
    "tests/training/test_whole_batch.py::test_a_generator_of_the_step_s_own",
)
def a_second_pass_may_draw_otherwise(real, one, other):
    """The gradient of a contrastive loss is that of other representations than those it compared."""
    return one.new_ones((), dtype=torch.bool)


@bug(
    "autobatch.training.weights.StepLoss.correct",
    f"{WEIGHTS}::test_a_narrow_loss_is_weighed_without_rounding",
)
def stated_counts_are_guesses(real, self):
    """A step that states its count is divided by a number that is only near to the total."""
    return 1.0


@bug(
    "autobatch.training.update.Update.apply",
    f"{RUNNER}::test_the_optimizer_steps_exactly_once_and_gradients_are_gone",
)
def the_optimizer_steps_twice(real, self, step):
    """Each batch moves the weights twice."""
    for optimizer in self.optimizers:
        optimizer.step()
    real(self, step)


@bug(
    "autobatch.training.update.Update._scale_and_clip",
    f"{RUNNER}::test_clipping_with_a_scaler_is_of_what_the_scaler_divided",
)
def scaled_gradients_are_clipped(real, self):
    """With a scaler gradients are clipped to nearly nothing."""
    if self.scaler is not None and self.max_grad_norm is not None:
        held = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(held, self.max_grad_norm)
    return real(self)


@bug(
    "autobatch.step.workload.Workload.drop_gradients",
    f"{RUNNER}::test_the_optimizer_steps_exactly_once_and_gradients_are_gone",
)
def an_updates_gradients_stay(real, self):
    """The gradient of one step is added to the next one's."""


@bug(
    "autobatch.training.step_memory.StepMemory.check_update",
    f"{RUNNER}::test_an_update_without_room_is_undone_before_it_begins",
)
def an_update_begins_without_room(real, self, summed=()):
    """The optimizer runs out of memory in the middle of its step, which cannot be undone."""


@bug(
    "autobatch.memory.device.end_failed_backward",
    "tests/memory/test_reference_leaks.py::test_wherever_memory_ends_the_same_is_held_after_the_clean_up",
)
def a_failed_backward_pass_holds_its_graph(real):
    """After memory ran out in a backward pass its tensors stay, and the retry runs out of memory too."""


@bug(
    "autobatch.training.misuse.BatchWatch.refuse_writes",
    "tests/training/test_batch_mutation.py::test_everything_is_as_before_a_refused_step",
)
def a_step_may_write_into_its_batch(real, self, copied, *, stays):
    """A retry, and the next epoch, see a batch that the step has changed."""


@bug(
    "autobatch.step.workload.Workload.call_step",
    "tests/step/test_loop_guard.py::test_a_loop_that_begins_later_is_refused_by_the_same_name",
)
def a_step_may_train(real, self, micro_batch):
    """A step function that calls backward() itself counts each gradient twice."""
    return self.step(self.model, micro_batch)


@bug(
    "autobatch.training.runner_state.RunnerState.resume",
    "tests/training/test_runner_state.py::test_a_resumed_run_is_the_undisturbed_one",
)
def a_resumed_run_forgets_its_size(real, self, pace):
    """A resumed run begins with the plan's size, which had run out of memory."""
    return pace


@bug("autobatch.training.loader_steps.Pass._next", "tests/training/test_run.py::test_loaders_of_any_kind")
def what_is_left_of_a_batch_is_dropped(real, self, most):
    """run() loses the samples of a loader's batch that did not fit into a step."""
    layout = real(self, most)
    self._rest = None
    return layout


@bug("autobatch.events.emit", f"{RUNNER}::test_a_hook_that_raises_costs_a_log_line_not_a_step")
def a_hook_ends_the_training(real, event, hooks=()):
    """An error in a progress bar ends the training."""
    for hook in hooks:
        hook(event)
