"""Defines what a reader asks for and the service answers: lines of lists, one plan, one run, cards and figures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from autobatch.planning.plan_record import PlanRecord
from autobatch.service.records import (
    CardReading,
    ErrorFigures,
    Name,
    OptionalId,
    PredictionLine,
    RankCard,
    Record,
    RunHead,
    SummaryLine,
)

_PLACE = r"^[0-9]{1,12}(\.[0-9]{1,20})?(e-[0-9]{1,3})?_[A-Za-z0-9_-]{1,64}$"


class PageQuery(Record):
    """One page of a list."""

    limit: Annotated[int, Field(ge=1, le=500, description="Most entries of the page.")] = 50
    after: Annotated[str | None, Field(pattern=_PLACE, description="``next`` of the page before.")] = None
    model: Annotated[Name, Field(description="A part of the model's name, in any case.")] = ""

    @property
    def place(self) -> tuple[float, str] | None:
        moment, _, key = (self.after or "").partition("_")
        return (float(moment), key) if self.after else None

    @property
    def filters(self) -> dict[str, str]:
        return self.model_dump(exclude_defaults=True, exclude={"limit", "after"})

    @property
    def parts(self) -> dict[str, str]:
        return {name: part for name, part in self.filters.items() if name in {"model", "device", "host", "id"}}


class PlanQuery(PageQuery):
    """A page of plans."""

    device: Annotated[Name, Field(description="A part of the device's name, in any case.")] = ""
    host: Annotated[Name, Field(description="A part of the computer's name, in any case.")] = ""
    id: Annotated[Name, Field(description="How the id begins.")] = ""


class RunQuery(PlanQuery):
    """A page of runs."""

    plan_id: Annotated[OptionalId, Field(description="The whole id of their plan.")] = ""
    state: Annotated[Literal["", "live", "silent", "ended"], Field(description="Default: any.")] = ""


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


class RunLine(RunHead):
    """A run in a list, with the totals of its last summary.

    Attributes:
        state: ``"live"``, ``"silent"`` if no summary came for five minutes, or how it ended.
        first_size: Micro-batch size at the start.
        small_since: Since when the size is smaller than at the start; 0 if it is not.
        last_bytes: Peak in the last summary.
        peak_bytes: Highest peak in any summary.
    """

    device: str
    first_size: int
    small_since: float
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


class RankLine(RankCard):
    """One rank, with its peak in the last summary; 0 if unknown."""

    last_bytes: int


class RunOut(Record):
    """One run from its beginning to its end, the oldest first: at most a thousand lines.

    Attributes:
        ranks: The ranks, by their number; empty with one rank.
        joined: Number of summaries in a line; 1 if each has its own.
        summaries: The lines, with the newest setbacks.
    """

    run: RunLine
    ranks: tuple[RankLine, ...]
    joined: int
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


class Machine(Record):
    """A computer: its cards, what is free on them together, and who runs something on them."""

    host: str
    seen_at: float
    total_bytes: int
    free_bytes: int
    users: tuple[str, ...]
    runs: int
    cards: tuple[Card, ...]


class MachinePage(Record):
    """Computers on which a run has read a card in the last hour."""

    machines: tuple[Machine, ...]


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
    """One alert; ``failure`` is why the last attempt to send it failed."""

    run_id: str
    kind: str
    made_at: float
    sent_at: float
    failure: str
    text: str


class AlertTested(Record):
    """Whether the webhook took the test, and why not."""

    sent: bool
    detail: str
