"""Defines the tables of the service. Lists read columns; what is shown of one plan or run alone is JSON in ``content``.

Each number of 64 bits and each length is written out, so that SQLite and PostgreSQL have the same tables.
"""

from __future__ import annotations

import time
from typing import Annotated

from sqlalchemy import BigInteger, Double, Index, MetaData, String, Text, bindparam, case
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

SILENT_S = 300.0  # ten summaries did not come
LATELY = bindparam("lately", type_=Double, callable_=lambda: time.time() - SILENT_S)


class Base(DeclarativeBase):
    """Has the metadata of all tables."""

    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "uq": "uq_%(table_name)s_%(column_0_name)s"})


# Letters of an id are compared by their number, as in SQLite, so that its beginning is found in the index.
Id = Annotated[str, mapped_column(String(64).with_variant(String(64, "C"), "postgresql"))]
Name = Annotated[str, mapped_column(String(200), default="")]
Number = Annotated[int, mapped_column(BigInteger, autoincrement=False, default=0)]
Moment = Annotated[float, mapped_column(Double, default=0.0)]
Content = Annotated[str, mapped_column(Text, default="[]")]


class TokenRow(Base):
    """A token. Its text is not here, only the hash."""

    __tablename__ = "tokens"
    hash: Mapped[Id] = mapped_column(primary_key=True)
    name: Mapped[Name]
    role: Mapped[Name]
    made_at: Mapped[Moment]
    used_at: Mapped[Moment]  # 0: never
    revoked_at: Mapped[Moment]  # 0: valid


class NameRow(Base):
    """A model, device or host that occurs, to search by a part of its name."""

    __tablename__ = "names"
    kind: Mapped[Name] = mapped_column(primary_key=True)
    name: Mapped[Name] = mapped_column(primary_key=True)
    folded: Mapped[str] = mapped_column(String(600))  # in lower case; a letter may become three


class ForgottenRow(Base):
    """A plan, run or prediction that an admin has forgotten: a client must not bring it back."""

    __tablename__ = "forgotten"
    kind: Mapped[Name] = mapped_column(primary_key=True)  # its table
    id: Mapped[Id] = mapped_column(primary_key=True)
    at: Mapped[Moment]


class RecordRow(Base):
    """What clients hand in and an admin may forget: a plan, a run or a prediction."""

    __abstract__ = True
    id: Mapped[Id] = mapped_column(primary_key=True)
    model: Mapped[Name]
    host: Mapped[Name]
    step: Mapped[Id]
    target_batch: Mapped[Number]
    micro_batch_size: Mapped[Number]


class PlanRow(RecordRow):
    """A plan of one rank."""

    __tablename__ = "plans"
    made_at: Mapped[Moment]
    device: Mapped[Name]
    version: Mapped[Name]
    fingerprint: Mapped[Id]
    rank: Mapped[Number]
    world_size: Mapped[Number]
    accumulation_steps: Mapped[Number]
    peak_bytes: Mapped[Number]
    limit_bytes: Mapped[Number]
    added_at: Mapped[Moment]  # by the server's clock
    content: Mapped[Content]
    __table_args__ = (
        Index("plans_by_age", "made_at", "id"),
        Index("plans_by_model", "model", "made_at", "id"),
        Index("plans_by_device", "device", "made_at", "id"),
        Index("plans_by_host", "host", "made_at", "id"),
        Index("plans_by_fingerprint", "fingerprint", "rank", "host", "added_at"),
    )


