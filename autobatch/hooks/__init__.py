"""Hooks: what a run tells, handed to where people watch it. One line to add, and nothing is imported before it is used.

    runner = autobatch.Runner(plan, model, step=step, optimizer=optimizer, hooks=[autobatch.hooks.tensorboard(writer)])

A hook that raises costs a log line, never a step.
"""

from __future__ import annotations

from autobatch.hooks.console import console
from autobatch.hooks.jsonl import jsonl
from autobatch.hooks.memory_snapshot import memory_snapshot
from autobatch.hooks.prometheus import prometheus
from autobatch.hooks.trackers import mlflow, tensorboard, wandb

__all__ = ["console", "jsonl", "memory_snapshot", "mlflow", "prometheus", "tensorboard", "wandb"]
