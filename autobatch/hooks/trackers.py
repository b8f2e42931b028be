"""Sends the numbers of events to TensorBoard, Weights & Biases and MLflow.

Covers which events have numbers, and one hook for each tracker. Does not cover making a writer or a run: that is the
user's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from autobatch._arguments import is_instance_with
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook, Retried, SizeChanged, StepFinished
from autobatch.events.runner_events import step_metrics

__all__ = ["mlflow", "tensorboard", "wandb"]


def tensorboard(writer: Any) -> Hook:
    """Scalars ``autobatch/...`` to TensorBoard, at the runner's step.

    Args:
        writer: A ``SummaryWriter``, of torch or tensorboardX. Closing it is yours.

    Raises:
        InvalidArgument: It is none.
    """
    if not is_instance_with(writer, "add_scalar"):
        raise InvalidArgument(f"tensorboard({show_value(writer)}): pass a SummaryWriter")

    def write(metrics: dict[str, int | float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return _log_metrics(write)


def wandb(run: Any | None = None) -> Hook:
    """Numbers ``autobatch/...`` to a run of Weights & Biases.

    They are logged without a step of their own, since that must never decrease, and yours may count otherwise; the
    runner's step is among them as ``autobatch/step``.

    Args:
        run: From ``wandb.init()``; ``None`` for the one that is active when an event comes.

    Raises:
        ImportError: No run was given and wandb is not installed.
        InvalidArgument: It is no run.
    """
    if run is not None and not is_instance_with(run, "log"):
        raise InvalidArgument(f"wandb({show_value(run)}): pass what wandb.init() returned, or nothing")
    target = importlib.import_module("wandb") if run is None else run

    def write(metrics: dict[str, int | float], step: int) -> None:
        target.log({**metrics, "autobatch/step": step})

    return _log_metrics(write)


def mlflow(run_id: str | None = None) -> Hook:
    """Metrics ``autobatch/...`` to a run of MLflow, at the runner's step.

    Args:
        run_id: Of the run; ``None`` for the one that is active when an event comes. Where none is active, nothing is
            logged: MLflow would begin one, and the user's own ``start_run`` after it would fail.

    Raises:
        ImportError: MLflow is not installed.
        InvalidArgument: The id is no text.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise InvalidArgument(f"mlflow(run_id={show_value(run_id)}): pass the run's id, a text, or nothing")
    library = importlib.import_module("mlflow")

    def write(metrics: dict[str, int | float], step: int) -> None:
        if run_id is not None or library.active_run() is not None:
            library.log_metrics({name: float(value) for name, value in metrics.items()}, step=step, run_id=run_id)

    return _log_metrics(write)


def _log_metrics(write: Callable[[dict[str, int | float], int], None]) -> Hook:
    """A hook that calls ``write(metrics, step)`` for each event that has numbers."""

    def log(event: Event, /) -> None:
        if isinstance(event, StepFinished):
            metrics = step_metrics(event.micro_batch_sizes, event.retries, event.peak_bytes, event.seconds)
            write({**metrics, "autobatch/budget_bytes": event.budget_bytes}, event.step)
        elif isinstance(event, Retried):
            write({"autobatch/out_of_memory_at": event.failed_size}, event.step)
        elif isinstance(event, SizeChanged):
            write({"autobatch/size_limit": event.new_size}, event.step)

    return log
