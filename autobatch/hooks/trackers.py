"""TensorBoard, Weights & Biases and MLflow: an event's numbers in their words.

Covers one hook for each. Does not cover making a writer or a run: that is the user's. A tracker's library is imported
only where its hook needs it.
"""

from __future__ import annotations

import importlib
from typing import Any

from autobatch._arguments import is_instance_with
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook
from autobatch.hooks.metrics import read_event

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

    def write(event: Event, /) -> None:
        reading = read_event(event)
        if reading is not None:
            for name, value in reading.values.items():
                writer.add_scalar(name, value, reading.step)

    return write


def wandb(run: Any | None = None) -> Hook:
    """Numbers ``autobatch/...`` to a run of Weights & Biases.

    They are logged without a step of their own, since that must never go back, and yours may count otherwise; the
    runner's step is among them as ``autobatch/step``.

    Args:
        run: From ``wandb.init()``; ``None`` for the one that is active when an event comes.

    Raises:
        ImportError: No run was given and wandb is not installed.
        InvalidArgument: It is no run.
    """
    if run is not None and not is_instance_with(run, "log"):
        raise InvalidArgument(f"wandb({show_value(run)}): pass what wandb.init() returned, or nothing")
    if run is None:
        importlib.import_module("wandb")  # what is missing is told now, and not at every step

    def write(event: Event, /) -> None:
        reading = read_event(event)
        if reading is not None:
            target = importlib.import_module("wandb") if run is None else run
            target.log({**reading.values, "autobatch/step": reading.step})

    return write


def mlflow(run_id: str | None = None) -> Hook:
    """Metrics ``autobatch/...`` to a run of MLflow, at the runner's step.

    Args:
        run_id: Of the run; ``None`` for the one that is active when an event comes. Where none is, nothing is kept:
            MLflow would begin one, and the user's own ``start_run`` after it would fail.

    Raises:
        ImportError: MLflow is not installed.
        InvalidArgument: The id is no text.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise InvalidArgument(f"mlflow(run_id={show_value(run_id)}): pass the run's id, a text, or nothing")
    library = importlib.import_module("mlflow")

    def write(event: Event, /) -> None:
        reading = read_event(event)
        if reading is not None and (run_id is not None or library.active_run() is not None):
            numbers = {name: float(value) for name, value in reading.values.items()}
            library.log_metrics(numbers, step=reading.step, run_id=run_id)

    return write
