"""Ranks together must do what one process does, and none may wait for another in vain."""

from __future__ import annotations

import torch

from planted_bugs import bug

FAILURES_ON_RANKS = "tests/distributed/test_failures_on_ranks.py"
RUNNER_ON_RANKS = "tests/distributed/test_runner_on_ranks.py"
SHARDED_RUNNER = "tests/distributed/test_sharded_runner.py"


@bug(
    "autobatch.training.weights.StepLoss.divisor",
    f"{RUNNER_ON_RANKS}::test_the_gradient_is_that_of_the_whole_target",
)
def the_sum_is_not_divided_by_the_total(real, self):
    """The gradient is divided by what one rank expects of the others."""
    counted, unit = real(self)
    return counted, unit and None


@bug(
    "autobatch.distributed.reduction.GradientSlot.read",
    f"{RUNNER_ON_RANKS}::test_the_gradient_is_that_of_the_whole_target",
)
def a_rank_without_a_gradient_adds_something(real, self):
    """A rank that has no gradient of a parameter adds what was in the buffer."""
    value = real(self)
    return torch.ones(self.count, dtype=self.dtype) if value is None else value


@bug(
    "autobatch.distributed.ranks.digest_values",
    f"{FAILURES_ON_RANKS}::test_what_would_be_wrong_is_refused_on_every_rank",
)
def earlier_gradients_may_differ(real, tensors):
    """Gradients from before the step move the ranks' weights apart."""
    return ""


@bug(
    "autobatch.distributed.shared_step.are_close",
    f"{FAILURES_ON_RANKS}::test_what_would_be_wrong_is_refused_on_every_rank",
)
def learning_rates_may_differ(real, rates, others):
    """Different learning rates move the ranks' weights apart."""
    return True


@bug(
    "autobatch.distributed.data_parallel.SharedBuffers.write",
    "tests/distributed/test_wrapper_on_ranks.py::test_buffers_are_the_first_ranks_after_a_step",
)
def buffers_stay_apart(real, self):
    """Each rank keeps running statistics of its own under DistributedDataParallel."""


@bug("autobatch.distributed.sharded.step._sum_squares", f"{SHARDED_RUNNER}::test_one_rank_is_a_group_too")
def shards_are_clipped_by_another_norm(real, gradients):
    """Sharded gradients are clipped by a norm that is too large."""
    return 4 * real(gradients)


@bug(
    "autobatch.training.binding._begin_sharded_scaling",
    f"{SHARDED_RUNNER}::test_narrow_gradients_are_added_up_in_float32",
)
def shards_are_a_mean_once_more(real, model, scaler):
    """Gradients of fully_shard are divided by the number of ranks once more."""
    return lambda loss: loss * 1.0


@bug(
    "autobatch.distributed.share_sampler.ShareSampler._own_part",
    "tests/distributed/test_share_sampler.py::test_an_epoch_is_resumed_on_another_number_of_ranks",
)
def all_ranks_read_the_same_samples(real, self, batch):
    """Each rank trains on the first rank's samples."""
    part = real(self, batch)
    return slice(0, part.stop - part.start)
