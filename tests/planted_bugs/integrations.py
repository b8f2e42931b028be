"""A framework must log and count a retried step once."""

from __future__ import annotations

from planted_bugs import bug


@bug(
    "autobatch.integrations.transformers.trainer_step.TrainerAttributes.put",
    "tests/integrations/test_shortages.py::test_what_a_step_counts_is_counted_once",
)
def a_trainer_counts_twice(real, self, taken):
    """What a Trainer counts in its step counts failed attempts."""


@bug(
    "autobatch.integrations.transformers.logs.TrainerLogs.put",
    "tests/integrations/test_trainer_logs.py::test_a_retried_step_logs_once",
)
def a_trainer_logs_twice(real, self, taken):
    """What a Trainer logs in its step is logged again by a retry."""


@bug(
    "autobatch.integrations.lightning.logs.ResultsKeeper.put",
    "tests/integrations/test_lightning_shortages.py::test_steps_that_run_out_of_memory_end_exactly",
)
def lightning_logs_twice(real, self, taken):
    """What a LightningModule has logged counts failed attempts."""
