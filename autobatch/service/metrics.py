"""Counts requests and shows the state of runs and cards, for Prometheus."""

from __future__ import annotations

from collections import Counter as Count

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from autobatch.service.store import Store

_METHODS = {"GET", "POST", "DELETE", "HEAD"}


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self._requests = Counter(
            "autobatch_service_requests", "Requests that were answered.", labels, registry=self._registry
        )
        self._seconds = Histogram(
            "autobatch_service_request_seconds", "Time that a request took.", ("path",), registry=self._registry
        )
        self._runs = Gauge("autobatch_runs", "Runs that have not ended.", ("state",), registry=self._registry)
        self._cards = Gauge("autobatch_cards", "Cards that were read in the last hour.", registry=self._registry)
        self._free = Gauge("autobatch_cards_free_bytes", "Free bytes on these cards.", registry=self._registry)
        self._near = Gauge("autobatch_runs_near_limit", "Runs within 3 % of their limit.", registry=self._registry)

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        self._requests.labels(method if method in _METHODS else "other", path, str(status)).inc()
        if not path.endswith("/events"):  # a stream lasts as long as its page is open
            self._seconds.labels(path).observe(seconds)

    def render(self, store: Store, since: float, near: float) -> bytes:
        """Return all metrics as text."""
        runs, cards = store.live_runs(since), store.cards()
        states = Count(run.state for run in runs)
        for state in ("live", "silent"):
            self._runs.labels(state).set(states[state])
        self._near.set(sum(run.fill >= near for run in runs))
        self._cards.set(len(cards))
        self._free.set(sum(card.reading.free_bytes for card in cards))
        return generate_latest(self._registry)
