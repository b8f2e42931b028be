"""Hooks: what a run tells, handed to where people watch it. One line to add, and nothing is imported before it is used.

    runner = autobatch.Runner(plan, model, step=step, optimizer=optimizer, hooks=[autobatch.hooks.tensorboard(writer)])

A hook that raises costs a log line, never a step.
"""

from __future__ import annotations

from autobatch.hooks.exporter import prometheus
from autobatch.hooks.lines import jsonl
from autobatch.hooks.screen import console
from autobatch.hooks.snapshots import memory_snapshot
from autobatch.hooks.trackers import mlflow, tensorboard, wandb

__all__ = ["console", "jsonl", "memory_snapshot", "mlflow", "prometheus", "tensorboard", "wandb"]
