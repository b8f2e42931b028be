"""Defines what a client sends to the service under ``/api/v1``. The page "API" of a server lists all requests.

Every request has ``Authorization: Bearer abt_...``. A reader may GET, recall and ask the gate; a writer may also POST;
an admin may do all. Lists take ``?limit=`` (1 to 500) and ``?after=``, the ``next`` of the page before.

Each record has an id (a summary has the run and its number). The service stores it once: a second time, or after an
admin has forgotten it, it answers 201 with ``new`` false. So a client hands in again whatever it has no answer for.
A run belongs to the token that began it, by the token's name.

An error is a JSON object (RFC 9457, ``application/problem+json``) with ``title``, ``status`` and ``detail``, one line:

- 409 and 422: the service will never take this record, so drop it. 409 has two causes: another token began the run, or
  the summary's number is far higher than the run's age in seconds.
- 401 and 403: the token is wrong.
- All else says nothing about the record: hand it in again later, after ``Retry-After`` seconds if the answer has that.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from autobatch import records
from autobatch._bounds import Flag, Moment, Samples, Seconds, Target
from autobatch.events.run_history import Outcome
from autobatch.planning.plan_record import PlanRecord

MOST_POINTS = 500  # of a prediction
MOST_SETBACKS = 100  # of a summary
MOST_CARDS = 64  # of one process, or of all ranks of a host
MOST_RANKS = 1024  # of a run: of more, the first ones
LARGEST_BODY = 4 * 2**20  # bytes of a request

_ONE_LINE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]*"

Id = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9_-]{1,64}$")]
OptionalId = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9_-]{0,64}$")]
Digest = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{16,64}$")]
OptionalDigest = Annotated[str, StringConstraints(strict=True, pattern=r"^([0-9a-f]{16,64})?$")]
Name = Annotated[str, StringConstraints(strict=True, max_length=200, pattern=f"^{_ONE_LINE}$")]
Line = Annotated[str, StringConstraints(strict=True, max_length=500, pattern=f"^{_ONE_LINE}$")]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]  # JavaScript holds these exactly
Difference53 = Annotated[int, Field(strict=True, ge=-(2**53 - 1), le=2**53 - 1)]
Share = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]


class Record(records.Record):
    """A record that is built when it is defined: FastAPI expects that, and warns of one that is built later."""

    model_config = ConfigDict(defer_build=False)


class PlanIn(Record):
    """A plan that ``fit`` made or a runner uses. Rank 0 hands in the plan for all ranks.

    Attributes:
        step: Digest of model, step, batch and optimizer, the same on every card; empty if unknown. It joins the plan
            with predictions.
    """

    id: Id
    host: Name
    step: OptionalDigest = ""
    plan: PlanRecord


class Stored(Record):
    """Answer to a record: ``new`` is false if the service had it already."""

    id: Id
    new: Flag


class RecallQuestion(Record):
    """Asks for plans of this very step on an equal card."""

    fingerprint: Digest
    rank: Whole = 0


class RecallAnswer(Record):
    """Plans of a fingerprint, at most ten: the newest one of each host, the newest first, then the next of each."""

    plans: Annotated[tuple[PlanRecord, ...], Field(max_length=10)]


class CardReading(Record):
    """One reading of a device, by a run on it.

    Attributes:
        uuid: The driver's identifier; empty if there is none.
        free_bytes: Bytes that nobody holds.
        own_bytes: Bytes that the run's process holds.
    """

    uuid: Name = ""
    name: Name
    kind: Name = "cuda"
    total_bytes: Whole
    free_bytes: Whole
    own_bytes: Whole = 0


class RankCard(Record):
    """The computer and the device of one of several ranks."""

    host: Name = ""
    device: Name = ""


class RunHead(Record):
    """A run as its client knows it from the start; lists show it, too.

    Attributes:
        user: Name of the user; empty if it is not shared.
        micro_batch_size: Most samples in a micro-batch, at the start or now.
        limit_bytes: Budget less headroom; 0 if unknown.
    """

    id: Id
    plan_id: OptionalId = ""
    host: Name
    user: Name = ""
    pid: Whole
    started_at: Moment
    model: Name = ""
    target_batch: Target
    world_size: Target = 1
    micro_batch_size: Samples
    limit_bytes: Whole = 0


class RunIn(RunHead):
    """A run that has begun; rank 0 hands it in for all ranks.

    Attributes:
        step: Digest as in ``PlanIn``.
        cards: The devices of the process that hands it in.
        ranks: The devices of all ranks, by their number; empty with one rank.
    """

    step: OptionalDigest = ""
    cards: Annotated[tuple[CardReading, ...], Field(max_length=MOST_CARDS)] = ()
    ranks: Annotated[tuple[RankCard, ...], Field(max_length=MOST_RANKS)] = ()
    version: Name = ""


class RunSetback(Record):
    """A retry of a step, or a change of the size between two steps."""

    step: Whole
    kind: Literal["retry", "size"]
    old_size: Samples
    new_size: Samples
    reason: Line = ""


class SummaryLine(Record):
    """One summary of a run, or some that follow each other: the highest peaks, the smallest size, the last totals.

    Attributes:
        number: Number of the summary, from 0.
        micro_batch_size: Most samples in a micro-batch now.
        peak_bytes: Most bytes in tensors at once since the summary before.
        held_bytes: Most bytes that the allocator held at once since then; 0 if unknown.
        setbacks: Setbacks since then; the oldest may be left out.
    """

    number: Whole
    at: Moment
    steps: Whole
    retries: Whole = 0
    micro_batch_size: Samples
    peak_bytes: Whole = 0
    held_bytes: Whole = 0
    setbacks: tuple[RunSetback, ...] = ()


class RunSummary(SummaryLine):
    """How a run has gone since the summary before. Totals count from the start of the run.

    Attributes:
        rank_peaks: Most bytes that each rank held at once since then, by its number; empty with one rank.
        cards: Readings of the run's devices now; empty if there are none.
    """

    samples: Whole = 0
    seconds: Seconds = 0.0
    size_changes: Whole = 0
    setbacks: Annotated[tuple[RunSetback, ...], Field(max_length=MOST_SETBACKS)] = ()
    rank_peaks: Annotated[tuple[Whole, ...], Field(max_length=MOST_RANKS)] = ()
    cards: Annotated[tuple[CardReading, ...], Field(max_length=MOST_CARDS)] = ()


class RunEnd(Record):
    """The end of a run.

    Attributes:
        reason: First line of the error, without paths.
    """

    at: Moment
    outcome: Annotated[Outcome, Field(description="'running' is refused")]
    reason: Line = ""

    @model_validator(mode="after")
    def _refuse_running(self) -> RunEnd:
        if self.outcome == "running":
            raise ValueError("a run that has ended is finished, interrupted or failed")
        return self


class PredictedPoint(Record):
    """Bytes that the allocator holds at one micro-batch size."""

    size: Samples
    reserved_bytes: Whole


class Remedy(Record):
    """Another way to do the step.

    Attributes:
        effect: Cost besides memory.
        saved_bytes: Bytes that it saves; negative if it takes more.
        micro_batch_size: Most samples in a micro-batch with it; 0 if none fit.
    """

    name: Line
    effect: Line = ""
    saved_bytes: Difference53 = 0
    micro_batch_size: Whole = 0


class PredictionLine(Record):
    """A prediction in a list.

    Attributes:
        id: Id of the prediction: random, or a digest of its content.
        micro_batch_size: Most samples that fit with its margin; 0 if none do.
    """

    id: Id
    made_at: Moment
    model: Name
    card: Name
    host: Name = ""
    target_batch: Target
    micro_batch_size: Whole = 0
    total_bytes: Whole


class PredictionIn(PredictionLine):
    """Predicted memory of a step on a card.

    Attributes:
        step: Digest as in ``PlanIn``, which joins it with what runs then measured; empty if unknown.
        card_names: Other names of the card, such as the driver's.
        context_bytes: Bytes of a process outside the allocator.
        margin: Share of the peak that the prediction left free.
        points: Predicted bytes at some sizes, in order of size.
        remedies: Other ways to do the step.
    """

    step: OptionalDigest = ""
    card_names: Annotated[tuple[Name, ...], Field(max_length=50)] = ()
    context_bytes: Whole = 0
    world_size: Target = 1
    margin: Share = 0.0
    points: Annotated[tuple[PredictedPoint, ...], Field(min_length=1, max_length=MOST_POINTS)]
    remedies: Annotated[tuple[Remedy, ...], Field(max_length=50)] = ()
    version: Name = ""

    @model_validator(mode="after")
    def _refuse_disorder(self) -> PredictionIn:
        sizes = [point.size for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError("points must go up in size")
        return self


class GateQuestion(Record):
    """Asks whether a predicted step fits.

    Attributes:
        limit_bytes: Bytes that the process may take; default, and at most: all of the card's.
    """

    prediction: PredictionIn
    limit_bytes: Whole | None = None


class ErrorFigures(Record):
    """Predicted beside measured peaks: how far the predictions of some kind were off.

    Attributes:
        compared: Number of comparisons: one for each prediction and plan or run, at the size that took the most
            beyond the prediction.
        under: Number of those in which more was measured than predicted.
        median_error: Median of ``predicted / measured - 1``, without its sign.
        worst_error: The error farthest from 0, with its sign.
        worst_under: Largest excess of a measured peak over its prediction, as a share of the prediction; 0 if none.
    """

    model: Name = ""
    card: Name = ""
    compared: Whole = 0
    under: Whole = 0
    median_error: float = 0.0
    worst_error: float = 0.0
    worst_under: float = 0.0


class GateAnswer(Record):
    """Whether the step fits, with the margin that the team's own errors call for.

    Attributes:
        fits: Whether at least the smallest predicted size fits.
        micro_batch_size: Most samples in a micro-batch that fit with the margin; 0 if none do.
        peak_bytes: Predicted peak of the process at that size, or at the smallest size if none fit; without margin.
        margin: Share of the peak that is left free.
    """

    fits: Flag
    micro_batch_size: Whole
    accumulation_steps: Annotated[int, Field(ge=0)]
    peak_bytes: Whole
    limit_bytes: Whole
    margin: float
    margin_reason: str
    errors: ErrorFigures
    advice: tuple[str, ...] = ()
