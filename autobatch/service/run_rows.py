"""Stores and finds runs with their summaries, the cards that they read, and the alerts that they give."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import BigInteger, Connection, Double, RowMapping, Table, bindparam, case, select, update
from sqlalchemy.sql import ColumnElement

from autobatch.service.answers import Alert, Card, CardRun, RunLine, SummaryLine
from autobatch.service.comparison import card_key
from autobatch.service.database import Database
from autobatch.service.records import CardReading, RunEnd, RunIn, RunSummary
from autobatch.service.rows import Conflict, NotFound, Rows, cursor, delete_runs, make_upsert
from autobatch.service.tables import AlertRow, PeakRow, ReadingRow, RunRow, SummaryRow

_SILENT_S = 300.0  # ten summaries did not come
_RECENT_S = 3600.0  # of a card's reading; and how late a summary may come to count as news
_MOST_SUMMARIES = 1000
_MOST_AHEAD = 1000  # numbers of a run's summaries beyond one a second

_RUN_COLUMNS = [RunRow.__table__.c[name] for name in RunLine.model_fields if name != "state"] + [RunRow.outcome]
_TOTALS = ("steps", "samples", "seconds", "retries", "size_changes", "micro_batch_size")
_RUNS = cast("Table", RunRow.__table__)
_RUN_OF_SUMMARY = select(
    *(_RUNS.c[name] for name in ("host", "step", "card_key", "world_size", "summaries", "owner", "started_at")),
    _RUNS.c.added_at,
).where(_RUNS.c.id == bindparam("run"))
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


class RunRows(Rows):
    """The runs, cards and alerts of one database."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._put_reading = make_upsert(database, ReadingRow, ["run_id", "card"])
        self._put_peak = make_upsert(database, PeakRow, ["source_id", "size"], PeakRow.__table__.c.bytes)

    def add_run(self, sent: RunIn, owner: str = "") -> bool:
        device = sent.cards[0].name if sent.cards else ""
        names = {"model": sent.model, "device": device, "host": sent.host}
        seen_at = _seen_at(sent.started_at, sent.cards)
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
            "owner": owner,
            "added_at": time.time(),
            "first_size": sent.micro_batch_size,
            "micro_batch_size": sent.micro_batch_size,
            "limit_bytes": sent.limit_bytes,
            "seen_at": seen_at,
        }

        def write(connection: Connection) -> bool:
            is_new = self.insert(connection, RunRow, row)
            if is_new:
                self._note_cards(connection, sent.id, sent.host, sent.cards, seen_at)
            return is_new

        return self.write_named(names, write)

    def add_summary(self, run_id: str, sent: RunSummary, owner: str | None = None) -> bool:
        """Add a summary; ``owner`` is the name of the token that sends it, or ``None`` if that may write to any run."""
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
        last_peak, seen_at = sent.held_bytes or sent.peak_bytes, _seen_at(sent.at, sent.cards)
        latest = {
            **{f"new_{name}": getattr(sent, name) for name in _TOTALS},
            "run": run_id,
            "number": sent.number,
            "peak": last_peak,
            "now": seen_at,
        }

        def write(connection: Connection) -> bool:
            run = connection.execute(_RUN_OF_SUMMARY, {"run": run_id}).first()
            if run is None:
                raise NotFound(f"no run has the id {run_id}")
            _check_owner(run_id, run.owner, owner)
            most = time.time() - min(run.started_at, run.added_at) + _MOST_AHEAD
            if sent.number > most:  # it would freeze the totals: only a higher number changes them
                raise Conflict(f"the run {run_id} is too young for a summary with the number {sent.number}")
            is_new = self.insert(connection, SummaryRow, row)
            if is_new and sent.number >= run.summaries:  # one that comes late changes no totals
                connection.execute(_UPDATE_RUN, latest)
                self._note_cards(connection, run_id, run.host, sent.cards, seen_at)
            # What the allocator holds after another size is not what this size needs.
            if is_new and run.step and run.card_key and sent.held_bytes and not sent.retries and not sent.size_changes:
                total = max((card.total_bytes for card in sent.cards), default=0)
                place = {"step": run.step, "card_key": run.card_key, "world_size": run.world_size, "total_bytes": total}
                peak = {"size": sent.micro_batch_size, "bytes": sent.held_bytes, "ran_out": 0}
                peaks = {"source_id": run_id, **peak, **place}
                connection.execute(self._put_peak, peaks)
            return is_new

        return self.database.write(write)

    def end_run(self, run_id: str, sent: RunEnd, owner: str | None = None) -> bool:
        ended = {"outcome": sent.outcome, "reason": sent.reason, "ended_at": sent.at or time.time()}

        def write(connection: Connection) -> bool:
            run = connection.execute(select(RunRow.owner).where(RunRow.id == run_id)).first()
            if run is None:
                raise NotFound(f"no run has the id {run_id}")
            _check_owner(run_id, run.owner, owner)
            is_live = (RunRow.id == run_id) & (RunRow.outcome == "running")
            return bool(connection.execute(update(RunRow).where(is_live).values(ended)).rowcount)

        return self.database.write(write)

    def forget_run(self, run_id: str) -> None:
        if not self.database.write(lambda connection: delete_runs(connection, RunRow.id == run_id)):
            raise NotFound(f"no run has the id {run_id}")

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
        wanted: list[ColumnElement[bool]] = [self.has_part(RunRow, "model", model)] if model else []
        wanted += [RunRow.host == host] if host else []
        wanted += [RunRow.plan_id == plan_id] if plan_id else []
        wanted += [RunRow.outcome == "running"] if state == "live" else []
        wanted += [RunRow.outcome.in_(("finished", "interrupted", "failed"))] if state == "ended" else []
        rows = self.page(select(*_RUN_COLUMNS).where(*wanted), RunRow.started_at, RunRow.id, after, limit)
        lines = [_run_line(row) for row in rows]
        return lines, cursor(lines[-1].started_at, lines[-1].id) if len(lines) == limit else None

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
            live = [row for row in rows if row.outcome == "running" and row.seen_at > now - _SILENT_S]
            runs = [CardRun(run_id=row.run_id, model=row.model, user=row.user, own_bytes=row.own_bytes) for row in live]
            cards.append(Card(host=host, seen_at=newest.at, reading=reading, runs=tuple(runs)))
        return cards

    def _note_cards(
        self, connection: Connection, run_id: str, host: str, cards: Sequence[CardReading], at: float
    ) -> None:
        for index, card in enumerate(cards):
            row = {"run_id": run_id, "card": card.uuid or f"{card.name[:190]} {index}", "host": host, "at": at}
            row |= card.model_dump(exclude={"uuid"})
            connection.execute(self._put_reading, row)

    # ------------------------------------------------------------------------------------------------------ alerts

    def add_alert(self, run_id: str, kind: str, text: str) -> bool:
        row = {"run_id": run_id, "kind": kind, "made_at": time.time(), "sent_at": 0.0, "text": text[:1000]}
        return self.database.write(lambda connection: self.insert(connection, AlertRow, row))

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


def _check_owner(run_id: str, owner: str, sender: str | None) -> None:
    if sender is not None and sender != owner:
        raise Conflict(f"another token began the run {run_id}")


def _seen_at(at: float, cards: Sequence[CardReading]) -> float:
    """Return the time of the server, or the client's if that hands in what happened long before.

    Only a process that runs now reads its cards, so then a client's clock that is wrong does not matter.
    """
    now = time.time()
    return now if cards or at > now - _RECENT_S else at


def _run_line(row: RowMapping | dict[str, Any]) -> RunLine:
    values: dict[str, Any] = dict(row)
    outcome = values.pop("outcome")
    if outcome == "running":
        outcome = "live" if values["seen_at"] > time.time() - _SILENT_S else "silent"
    return RunLine.model_validate(values | {"state": outcome})
