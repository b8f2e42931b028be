"""Sends a runner's events to files and trackers; each tracker's library is imported with its hook.

    runner = autobatch.Runner(plan, model, step=step, optimizer=optimizer, hooks=[autobatch.hooks.tensorboard(writer)])

A hook that raises costs a log line, never a step.
"""

from __future__ import annotations

from autobatch.hooks.output import console, jsonl, memory_snapshot
from autobatch.hooks.trackers import mlflow, prometheus, tensorboard, wandb

__all__ = ["console", "jsonl", "memory_snapshot", "mlflow", "prometheus", "tensorboard", "wandb"]