class RunRow(RecordRow):
    """A run, with the totals of its last summary."""

    __tablename__ = "runs"
    started_at: Mapped[Moment]
    plan_id: Mapped[Id]
    device: Mapped[Name]
    card_key: Mapped[Name]
    user: Mapped[Name]
    owner: Mapped[Name]  # name of the token that began it
    pid: Mapped[Number]
    world_size: Mapped[Number]
    first_size: Mapped[Number]  # micro-batch size at the start
    limit_bytes: Mapped[Number]
    seen_at: Mapped[float] = mapped_column(Double)  # by the server's clock
    small_since: Mapped[Moment]  # by the server's clock; 0: the size is that of the start
    summaries: Mapped[Number]  # one more than the number of the last one
    steps: Mapped[Number]
    samples: Mapped[Number]
    seconds: Mapped[Moment]
    retries: Mapped[Number]
    size_changes: Mapped[Number]
    last_bytes: Mapped[Number]  # peak in the last summary
    peak_bytes: Mapped[Number]  # the most of all summaries
    ranks: Mapped[Content]  # computer and device of each of several ranks
    rank_peaks: Mapped[Content]  # their peaks in the last summary
    outcome: Mapped[str] = mapped_column(String(200))
    ended_at: Mapped[Moment]  # 0: it has not ended
    reason: Mapped[str] = mapped_column(String(500), default="")
    state: Mapped[str] = column_property(  # no column: it follows from the time
        case((outcome != "running", outcome), (seen_at > LATELY, "live"), else_="silent")
    )
    __table_args__ = (
        Index("runs_by_age", "started_at", "id"),
        Index("runs_by_model", "model", "started_at", "id"),
        Index("runs_by_device", "device", "started_at", "id"),
        Index("runs_by_host", "host", "started_at", "id"),
        Index("runs_by_outcome", "outcome", "started_at", "id"),
        Index("runs_by_plan", "plan_id", "started_at", "id"),
    )


class SummaryRow(Base):
    """One summary of a run."""

    __tablename__ = "summaries"
    run_id: Mapped[Id] = mapped_column(primary_key=True)
    number: Mapped[Number] = mapped_column(primary_key=True)
    at: Mapped[Moment]
    steps: Mapped[Number]
    retries: Mapped[Number]
    micro_batch_size: Mapped[Number]
    peak_bytes: Mapped[Number]
    held_bytes: Mapped[Number]
    content: Mapped[Content]


class ReadingRow(Base):
    """The last reading of one card by one run."""

    __tablename__ = "readings"
    run_id: Mapped[Id] = mapped_column(primary_key=True)
    card: Mapped[Name] = mapped_column(primary_key=True)  # its uuid, or its name
    host: Mapped[Name]
    name: Mapped[Name]
    kind: Mapped[Name]
    at: Mapped[Moment]  # by the server's clock
    total_bytes: Mapped[Number]
    free_bytes: Mapped[Number]
    own_bytes: Mapped[Number]
    __table_args__ = (Index("readings_by_age", "at"),)


class PredictionRow(RecordRow):
    """A prediction."""

    __tablename__ = "predictions"
    made_at: Mapped[Moment]
    card: Mapped[Name]
    total_bytes: Mapped[Number]
    added_at: Mapped[Moment]  # by the server's clock
    content: Mapped[Content]
    __table_args__ = (
        Index("predictions_by_age", "made_at", "id"),
        Index("predictions_by_model", "model", "made_at", "id"),
        Index("predictions_by_arrival", "added_at", "id"),
    )


class PeakRow(Base):
    """The most bytes that a plan's trial or a run held at one micro-batch size; the limit, if it ran out of that."""

    __tablename__ = "peaks"
    source_id: Mapped[Id] = mapped_column(primary_key=True)  # of the plan or the run
    size: Mapped[Number] = mapped_column(primary_key=True)
    step: Mapped[Id]
    card_key: Mapped[Name]
    world_size: Mapped[Number]
    bytes: Mapped[Number]
    ran_out: Mapped[Number]  # 1: more than these bytes was needed
    __table_args__ = (Index("peaks_by_step", "step", "card_key", "size"),)


class AlertRow(Base):
    """An alert: one of a kind for each run."""

    __tablename__ = "alerts"
    run_id: Mapped[Id] = mapped_column(primary_key=True)
    kind: Mapped[Name] = mapped_column(primary_key=True)
    made_at: Mapped[Moment]
    next_at: Mapped[Moment]  # no server sends it before
    sent_at: Mapped[Moment]  # 0: not yet
    failure: Mapped[Name]  # of the last attempt
    text: Mapped[str] = mapped_column(String(1000))
    __table_args__ = (Index("alerts_by_age", "made_at"),)
