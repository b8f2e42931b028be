"""Sends a runner's events to files and trackers; each tracker's library is imported with its hook.

    runner = autobatch.Runner(plan, model, step=step, optimizer=optimizer, hooks=[autobatch.hooks.tensorboard(writer)])

A hook that raises costs a log line, never a step.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from autobatch._arguments import check_path, is_instance_with
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook, Retried, SizeChanged, StepFailed, StepFinished
from autobatch.events.runner_events import step_metrics
from autobatch.ledger.ledger import find_home

__all__ = ["console", "jsonl", "memory_snapshot", "mlflow", "prometheus", "tensorboard", "wandb"]

logger = logging.getLogger("autobatch")

_COUNTERS = {
    "steps": "Optimizer steps that were committed",
    "samples": "Samples of those steps",
    "retries": "Number of times that a step ran out of memory and began again",
    "out_of_memory": "Number of times that memory ran out, in steps that began again or failed",
    "failures": "Steps that ended in an error",
    "step_seconds": "Wall time of the committed steps",
}
_GAUGES = {
    "micro_batch_size": "Most samples in a micro-batch",
    "accumulation_steps": "Micro-batches of the last step",
    "peak_bytes": "Most bytes in tensors at once in the last step",
    "budget_bytes": "Bytes that the process may hold",
}


def jsonl(path: str | os.PathLike[str]) -> Hook:
    """Append each event to a file: its ``event``, its ``time`` (seconds since 1970, UTC), and its fields.

    Several processes may write to one file: a line is appended in one piece.

    Args:
        path: The file; its folder is made if it does not exist. On a full disk a line may be cut: the hook raises,
            and the next event begins a new line.

    Raises:
        InvalidArgument: The argument is not a path, or the file cannot be written.
    """
    target = check_path("jsonl", path, "events.jsonl")
    try:
        with suppress(FileExistsError):  # a file in the place of a folder, which open() explains better
            target.parent.mkdir(parents=True, exist_ok=True)
        target.open("ab").close()
    except OSError as error:
        raise InvalidArgument(
            f"jsonl({show_value(str(path))}) cannot be written ({error.strerror}): name a file that can be written"
        ) from None
    before = b""

    def write(event: Event, /) -> None:
        nonlocal before
        line = json.dumps({"event": type(event).__name__, "time": time.time(), **event.model_dump(mode="json")})
        content = before + line.encode() + b"\n"
        with target.open("ab", buffering=0) as file:
            written = file.write(content)
        before = b"" if written == len(content) else b"\n"
        if before:
            raise OSError(f"{written} of {len(content)} bytes of a line were written to {target}")

    return write


def console(level: int = logging.INFO, write: Callable[[str], object] | None = None) -> Hook:
    """Write a line on stderr for each event of at least this level, above a bar of tqdm if there is one.

    Args:
        level: Level of ``logging``: finished steps are ``DEBUG``, retries ``WARNING``.
        write: Function that prints a line, such as the ``Console.print`` of rich.

    Raises:
        InvalidArgument: The level is not a number, or ``write`` cannot be called.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        raise InvalidArgument(f"console(level={show_value(level)}): pass a level of logging, such as logging.INFO")
    if write is not None and not callable(write):
        raise InvalidArgument(f"console(write={show_value(write)}) cannot be called: pass write(line)")

    def show(event: Event, /) -> None:
        if event.level >= level:
            (write or _write_above_bars)(f"autobatch: {event}")

    return show


def _write_above_bars(line: str) -> None:
    tqdm = sys.modules.get("tqdm")  # a program with a bar has imported it
    if tqdm is not None and hasattr(tqdm, "tqdm"):
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")


def memory_snapshot(folder: str | os.PathLike[str] | None = None, *, most: int = 3, entries: int = 100_000) -> Hook:
    """Write a snapshot of CUDA's memory each time a step runs out of it, up to so many.

    torch records every allocation from now on, which takes time and the memory of the entries. The files open in
    torch's viewer (pytorch.org/memory_viz). Without CUDA it costs one log line.

    Args:
        folder: Folder of the files; default: ``snapshots`` beside the ledger.
        most: Most files of one hook. Later shortages are like the first ones, and a file takes megabytes.
        entries: Number of the last allocations in a file.

    Raises:
        InvalidArgument: The folder is not a path, or a number is not an int of at least 1.
    """
    for name, value in (("most", most), ("entries", entries)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"memory_snapshot({name}={show_value(value)}): pass an int of at least 1")
    target = find_home() / "snapshots" if folder is None else check_path("memory_snapshot", folder, "snapshots")
    memory = importlib.import_module("torch").cuda.memory
    left = most
    try:
        memory._record_memory_history(max_entries=entries)  # noqa: SLF001 - documented by torch under this name only
    except (RuntimeError, AttributeError, AssertionError) as error:
        logger.warning("no memory snapshots will be written: %s", str(error).split("\n")[0])
        left = 0

    def write(event: Event, /) -> None:
        nonlocal left
        if left and (isinstance(event, Retried) or (isinstance(event, StepFailed) and event.out_of_memory)):
            target.mkdir(parents=True, exist_ok=True)
            moment = time.strftime("%Y%m%d-%H%M%S")
            path = target / f"{moment}-{os.getpid()}-step{event.step}-{most - left}.pickle"
            memory._dump_snapshot(str(path))  # noqa: SLF001 - the same
            left -= 1
            logger.info("memory when step %d ran out of it: %s", event.step, path)

    return write


