"""Defines the tables of the service. Lists read columns; what is shown of one plan or run alone is JSON in ``content``.

Each number of 64 bits and each length is written out, so that SQLite and PostgreSQL have the same tables.
"""

from __future__ import annotations

import time

from sqlalchemy import BigInteger, Double, Index, MetaData, String, Text, bindparam, case
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

SILENT_S = 300.0  # ten summaries did not come
LATELY = bindparam("lately", type_=Double, callable_=lambda: time.time() - SILENT_S)


class Base(DeclarativeBase):
    """Has the metadata of all tables."""

    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "uq": "uq_%(table_name)s_%(column_0_name)s"})


def _id(*, key: bool = False) -> Mapped[str]:
    return mapped_column(String(64), primary_key=key)


def _name(*, key: bool = False) -> Mapped[str]:
    return mapped_column(String(200), primary_key=key, default="")


def _number(*, key: bool = False) -> Mapped[int]:
    return mapped_column(BigInteger, primary_key=key, autoincrement=False, default=0)


def _moment() -> Mapped[float]:
    return mapped_column(Double, default=0.0)


class TokenRow(Base):
    """A token. Its text is not here, only the hash."""

    __tablename__ = "tokens"
    hash: Mapped[str] = _id(key=True)
    name: Mapped[str] = _name()
    role: Mapped[str] = _name()
    made_at: Mapped[float] = _moment()
    used_at: Mapped[float] = _moment()  # 0: never
    revoked_at: Mapped[float] = _moment()  # 0: valid


class NameRow(Base):
    """A model, device or host that occurs, to search by a part of its name."""

    __tablename__ = "names"
    kind: Mapped[str] = _name(key=True)
    name: Mapped[str] = _name(key=True)
    folded: Mapped[str] = mapped_column(String(600))  # in lower case; a letter may become three


class ForgottenRow(Base):
    """A plan, run or prediction that an admin has forgotten: a client must not bring it back."""

    __tablename__ = "forgotten"
    kind: Mapped[str] = _name(key=True)  # its table
    id: Mapped[str] = _id(key=True)
    at: Mapped[float] = _moment()


class PlanRow(Base):
    """A plan of one rank."""

    __tablename__ = "plans"
    id: Mapped[str] = _id(key=True)
    made_at: Mapped[float] = _moment()
    model: Mapped[str] = _name()
    device: Mapped[str] = _name()
    host: Mapped[str] = _name()
    version: Mapped[str] = _name()
    fingerprint: Mapped[str] = _id()
    step: Mapped[str] = _id()
    rank: Mapped[int] = _number()
    world_size: Mapped[int] = _number()
    target_batch: Mapped[int] = _number()
    micro_batch_size: Mapped[int] = _number()
    accumulation_steps: Mapped[int] = _number()
    peak_bytes: Mapped[int] = _number()
    limit_bytes: Mapped[int] = _number()
    added_at: Mapped[float] = _moment()  # by the server's clock
    content: Mapped[str] = mapped_column(Text)
    __table_args__ = (
        Index("plans_by_age", "made_at", "id"),
        Index("plans_by_model", "model", "made_at", "id"),
        Index("plans_by_device", "device", "made_at", "id"),
        Index("plans_by_host", "host", "made_at", "id"),
        Index("plans_by_fingerprint", "fingerprint", "rank", "host", "added_at"),
    )


