"""Stores and finds plans, runs and predictions: the only module that asks the tables of these."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    RowMapping,
    Table,
    bindparam,
    case,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.sql import ColumnElement, Select

from autobatch.planning.plan_record import PlanRecord
from autobatch.service.answers import (
    Alert,
    Card,
    CardRun,
    Comparison,
    PlanLine,
    PredictionLine,
    RunLine,
    SummaryLine,
)
from autobatch.service.comparison import predicted_bytes
from autobatch.service.database import Database
from autobatch.service.records import (
    CardReading,
    PlanIn,
    PredictionIn,
    RunEnd,
    RunIn,
    RunSummary,
)
from autobatch.service.tables import (
    AlertRow,
    Base,
    NameRow,
    PeakRow,
    PlanRow,
    PredictionRow,
    ReadingRow,
    RunRow,
    SummaryRow,
)

SILENT_S = 300.0  # ten summaries did not come
_RECENT_S = 3600.0  # of a card's reading; and how late a summary may come to count as news
_LONGEST_NAME = 200
_MOST_RECALLED = 10
_MOST_NAMES = 1000  # with a part in them
_MOST_SUMMARIES = 1000
_MOST_PEAKS = 200  # of one plan: it has far fewer trials
_MOST_COMPARED = 1000  # predictions, the newest

_PLAN_COLUMNS = [PlanRow.__table__.c[name] for name in PlanLine.model_fields]
_RUN_COLUMNS = [RunRow.__table__.c[name] for name in RunLine.model_fields if name != "state"] + [RunRow.outcome]
_PREDICTION_COLUMNS = [PredictionRow.__table__.c[name] for name in PredictionLine.model_fields]


_TABLES: tuple[type[Base], ...] = (NameRow, PlanRow, RunRow, SummaryRow, PredictionRow, PeakRow, AlertRow)
_TOTALS = ("steps", "samples", "seconds", "retries", "size_changes", "micro_batch_size")
_RUNS = cast("Table", RunRow.__table__)
_RUN_OF_SUMMARY = select(_RUNS.c.host, _RUNS.c.step, _RUNS.c.card_key, _RUNS.c.summaries).where(
    _RUNS.c.id == bindparam("run")
)
_NOW, _PEAK = bindparam("now", type_=Double), bindparam("peak", type_=BigInteger)
_SIZE, _NUMBER = bindparam("new_micro_batch_size", type_=BigInteger), bindparam("number", type_=BigInteger)
_UPDATE_RUN = (
    update(_RUNS)
    .where(_RUNS.c.id == bindparam("run"), _RUNS.c.summaries <= _NUMBER)
    .values(
        {
            "seen_at": _NOW,
            # Since when the size is smaller than at the start; 0 while it is not.
            "small_since": case(
                (_RUNS.c.first_size <= _SIZE, 0.0), (_RUNS.c.small_since > 0, _RUNS.c.small_since), else_=_NOW
            ),
            "summaries": _NUMBER + 1,
            "last_bytes": _PEAK,
            "peak_bytes": case((_RUNS.c.peak_bytes > _PEAK, _RUNS.c.peak_bytes), else_=_PEAK),
            **{name: bindparam(f"new_{name}", type_=_RUNS.c[name].type) for name in _TOTALS},
        }
    )
)


class NotFound(Exception):
    """The record is unknown, or was forgotten."""


class Store:
    """The team's plans, runs and predictions in one database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        # Built once: to build a statement takes several times as long as to run it.
        self._inserts = {
            table: database.insert(cast("Table", table.__table__)).on_conflict_do_nothing() for table in _TABLES
        }
        self._put_reading = _make_upsert(database, ReadingRow, ["run_id", "card"])
        self._put_peak = _make_upsert(database, PeakRow, ["source_id", "size"], PeakRow.__table__.c.bytes)
        self._names: set[tuple[str, str]] = set()  # known to be in the table

    # ------------------------------------------------------------------------------------------------------- plans

    def add_plan(self, sent: PlanIn) -> bool:
        plan = sent.plan
        names = {"model": _cut(plan.model), "device": _cut(plan.device.name), "host": sent.host}
        row = {
            "id": sent.id,
            "made_at": plan.made_at or time.time(),
            **names,
            "version": _cut(plan.version),
            "fingerprint": plan.fingerprint[:64],
            "step": sent.step,
            "rank": plan.rank,
            "world_size": plan.world_size,
            "target_batch": plan.target_batch,
            "micro_batch_size": plan.micro_batch_size,
            "accumulation_steps": plan.accumulation_steps,
            "peak_bytes": plan.peak_bytes,
            "limit_bytes": plan.limit_bytes,
            "content": plan.model_dump_json(exclude_defaults=True),
        }
        # With lengths a trial's size counts samples of one length, which a prediction does not have.
        peaks = {
            trial.micro_batch_size: trial.peak_reserved
            for trial in plan.trials
            if trial.outcome == "fits" and trial.peak_reserved and trial.length is None
        }
        place = {"step": sent.step, "card_key": card_key(plan.device.name), "total_bytes": plan.device.total_bytes}

        def write(connection: Connection) -> bool:
            is_new = self._insert(connection, PlanRow, row)
            if is_new and sent.step:
                for size, peak in sorted(peaks.items())[:_MOST_PEAKS]:
                    self._insert(connection, PeakRow, {"source_id": sent.id, "size": size, "bytes": peak, **place})
            return is_new

        return self._write_named(names, write)

    def list_plans(
        self,
        after: tuple[float, str] | None = None,
        limit: int = 50,
        *,
        model: str = "",
        device: str = "",
        host: str = "",
    ) -> tuple[list[PlanLine], str | None]:
        wanted = [self._has_part(PlanRow, name, part) for name, part in (("model", model), ("device", device)) if part]
        wanted += [PlanRow.host == host] if host else []
        rows = self._page(select(*_PLAN_COLUMNS).where(*wanted), PlanRow.made_at, PlanRow.id, after, limit)
        lines = [PlanLine.model_validate(row) for row in rows]
        return lines, _cursor(lines[-1].made_at, lines[-1].id) if len(lines) == limit else None

    def find_plan(self, plan_id: str) -> tuple[str, PlanRecord]:
        """Return a plan's host and the plan."""
        with self.database.read() as connection:
            row = connection.execute(select(PlanRow.host, PlanRow.content).where(PlanRow.id == plan_id)).first()
        if row is None:
            raise NotFound(f"no plan has the id {plan_id}")
        return row.host, PlanRecord.model_validate_json(row.content)

    def recall(self, fingerprint: str, rank: int) -> list[PlanRecord]:
        query = select(PlanRow.content).where(PlanRow.fingerprint == fingerprint, PlanRow.rank == rank)
        with self.database.read() as connection:
            rows = connection.execute(query.order_by(PlanRow.made_at.desc()).limit(_MOST_RECALLED)).scalars().all()
        return [PlanRecord.model_validate_json(content) for content in rows]

    def forget(self, plan_id: str) -> int:
        """Delete a plan with its runs, and return the number of runs."""

        def write(connection: Connection) -> int:
            if not connection.execute(delete(PlanRow).where(PlanRow.id == plan_id)).rowcount:
                raise NotFound(f"no plan has the id {plan_id}")
            runs = select(RunRow.id).where(RunRow.plan_id == plan_id)
            for table in (SummaryRow, ReadingRow, AlertRow):
                connection.execute(delete(table).where(table.run_id.in_(runs)))
            connection.execute(delete(PeakRow).where((PeakRow.source_id == plan_id) | PeakRow.source_id.in_(runs)))
            return connection.execute(delete(RunRow).where(RunRow.plan_id == plan_id)).rowcount

        return self.database.write(write)

    # -------------------------------------------------------------------------------------------------------- runs

    def add_run(self, sent: RunIn) -> bool:
        device = sent.cards[0].name if sent.cards else ""
        names = {"model": sent.model, "device": device, "host": sent.host}
        columns = ("id", "started_at", "plan_id", "user", "version", "step", "pid", "world_size", "target_batch")
        row = {
            **{name: getattr(sent, name) for name in columns},
            **names,
            **dict.fromkeys(("small_since", "seconds", "ended_at"), 0.0),
            **dict.fromkeys(("summaries", "steps", "samples", "retries", "size_changes"), 0),
            "last_bytes": 0,
            "peak_bytes": 0,
            "outcome": "running",
            "reason": "",
            "card_key": card_key(device),
            "first_size": sent.micro_batch_size,
            "micro_batch_size": sent.micro_batch_size,
            "limit_bytes": sent.limit_bytes,
            "seen_at": _as_news(sent.started_at),
        }

        def write(connection: Connection) -> bool:
            is_new = self._insert(connection, RunRow, row)
            if is_new:
                self._note_cards(connection, sent.id, sent.host, sent.cards, _as_news(sent.started_at))
            return is_new

        return self._write_named(names, write)

    def add_summary(self, run_id: str, sent: RunSummary) -> bool:
        row = {
            "run_id": run_id,
            "number": sent.number,
            "at": sent.at,
            "steps": sent.steps,
            "retries": sent.retries,
            "micro_batch_size": sent.micro_batch_size,
            "peak_bytes": sent.peak_bytes,
            "held_bytes": sent.held_bytes,
            "content": json.dumps([setback.model_dump() for setback in sent.setbacks]),
        }
        peak, seen_at = sent.held_bytes or sent.peak_bytes, _as_news(sent.at)
        latest = {
            **{f"new_{name}": getattr(sent, name) for name in _TOTALS},
            "run": run_id,
            "number": sent.number,
            "peak": peak,
            "now": seen_at,
        }

        def write(connection: Connection) -> bool:
            run = connection.execute(_RUN_OF_SUMMARY, {"run": run_id}).first()
            if run is None:
                raise NotFound(f"no run has the id {run_id}")
            is_new = self._insert(connection, SummaryRow, row)
            if is_new and sent.number >= run.summaries:  # one that comes late changes no totals
                connection.execute(_UPDATE_RUN, latest)
                self._note_cards(connection, run_id, run.host, sent.cards, seen_at)
            # What the allocator holds after another size is not what this size needs.
            if is_new and run.step and run.card_key and sent.held_bytes and not sent.retries and not sent.size_changes:
                total = max((card.total_bytes for card in sent.cards), default=0)
                place = {"step": run.step, "card_key": run.card_key, "total_bytes": total}
                peaks = {"source_id": run_id, "size": sent.micro_batch_size, "bytes": sent.held_bytes, **place}
                connection.execute(self._put_peak, peaks)
            return is_new

        return self.database.write(write)

    def end_run(self, run_id: str, sent: RunEnd) -> bool:
        ended = {"outcome": sent.outcome, "reason": sent.reason, "ended_at": sent.at or time.time()}

        def write(connection: Connection) -> bool:
            is_live = (RunRow.id == run_id) & (RunRow.outcome == "running")
            if connection.execute(update(RunRow).where(is_live).values(ended)).rowcount:
                return True
            if connection.execute(select(RunRow.id).where(RunRow.id == run_id)).first() is None:
                raise NotFound(f"no run has the id {run_id}")
            return False

        return self.database.write(write)

    def list_runs(
        self,
        after: tuple[float, str] | None = None,
        limit: int = 50,
        *,
        model: str = "",
        host: str = "",
        plan_id: str = "",
        state: str = "",
    ) -> tuple[list[RunLine], str | None]:
        wanted: list[ColumnElement[bool]] = [self._has_part(RunRow, "model", model)] if model else []
        wanted += [RunRow.host == host] if host else []
        wanted += [RunRow.plan_id == plan_id] if plan_id else []
        wanted += [RunRow.outcome == "running"] if state == "live" else []
        wanted += [RunRow.outcome.in_(("finished", "interrupted", "failed"))] if state == "ended" else []
        rows = self._page(select(*_RUN_COLUMNS).where(*wanted), RunRow.started_at, RunRow.id, after, limit)
        lines = [_run_line(row) for row in rows]
        return lines, _cursor(lines[-1].started_at, lines[-1].id) if len(lines) == limit else None

    def live_runs(self, seen_after: float) -> list[RunLine]:
        """Return the runs that have not ended, the nearest to their limit first."""
        query = select(*_RUN_COLUMNS).where(RunRow.outcome == "running", RunRow.seen_at > seen_after).limit(5000)
        with self.database.read() as connection:
            lines = [_run_line(row) for row in connection.execute(query).mappings()]
        return sorted(lines, key=lambda run: run.fill, reverse=True)

    def small_since(self, run_ids: Iterable[str]) -> dict[str, float]:
        query = select(RunRow.id, RunRow.small_since).where(RunRow.id.in_(list(run_ids)), RunRow.small_since > 0)
        with self.database.read() as connection:
            return {row.id: row.small_since for row in connection.execute(query)}

    def find_run(self, run_id: str) -> tuple[RunLine, list[SummaryLine]]:
        newest = select(SummaryRow).where(SummaryRow.run_id == run_id).order_by(SummaryRow.number.desc())
        with self.database.read() as connection:
            run = connection.execute(select(*_RUN_COLUMNS).where(RunRow.id == run_id)).mappings().first()
            rows = connection.execute(newest.limit(_MOST_SUMMARIES)).mappings().all()
        if run is None:
            raise NotFound(f"no run has the id {run_id}")
        fields = set(SummaryLine.model_fields) - {"setbacks"}
        summaries = [
            SummaryLine.model_validate({name: row[name] for name in fields} | {"setbacks": json.loads(row["content"])})
            for row in reversed(rows)
        ]
        return _run_line(run), summaries

    def cards(self) -> list[Card]:
        """Return each card that a run has read in the last hour, with the live runs on it."""
        now = time.time()
        query = (
            select(ReadingRow, RunRow.model, RunRow.user, RunRow.outcome, RunRow.seen_at)
            .join(RunRow, RunRow.id == ReadingRow.run_id)
            .where(ReadingRow.at > now - _RECENT_S)
            .order_by(ReadingRow.at.desc())
            .limit(5000)
        )
        groups: dict[tuple[str, str], list[Any]] = {}
        with self.database.read() as connection:
            for row in connection.execute(query):
                groups.setdefault((row.host, row.card), []).append(row)
        cards = []
        for (host, card), rows in sorted(groups.items()):
            newest = rows[0]
            reading = CardReading.model_construct(
                uuid=card,
                name=newest.name,
                kind=newest.kind,
                total_bytes=newest.total_bytes,
                free_bytes=newest.free_bytes,
                own_bytes=newest.own_bytes,
            )
            live = [row for row in rows if row.outcome == "running" and row.seen_at > now - SILENT_S]
            runs = [CardRun(run_id=row.run_id, model=row.model, user=row.user, own_bytes=row.own_bytes) for row in live]
            cards.append(Card(host=host, seen_at=newest.at, reading=reading, runs=tuple(runs)))
        return cards

    # ------------------------------------------------------------------------------------------------- predictions

    def add_prediction(self, sent: PredictionIn) -> bool:
        columns = ("id", "model", "card", "host", "step", "target_batch", "micro_batch_size", "total_bytes")
        row: dict[str, Any] = {name: getattr(sent, name) for name in columns}
        row |= {"made_at": sent.made_at or time.time(), "content": sent.model_dump_json()}
        return self._write_named({"model": sent.model}, lambda connection: self._insert(connection, PredictionRow, row))

    def list_predictions(
        self, after: tuple[float, str] | None = None, limit: int = 50, *, model: str = ""
    ) -> tuple[list[PredictionLine], str | None]:
        wanted = [self._has_part(PredictionRow, "model", model)] if model else []
        query = select(*_PREDICTION_COLUMNS).where(*wanted)
        rows = self._page(query, PredictionRow.made_at, PredictionRow.id, after, limit)
        lines = [PredictionLine.model_validate(row) for row in rows]
        return lines, _cursor(lines[-1].made_at, lines[-1].id) if len(lines) == limit else None

    def comparisons(self) -> list[Comparison]:
        """Return the newest prediction of each step and card beside what was measured, at each size."""
        newest = (
            select(PredictionRow.content)
            .where(PredictionRow.step != "", PredictionRow.step.in_(select(PeakRow.step)))
            .order_by(PredictionRow.made_at.desc(), PredictionRow.id.desc())
            .limit(_MOST_COMPARED)
        )
        with self.database.read() as connection:
            contents = connection.execute(newest).scalars().all()
            predictions: dict[tuple[str, str], PredictionIn] = {}
            for content in contents:
                prediction = PredictionIn.model_validate_json(content)
                predictions.setdefault((prediction.step, card_key(prediction.card)), prediction)
            measured = (
                select(PeakRow.step, PeakRow.card_key, PeakRow.size, func.max(PeakRow.bytes).label("bytes"))
                .where(PeakRow.step.in_({step for step, _ in predictions}))
                .group_by(PeakRow.step, PeakRow.card_key, PeakRow.size)
            )
            peaks: dict[str, list[Any]] = {}
            for row in connection.execute(measured):
                peaks.setdefault(row.step, []).append(row)
        return [
            Comparison(
                prediction_id=prediction.id,
                model=prediction.model,
                card=prediction.card,
                size=row.size,
                predicted_bytes=predicted,
                measured_bytes=row.bytes,
            )
            for prediction in predictions.values()
            for row in peaks.get(prediction.step, ())
            if row.card_key in {card_key(name) for name in (prediction.card, *prediction.card_names)}
            and (predicted := predicted_bytes(prediction, row.size)) is not None
        ]

    # ------------------------------------------------------------------------------------------------------ alerts

    def add_alert(self, run_id: str, kind: str, text: str) -> bool:
        row = {"run_id": run_id, "kind": kind, "made_at": time.time(), "sent_at": 0.0, "text": text[:1000]}
        return self.database.write(lambda connection: self._insert(connection, AlertRow, row))

    def alert_sent(self, alert: Alert) -> None:
        is_it = (AlertRow.run_id == alert.run_id) & (AlertRow.kind == alert.kind)
        self.database.write(
            lambda connection: connection.execute(update(AlertRow).where(is_it).values(sent_at=time.time())).rowcount
        )

    def alerts(self, limit: int = 100, *, unsent_since: float | None = None) -> list[Alert]:
        query = select(AlertRow.__table__).order_by(AlertRow.made_at.desc()).limit(limit)
        if unsent_since is not None:
            query = query.where(AlertRow.made_at > unsent_since, AlertRow.sent_at == 0)
        with self.database.read() as connection:
            return [Alert.model_validate(dict(row)) for row in connection.execute(query).mappings()]

    # ------------------------------------------------------------------------------------------------------ shared

    def _insert(self, connection: Connection, table: type[Base], row: Mapping[str, Any]) -> bool:
        """Insert a row unless there is one with its key; return whether it is new."""
        return bool(connection.execute(self._inserts[table], row).rowcount)

    def _write_named(self, names: Mapping[str, str], write: Any) -> bool:
        """Write, and first note the names that are new, in one order, so that writers do not wait for each other."""
        unknown = sorted({pair for pair in names.items() if pair[1]} - self._names)

        def action(connection: Connection) -> bool:
            for kind, name in unknown:
                self._insert(connection, NameRow, {"kind": kind, "name": name})
            return bool(write(connection))

        is_new = self.database.write(action)
        if len(self._names) < 10_000:  # a hostile writer must not fill the memory
            self._names.update(unknown)
        return is_new

    def _note_cards(
        self, connection: Connection, run_id: str, host: str, cards: Sequence[CardReading], at: float
    ) -> None:
        for index, card in enumerate(cards):
            row = {"run_id": run_id, "card": card.uuid or f"{card.name[:190]} {index}", "host": host, "at": at}
            row |= card.model_dump(exclude={"uuid"})
            connection.execute(self._put_reading, row)

    def _has_part(self, table: type[Base], kind: str, part: str) -> ColumnElement[bool]:
        """Search the short table of names: a search in the long one would read all of it.

        The names found stand in the query itself. So PostgreSQL's planner knows how many rows have them.
        """
        is_like = func.lower(NameRow.name).contains(part.lower(), autoescape=True)
        names = select(NameRow.name).where(NameRow.kind == kind, is_like).limit(_MOST_NAMES)
        with self.database.read() as connection:
            found = connection.execute(names).scalars().all()
        column: ColumnElement[str] = table.__table__.c[kind]
        return column.in_(found)

    def _page(
        self, query: Select[Any], moment: Any, key: Any, after: tuple[float, str] | None, limit: int
    ) -> list[dict[str, Any]]:
        """Return a page, the newest first, from behind a place; a row value uses the index, an OR would not."""
        if after is not None:
            query = query.where(tuple_(moment, key) < after)
        query = query.order_by(moment.desc(), key.desc()).limit(limit)
        with self.database.read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def _make_upsert(database: Database, table: type[Base], key: list[str], higher: Any = None) -> Any:
    """Return a statement that inserts a row or replaces it, with ``higher`` only by one with more in that column."""
    statement = database.insert(cast("Table", table.__table__))
    values = {column.name: statement.excluded[column.name] for column in table.__table__.c if column.name not in key}
    where = None if higher is None else higher < statement.excluded[higher.name]
    return statement.on_conflict_do_update(index_elements=key, set_=values, where=where)


def card_key(name: str) -> str:
    """Return a card's name without what names of one card differ in: case, spaces and the maker."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", ""))[:_LONGEST_NAME]


def _cut(text: str) -> str:
    return text[:_LONGEST_NAME]


def _cursor(moment: float, key: str) -> str:
    return f"{moment!r}_{key}"


def _as_news(at: float) -> float:
    """Return the time of the server, or the client's if it hands in what happened long before."""
    now = time.time()
    return now if at > now - _RECENT_S else at


def _run_line(row: RowMapping | dict[str, Any]) -> RunLine:
    values: dict[str, Any] = dict(row)
    outcome = values.pop("outcome")
    if outcome == "running":
        outcome = "live" if values["seen_at"] > time.time() - SILENT_S else "silent"
    return RunLine.model_validate(values | {"state": outcome})