def tensorboard(writer: Any) -> Hook:
    """Send scalars ``autobatch/...`` to TensorBoard, at the runner's step.

    Args:
        writer: A ``SummaryWriter``, of torch or tensorboardX. You close it.

    Raises:
        InvalidArgument: The argument is not a writer.
    """
    if not is_instance_with(writer, "add_scalar"):
        raise InvalidArgument(f"tensorboard({show_value(writer)}): pass a SummaryWriter")

    def write(metrics: dict[str, int | float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return _log_metrics(write)


def wandb(run: Any | None = None) -> Hook:
    """Send numbers ``autobatch/...`` to a run of Weights & Biases.

    The runner's step is one of them, ``autobatch/step``: wandb's own step must never decrease, and yours may count
    differently.

    Args:
        run: Run from ``wandb.init()``; ``None`` for the one that is active when an event comes.

    Raises:
        ImportError: The run is ``None`` and wandb is not installed.
        InvalidArgument: The argument is not a run.
    """
    if run is not None and not is_instance_with(run, "log"):
        raise InvalidArgument(f"wandb({show_value(run)}): pass what wandb.init() returned, or nothing")
    target = importlib.import_module("wandb") if run is None else run

    def write(metrics: dict[str, int | float], step: int) -> None:
        target.log({**metrics, "autobatch/step": step})

    return _log_metrics(write)


def mlflow(run_id: str | None = None) -> Hook:
    """Send metrics ``autobatch/...`` to a run of MLflow, at the runner's step.

    Args:
        run_id: Id of the run; ``None`` for the one that is active when an event comes. If no run is active, nothing is
            logged: MLflow would begin a run, and your own ``start_run`` after it would fail.

    Raises:
        ImportError: MLflow is not installed.
        InvalidArgument: The id is not a text.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise InvalidArgument(f"mlflow(run_id={show_value(run_id)}): pass the run's id, a text, or nothing")
    library = importlib.import_module("mlflow")

    def write(metrics: dict[str, int | float], step: int) -> None:
        if run_id is not None or library.active_run() is not None:
            library.log_metrics({name: float(value) for name, value in metrics.items()}, step=step, run_id=run_id)

    return _log_metrics(write)


def _log_metrics(write: Callable[[dict[str, int | float], int], None]) -> Hook:
    """Return a hook that calls ``write(metrics, step)`` for each event that has numbers."""

    def log(event: Event, /) -> None:
        if isinstance(event, StepFinished):
            metrics = step_metrics(event.micro_batch_sizes, event.retries, event.peak_bytes, event.seconds, event.ranks)
            write({**metrics, "autobatch/budget_bytes": event.budget_bytes}, event.step)
        elif isinstance(event, Retried):
            write({"autobatch/out_of_memory_at": event.failed_size}, event.step)
        elif isinstance(event, SizeChanged):
            write({"autobatch/size_limit": event.new_size}, event.step)

    return log


def prometheus(registry: Any | None = None, labels: dict[str, str] | None = None) -> Hook:
    """Count and gauge what a run does; needs prometheus-client.

    Counters: ``autobatch_steps_total``, ``autobatch_samples_total``, ``autobatch_retries_total``,
    ``autobatch_out_of_memory_total``, ``autobatch_failures_total``, ``autobatch_step_seconds_total``. Gauges:
    ``autobatch_micro_batch_size``, ``autobatch_accumulation_steps``, ``autobatch_peak_bytes``,
    ``autobatch_budget_bytes``.

    Args:
        registry: Registry of the metrics; default: the library's own. A second hook on one registry shares them.
        labels: Labels of each metric, such as ``{"run": "baseline"}``; the same names for all hooks of a registry.

    Raises:
        ImportError: prometheus-client is not installed.
        InvalidArgument: The registry is not one, or the labels are not a dict.
    """
    if labels is not None and not isinstance(labels, Mapping):
        raise InvalidArgument(f"prometheus(labels={show_value(labels)}): pass a dict, such as {{'run': 'baseline'}}")
    library = importlib.import_module("prometheus_client")
    registry = library.REGISTRY if registry is None else registry
    if not is_instance_with(registry, "register"):
        raise InvalidArgument(f"prometheus({show_value(registry)}): pass a CollectorRegistry")
    labels = labels or {}

    def find(kind: Any, name: str, text: str) -> Any:
        known = getattr(registry, "_names_to_collectors", {}).get(name)  # of an earlier runner in this process
        metric = known or kind(name, text, tuple(labels), registry=registry)
        return metric.labels(**labels) if labels else metric

    counters = {name: find(library.Counter, f"autobatch_{name}", text) for name, text in _COUNTERS.items()}
    gauges = {name: find(library.Gauge, f"autobatch_{name}", text) for name, text in _GAUGES.items()}

    def count(event: Event, /) -> None:
        if isinstance(event, StepFinished):
            counters["steps"].inc()
            counters["samples"].inc(sum(event.micro_batch_sizes))
            counters["step_seconds"].inc(event.seconds)
            gauges["micro_batch_size"].set(max(event.micro_batch_sizes, default=0))
            gauges["accumulation_steps"].set(len(event.micro_batch_sizes))
            gauges["peak_bytes"].set(event.peak_bytes)
            gauges["budget_bytes"].set(event.budget_bytes)
        elif isinstance(event, Retried):
            counters["retries"].inc()
            counters["out_of_memory"].inc()
        elif isinstance(event, StepFailed):
            counters["failures"].inc()
            counters["out_of_memory"].inc(event.out_of_memory)
        elif isinstance(event, SizeChanged):
            gauges["micro_batch_size"].set(event.new_size)

    return count
