"""Defines what the service answers to a reader: lines of lists, one plan, one run, cards and figures."""

from __future__ import annotations

from typing import Any

from autobatch.planning.plan_record import PlanRecord
from autobatch.service.records import CardReading, ErrorFigures, Record, RunSetback


class Me(Record):
    """Name and role of the token that asks."""

    name: str
    role: str


class Problem(Record):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class PlanLine(Record):
    """A plan in a list."""

    id: str
    made_at: float
    model: str
    device: str
    host: str
    version: str
    fingerprint: str
    rank: int
    world_size: int
    target_batch: int
    micro_batch_size: int
    accumulation_steps: int
    peak_bytes: int
    limit_bytes: int


class PlanPage(Record):
    """Plans, the newest first. ``next`` is the ``after`` of the next page, or null."""

    plans: tuple[PlanLine, ...]
    next: str | None


class RunLine(Record):
    """A run in a list, with the totals of its last summary.

    Attributes:
        state: ``"live"``, ``"silent"`` if no summary came for five minutes, or how it ended.
        first_size: Micro-batch size at the start.
        last_bytes: Peak in the last summary.
        peak_bytes: Highest peak in any summary.
    """

    id: str
    started_at: float
    plan_id: str
    model: str
    device: str
    host: str
    user: str
    pid: int
    world_size: int
    target_batch: int
    first_size: int
    micro_batch_size: int
    limit_bytes: int
    last_bytes: int
    peak_bytes: int
    steps: int
    samples: int
    seconds: float
    retries: int
    size_changes: int
    seen_at: float
    ended_at: float
    state: str
    reason: str

    @property
    def fill(self) -> float:
        """The last peak as a share of the limit; 0 if the limit is unknown."""
        return self.last_bytes / self.limit_bytes if self.limit_bytes else 0.0


class RunPage(Record):
    """Runs, the newest first."""

    runs: tuple[RunLine, ...]
    next: str | None


class SummaryLine(Record):
    """One summary of a run."""

    number: int
    at: float
    steps: int
    retries: int
    micro_batch_size: int
    peak_bytes: int
    held_bytes: int
    setbacks: tuple[RunSetback, ...] = ()


class RunOut(Record):
    """One run with its newest thousand summaries, the oldest first."""

    run: RunLine
    summaries: tuple[SummaryLine, ...]


class PlanOut(Record):
    """One plan with its newest runs."""

    host: str
    plan: PlanRecord
    runs: tuple[RunLine, ...]


class Forgotten(Record):
    """Number of runs that were deleted with a plan."""

    runs: int


class Difference(Record):
    """Differences between two plans, as ``autobatch diff --json`` has them."""

    same_workload: bool | None
    fields: tuple[dict[str, Any], ...]
    trials: tuple[dict[str, Any], ...]
    curve: tuple[dict[str, Any], ...]


class CardRun(Record):
    """A run on a card."""

    run_id: str
    model: str
    user: str
    own_bytes: int


class Card(Record):
    """The last reading of a card, and the live runs on it."""

    host: str
    seen_at: float
    reading: CardReading
    runs: tuple[CardRun, ...]


class CardPage(Record):
    """Cards that a run has read in the last hour."""

    cards: tuple[Card, ...]


class PredictionLine(Record):
    """A prediction in a list."""

    id: str
    made_at: float
    model: str
    card: str
    host: str
    target_batch: int
    micro_batch_size: int
    total_bytes: int


class PredictionPage(Record):
    """Predictions, the newest first."""

    predictions: tuple[PredictionLine, ...]
    next: str | None


class Comparison(Record):
    """A predicted peak beside that of a plan or run of the same step on as many such cards, at one size.

    Attributes:
        card_key: Name of the card as it was measured, without the maker's name.
        source_id: Id of the plan or the run.
        is_newest: Whether no newer prediction has this plan or run beside it.
        measured_bytes: The peak. A trial that ran out of memory counts with its limit, which it exceeded.
    """

    prediction_id: str
    model: str
    card: str
    card_key: str
    source_id: str
    is_newest: bool
    size: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: negative if too little was predicted."""
        return self.predicted_bytes / self.measured_bytes - 1


class ErrorPage(Record):
    """Figures over all comparisons, for each model and card, and the comparisons, the worst first."""

    total: ErrorFigures
    groups: tuple[ErrorFigures, ...]
    comparisons: tuple[Comparison, ...]


class Alert(Record):
    """One alert."""

    run_id: str
    kind: str
    made_at: float
    sent_at: float
    text: str


class AlertTested(Record):
    """Whether the webhook took the test, and why not."""

    sent: bool
    detail: str
