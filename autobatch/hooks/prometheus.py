"""Counts steps, retries and failures for Prometheus.

Covers the metrics in a registry of prometheus-client. Does not cover serving them:
``prometheus_client.start_http_server`` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from autobatch._arguments import is_instance_with
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook, Retried, SizeChanged, StepFailed, StepFinished

__all__ = ["prometheus"]


def prometheus(registry: Any | None = None, labels: dict[str, str] | None = None) -> Hook:
    """Count and gauge what a run does; needs prometheus-client.

    Counters: ``autobatch_steps_total``, ``autobatch_samples_total``, ``autobatch_retries_total``,
    ``autobatch_out_of_memory_total``, ``autobatch_failures_total``, ``autobatch_step_seconds_total``. Gauges:
    ``autobatch_micro_batch_size``, ``autobatch_accumulation_steps``, ``autobatch_peak_bytes``,
    ``autobatch_budget_bytes``.

    Args:
        registry: Where they are registered; default: the library's own. A second hook on one registry shares them.
        labels: Put on each of them, such as ``{"run": "baseline"}``; the same names for all hooks of a registry.

    Raises:
        ImportError: prometheus-client is not installed.
        InvalidArgument: It is no registry, or the labels are no dict.
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


_COUNTERS = {
    "steps": "Optimizer steps that were committed",
    "samples": "Samples of those steps",
    "retries": "How often a step had to begin again with less",
    "out_of_memory": "How often memory ran out, whether the step could go on or not",
    "failures": "Steps that ended in an error",
    "step_seconds": "Wall time of the committed steps",
}
_GAUGES = {
    "micro_batch_size": "The most samples in a micro-batch",
    "accumulation_steps": "Micro-batches of the last step",
    "peak_bytes": "Most bytes in tensors at once in the last step",
    "budget_bytes": "What the process may hold",
}
