"""Defines what travels between a client and the service, under ``/api/v1``.

    method and path                  sends              answers
    GET    /me                       -                  200 Me: name and role of the token
    POST   /plans                    PlanIn             201 Stored
    GET    /plans                    filters below      200 PlanPage, the newest first
    GET    /plans/{id}               -                  200 PlanOut, 404
    DELETE /plans/{id}               -                  200 Forgotten: the plan with its runs, for an admin; 404
    GET    /plans/compare            ?first=ID&second=  200 Difference, 404
    POST   /recall                   RecallQuestion     200 RecallAnswer, perhaps empty
    POST   /runs                     RunIn              201 Stored
    POST   /runs/{id}/summaries      RunSummary         201 Stored, 404 if the run is unknown or forgotten, 409
    POST   /runs/{id}/end            RunEnd             201 Stored, 404, 409
    GET    /runs                     filters below      200 RunPage, the newest first
    GET    /runs/{id}                -                  200 RunOut: with its summaries, 404
    DELETE /runs/{id}                -                  204, for an admin; 404
    GET    /cards                    -                  200 CardPage: the last reading of each card
    POST   /predictions              PredictionIn       201 Stored
    GET    /predictions              filters below      200 PredictionPage
    DELETE /predictions/{id}         -                  204, for an admin; 404
    GET    /predictions/errors       -                  200 ErrorPage: predicted beside measured, by model and card
    POST   /gate                     GateQuestion       200 GateAnswer
    GET    /events                   -                  200 text/event-stream: ``event: runs`` with a number that grows
    POST   /alerts/test              -                  200 AlertTested, for an admin

Every request has ``Authorization: Bearer abt_...``. A reader may GET, recall and ask the gate; a writer may also POST;
an admin may do all. Lists take ``?limit=`` (1 to 500) and ``?after=``, the ``next`` of the page before.
Plans have the filters ``model`` (part of a name), ``device`` (part of a name) and ``host``; runs have ``model``,
``host``, ``plan_id`` and ``state`` (``live`` or ``ended``); predictions have ``model``.

A run belongs to the token that began it, by the token's name. 409: another token began the run, or the summary's number
is far higher than the run's age in seconds.

Each record has an id (a summary has the run and its number). The service stores it once: a second time it answers 201
with ``new`` false, and the first one stays. So a client hands in again whatever it has no answer for.

An error is a JSON object (RFC 9457, ``application/problem+json``) with ``title``, ``status`` and ``detail``, one line.
409 and 422: this record will never be taken, so drop it. 401 and 403: the token is wrong. All else says nothing about
the record: hand it in again later, after ``Retry-After`` seconds if the answer has that.
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
Rate = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]


class Record(records.Record):
    """A record that is built when it is defined: FastAPI expects that, and warns of one that is built later."""

    model_config = ConfigDict(defer_build=False)


class PlanIn(Record):
    """A plan that ``fit`` made or a runner uses. Rank 0 hands in the plan for all ranks.

    Attributes:
        id: Id of the plan, as the ledger has it.
        host: Name of the computer.
        step: Digest of model, step, batch and optimizer, the same on every card; empty if unknown. It joins the plan
            with predictions.
        plan: The plan.
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
    """Asks for plans of this very step on an equal card.

    Attributes:
        fingerprint: ``Plan.fingerprint``: model, step, batch, optimizer, precision, versions and card.
        rank: Rank whose plans are asked for.
    """

    fingerprint: Digest
    rank: Whole = 0


class RecallAnswer(Record):
    """Plans of a fingerprint, at most ten: the newest one of each host, the newest first, then the next of each."""

    plans: Annotated[tuple[PlanRecord, ...], Field(max_length=10)]


class CardReading(Record):
    """One reading of a device, by a run on it.

    Attributes:
        uuid: The driver's identifier; empty if there is none.
        name: Name of the device, ``"NVIDIA L4"``.
        kind: The torch device type.
        total_bytes: All memory of the device.
        free_bytes: Bytes that nobody holds.
        own_bytes: Bytes that the run's process holds.
    """

    uuid: Name = ""
    name: Name
    kind: Name = "cuda"
    total_bytes: Whole
    free_bytes: Whole
    own_bytes: Whole = 0