class RunRow(Base):
    """A run, with the totals of its last summary."""

    __tablename__ = "runs"
    id: Mapped[str] = _id(key=True)
    started_at: Mapped[float] = _moment()
    plan_id: Mapped[str] = _id()
    model: Mapped[str] = _name()
    device: Mapped[str] = _name()
    card_key: Mapped[str] = _name()
    host: Mapped[str] = _name()
    user: Mapped[str] = _name()
    step: Mapped[str] = _id()
    owner: Mapped[str] = _name()  # name of the token that began it
    added_at: Mapped[float] = _moment()  # by the server's clock
    pid: Mapped[int] = _number()
    world_size: Mapped[int] = _number()
    target_batch: Mapped[int] = _number()
    first_size: Mapped[int] = _number()  # micro-batch size at the start
    limit_bytes: Mapped[int] = _number()
    seen_at: Mapped[float] = _moment()  # by the server's clock
    small_since: Mapped[float] = _moment()  # by the server's clock; 0: the size is that of the start
    summaries: Mapped[int] = _number()  # one more than the number of the last one
    steps: Mapped[int] = _number()
    samples: Mapped[int] = _number()
    seconds: Mapped[float] = _moment()
    retries: Mapped[int] = _number()
    size_changes: Mapped[int] = _number()
    micro_batch_size: Mapped[int] = _number()
    last_bytes: Mapped[int] = _number()  # peak in the last summary
    peak_bytes: Mapped[int] = _number()  # the most of all summaries
    outcome: Mapped[str] = _name()
    ended_at: Mapped[float] = _moment()  # 0: it has not ended
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
    run_id: Mapped[str] = _id(key=True)
    number: Mapped[int] = _number(key=True)
    at: Mapped[float] = _moment()
    steps: Mapped[int] = _number()
    retries: Mapped[int] = _number()
    micro_batch_size: Mapped[int] = _number()
    peak_bytes: Mapped[int] = _number()
    held_bytes: Mapped[int] = _number()
    content: Mapped[str] = mapped_column(Text)


class ReadingRow(Base):
    """The last reading of one card by one run."""

    __tablename__ = "readings"
    run_id: Mapped[str] = _id(key=True)
    card: Mapped[str] = _name(key=True)  # its uuid, or its name
    host: Mapped[str] = _name()
    name: Mapped[str] = _name()
    kind: Mapped[str] = _name()
    at: Mapped[float] = _moment()  # by the server's clock
    total_bytes: Mapped[int] = _number()
    free_bytes: Mapped[int] = _number()
    own_bytes: Mapped[int] = _number()
    __table_args__ = (Index("readings_by_age", "at"),)


class PredictionRow(Base):
    """A prediction."""

    __tablename__ = "predictions"
    id: Mapped[str] = _id(key=True)
    made_at: Mapped[float] = _moment()
    model: Mapped[str] = _name()
    card: Mapped[str] = _name()
    host: Mapped[str] = _name()
    step: Mapped[str] = _id()
    target_batch: Mapped[int] = _number()
    micro_batch_size: Mapped[int] = _number()
    total_bytes: Mapped[int] = _number()
    added_at: Mapped[float] = _moment()  # by the server's clock
    content: Mapped[str] = mapped_column(Text)
    __table_args__ = (
        Index("predictions_by_age", "made_at", "id"),
        Index("predictions_by_model", "model", "made_at", "id"),
        Index("predictions_by_arrival", "added_at", "id"),
    )


class PeakRow(Base):
    """The most bytes that a plan's trial or a run held at one micro-batch size; the limit, if it ran out of that."""

    __tablename__ = "peaks"
    source_id: Mapped[str] = _id(key=True)  # of the plan or the run
    size: Mapped[int] = _number(key=True)
    step: Mapped[str] = _id()
    card_key: Mapped[str] = _name()
    world_size: Mapped[int] = _number()
    bytes: Mapped[int] = _number()
    ran_out: Mapped[int] = _number()  # 1: more than these bytes was needed
    __table_args__ = (Index("peaks_by_step", "step", "card_key", "size"),)


class AlertRow(Base):
    """An alert: one of a kind for each run."""

    __tablename__ = "alerts"
    run_id: Mapped[str] = _id(key=True)
    kind: Mapped[str] = _name(key=True)
    made_at: Mapped[float] = _moment()
    claimed_at: Mapped[float] = _moment()  # when a server began to send it; 0: none does
    sent_at: Mapped[float] = _moment()  # 0: not yet
    text: Mapped[str] = mapped_column(String(1000))
    __table_args__ = (Index("alerts_by_age", "made_at"),)
