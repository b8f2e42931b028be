"""Finds the batch size of a training function as accelerate's decorator does, by measurement instead of running out.

    from autobatch.integrations.accelerate import find_executable_batch_size  # in place of accelerate.utils

Covers the decorator. A model, optimizer, scheduler and scaler from ``accelerator.prepare`` need no adapter: ``fit`` and
``Runner`` take them as they are.
"""

from __future__ import annotations

from autobatch.integrations.accelerate.batch_size import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