class RunIn(Record):
    """A run that has begun; rank 0 hands it in for all ranks.

    Attributes:
        id: Id of the run, as the ledger has it.
        plan_id: Id of its plan.
        host: Name of the computer.
        user: Name of the user; empty if it is not shared.
        pid: Number of the process.
        started_at: Seconds since 1970, UTC.
        model: Class of the model.
        step: Digest as in ``PlanIn``.
        target_batch: Samples of an optimizer step.
        world_size: Number of ranks.
        micro_batch_size: Most samples in a micro-batch at the start.
        limit_bytes: Budget less headroom; 0 if unknown.
        cards: The devices of the run.
        version: Version of autobatch.
    """

    id: Id
    plan_id: OptionalId = ""
    host: Name
    user: Name = ""
    pid: Whole
    started_at: Moment
    model: Name = ""
    step: OptionalDigest = ""
    target_batch: Target
    world_size: Target = 1
    micro_batch_size: Samples
    limit_bytes: Whole = 0
    cards: Annotated[tuple[CardReading, ...], Field(max_length=MOST_CARDS)] = ()
    version: Name = ""


class RunSetback(Record):
    """A retry of a step, or a change of the size between two steps."""

    step: Whole
    kind: Literal["retry", "size"]
    old_size: Samples
    new_size: Samples
    reason: Line = ""


class RunSummary(Record):
    """How a run has gone since the summary before. Totals count from the start of the run.

    Attributes:
        number: Number of this summary, from 0.
        at: Seconds since 1970, UTC.
        steps: Number of committed steps, in total.
        samples: Number of samples, in total.
        seconds: Duration of the steps, in total.
        retries: Number of retries, in total.
        size_changes: Number of size changes between two steps, in total.
        micro_batch_size: Most samples in a micro-batch now.
        peak_bytes: Most bytes in tensors at once since the summary before.
        held_bytes: Most bytes that the allocator held at once since then; 0 if unknown.
        setbacks: Setbacks since then; the oldest may be left out.
        cards: Readings of the run's devices now; empty if there are none.
    """

    number: Whole
    at: Moment
    steps: Whole
    samples: Whole = 0
    seconds: Seconds = 0.0
    retries: Whole = 0
    size_changes: Whole = 0
    micro_batch_size: Samples
    peak_bytes: Whole = 0
    held_bytes: Whole = 0
    setbacks: Annotated[tuple[RunSetback, ...], Field(max_length=MOST_SETBACKS)] = ()
    cards: Annotated[tuple[CardReading, ...], Field(max_length=MOST_CARDS)] = ()


class RunEnd(Record):
    """The end of a run.

    Attributes:
        at: Seconds since 1970, UTC.
        outcome: How it ended.
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
        name: Name of the change, such as ``"activation checkpointing"``.
        effect: Cost besides memory.
        saved_bytes: Bytes that it saves; negative if it takes more.
        micro_batch_size: Most samples in a micro-batch with it; 0 if none fit.
    """

    name: Line
    effect: Line = ""
    saved_bytes: Difference53 = 0
    micro_batch_size: Whole = 0


class PredictionIn(Record):
    """Predicted memory of a step on a card.

    Attributes:
        id: Id of the prediction: random, or a digest of its content.
        made_at: Seconds since 1970, UTC.
        host: Name of the computer.
        model: Class of the model.
        step: Digest as in ``PlanIn``, which joins it with what runs then measured; empty if unknown.
        card: Name of the card, ``"H100-80GB"``.
        card_names: Other names of the card, such as the driver's.
        total_bytes: All memory of the card.
        context_bytes: Bytes of a process outside the allocator.
        target_batch: Samples of an optimizer step.
        world_size: Number of ranks.
        margin: Share of the peak that the prediction left free.
        micro_batch_size: Most samples that fit with that margin; 0 if none do.
        points: Predicted bytes at some sizes, in order of size.
        remedies: Other ways to do the step.
        version: Version of autobatch.
    """

    id: Id
    made_at: Moment
    host: Name = ""
    model: Name
    step: OptionalDigest = ""
    card: Name
    card_names: Annotated[tuple[Name, ...], Field(max_length=50)] = ()
    total_bytes: Whole
    context_bytes: Whole = 0
    target_batch: Target
    world_size: Target = 1
    margin: Share = 0.0
    micro_batch_size: Whole = 0
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
        prediction: The prediction; it is not stored.
        limit_bytes: Bytes that the process may take; default, and at most: all of the card's.
    """

    prediction: PredictionIn
    limit_bytes: Whole | None = None


class ErrorFigures(Record):
    """Predicted beside measured peaks: how far the predictions of some kind were off.

    Attributes:
        model: Class of the model; empty for all.
        card: Name of the card; empty for all.
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
        accumulation_steps: Micro-batches of that size on each rank; 0 if none fit.
        peak_bytes: Predicted peak of the process at that size, or at the smallest size if none fit; without margin.
        limit_bytes: The limit that was applied.
        margin: Share of the peak that is left free.
        margin_reason: Source of the margin.
        errors: The errors behind the margin.
        advice: Ways to make it fit, a sentence each; empty if it fits.
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
