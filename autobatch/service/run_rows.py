"""Stores and finds runs with their summaries, and the cards that they read."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, groupby, repeat
from typing import Any, cast

from fastapi import HTTPException
from sqlalchemy import Connection, Row, Table, bindparam, func, select, update
from sqlalchemy.sql import ColumnElement

from autobatch.service.answers import Card, CardRun, Machine, RankLine, RunLine, RunOut, RunPage, RunQuery
from autobatch.service.comparison import card_key
from autobatch.service.database import Database
from autobatch.service.records import CardReading, RunEnd, RunIn, RunSummary, SummaryLine
from autobatch.service.rows import Rows, columns_of, make_upsert
from autobatch.service.tables import LATELY, PeakRow, ReadingRow, RunRow, SummaryRow

_RECENT_S = 3600.0  # of a card's reading; and how late a summary may come to count as news
_MOST_LINES = 1000  # of a run's course
_MOST_SETBACKS = 200  # summaries of a run with setbacks, the newest
_MOST_AHEAD = 1000  # numbers of a run's summaries beyond one a second

_ALL = RunQuery()
_TOTALS = ("steps", "samples", "seconds", "retries", "size_changes", "micro_batch_size")
_RUNS = cast("Table", RunRow.__table__)
_IS_RUNNING = RunRow.outcome == "running"
_STATES: dict[str, list[ColumnElement[bool]]] = {
    "": [],
    "live": [_IS_RUNNING, RunRow.seen_at > LATELY],
    "silent": [_IS_RUNNING, RunRow.seen_at <= LATELY],
    "ended": [RunRow.outcome.in_(("finished", "interrupted", "failed"))],
}
_RUN = select(_RUNS).where(_RUNS.c.id == bindparam("run")).with_for_update()
_UPDATE_RUN = update(_RUNS).where(_RUNS.c.id == bindparam("run"))  # what is set follows from the parameters


class RunRows(Rows):
    """The runs and cards of one database."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._put_reading = make_upsert(database, ReadingRow, ["run_id", "card"])
        self._put_peak = make_upsert(database, PeakRow, ["source_id", "size"], PeakRow.__table__.c.bytes)

    def add_run(self, sent: RunIn, owner: str = "") -> bool:
        device = sent.cards[0].name if sent.cards else ""
        seen_at = _seen_at(sent.started_at, sent.cards)
        row = sent.model_dump(exclude={"cards", "ranks", "version"})  # all else has a column
        row["started_at"] = min(sent.started_at, time.time())  # a clock that is ahead must not put it first for ever
        row["ranks"] = json.dumps([rank.model_dump() for rank in sent.ranks])
        row |= {"device": device, "card_key": card_key(device), "first_size": sent.micro_batch_size}
        row |= {"owner": owner, "outcome": "running", "seen_at": seen_at}

        def write(connection: Connection) -> bool:
            is_new = self.add(connection, RunRow, row)
            if is_new:
                self._note_cards(connection, sent.id, sent.host, sent.cards, seen_at)
            return is_new

        return self.database.write(write)

    def add_summary(self, run_id: str, sent: RunSummary, owner: str | None = None) -> bool:
        row = {name: getattr(sent, name) for name in SummaryLine.model_fields if name != "setbacks"}
        row |= {"run_id": run_id, "content": json.dumps([setback.model_dump() for setback in sent.setbacks])}
        seen_at, peak = _seen_at(sent.at, sent.cards), sent.held_bytes or sent.peak_bytes
        latest = {"seen_at": seen_at, "summaries": sent.number + 1, "last_bytes": peak}
        latest |= {name: getattr(sent, name) for name in _TOTALS}

        def write(connection: Connection) -> bool:
            run = self._find_own(connection, run_id, owner)
            if run is None:
                return False
            if sent.number > time.time() - run.started_at + _MOST_AHEAD:  # only a higher number would change the totals
                raise HTTPException(409, f"the run {run_id} is too young for a summary with the number {sent.number}")
            is_new = self.insert(connection, SummaryRow, row)
            if is_new and sent.number >= run.summaries:  # one that comes late changes no totals
                small_since = (run.small_since or seen_at) if sent.micro_batch_size < run.first_size else 0.0
                more = {"small_since": small_since, "peak_bytes": max(peak, run.peak_bytes)}
                more["rank_peaks"] = json.dumps(sent.rank_peaks)
                connection.execute(_UPDATE_RUN, latest | more | {"run": run_id})
                self._note_cards(connection, run_id, run.host, sent.cards, seen_at)
            # What the allocator holds after another size is not what this size needs.
            if is_new and run.step and run.card_key and sent.held_bytes and not sent.retries and not sent.size_changes:
                measured = {"step": run.step, "card_key": run.card_key, "world_size": run.world_size}
                measured |= {"source_id": run_id, "size": sent.micro_batch_size, "bytes": sent.held_bytes, "ran_out": 0}
                connection.execute(self._put_peak, measured)
            return is_new

        return self.database.write(write)

    def end_run(self, run_id: str, sent: RunEnd, owner: str | None = None) -> bool:
        ended = {"outcome": sent.outcome, "reason": sent.reason, "ended_at": sent.at or time.time()}

        def write(connection: Connection) -> bool:
            run = self._find_own(connection, run_id, owner)
            if run is None or run.outcome != "running":
                return False
            connection.execute(_UPDATE_RUN, ended | {"run": run_id})
            return True

        return self.database.write(write)

    def _find_own(self, connection: Connection, run_id: str, owner: str | None) -> Row[Any] | None:
        """Return a run that the token with the name ``owner`` may write to; ``None`` is an admin, who may write to all.

        Nothing comes back if the run was forgotten: its client has no more to do.
        """
        run = connection.execute(_RUN, {"run": run_id}).first()
        if run is None and not self.is_forgotten(connection, RunRow, run_id):
            raise HTTPException(404, f"no run has the id {run_id}")
        if run is not None and owner is not None and owner != run.owner:
            raise HTTPException(409, f"another token began the run {run_id}")
        return run

    def list_runs(self, query: RunQuery = _ALL) -> RunPage:
        of_plan = [RunRow.plan_id == query.plan_id] if query.plan_id else []
        runs, following = self.read_page(RunRow.started_at, RunLine, query, *of_plan, *_STATES[query.state])
        return RunPage(runs=runs, next=following)

    def live_runs(self, seen_after: float = 0.0) -> list[RunLine]:
        """Return the live runs, the nearest to their limit first; also the silent ones that were seen after a time."""
        seen = RunRow.seen_at > (seen_after or LATELY)
        query = select(*columns_of(RunRow, RunLine)).where(_IS_RUNNING, seen).order_by(RunRow.seen_at.desc())
        with self.database.read() as connection:
            rows = connection.execute(query.limit(5000)).all()
        lines = [RunLine.model_validate(row, from_attributes=True) for row in rows]
        return sorted(lines, key=lambda run: run.fill, reverse=True)

    def find_run(self, run_id: str) -> RunOut:
        """Return a run with its course, in at most a thousand lines: each then joins the same number of summaries."""
        its = SummaryRow.run_id == run_id
        its_run = select(*columns_of(RunRow, RunLine), RunRow.summaries, RunRow.ranks, RunRow.rank_peaks)
        newest = select(SummaryRow.number, SummaryRow.content).where(its, SummaryRow.content != "[]")
        names = SummaryLine.model_fields.keys() - {"setbacks", "micro_batch_size"}
        highest = [func.max(getattr(SummaryRow, name)).label(name) for name in sorted(names)]
        smallest = func.min(SummaryRow.micro_batch_size).label("micro_batch_size")
        with self.database.read() as connection:
            run = connection.execute(its_run.where(RunRow.id == run_id)).first()
            if run is None:
                raise HTTPException(404, f"no run has the id {run_id}")
            joined = -(-run.summaries // _MOST_LINES) or 1
            course = select(*highest, smallest).where(its).group_by(SummaryRow.number // joined).order_by("number")
            rows = connection.execute(course).mappings().all()
            with_setbacks = connection.execute(newest.order_by(SummaryRow.number.desc()).limit(_MOST_SETBACKS)).all()
        setbacks = defaultdict[int, list[Any]](list)
        for row in reversed(with_setbacks):
            setbacks[row.number // joined] += json.loads(row.content)
        summaries = tuple(SummaryLine(**row, setbacks=tuple(setbacks[row["number"] // joined])) for row in rows)
        ranks, peaks = json.loads(run.ranks), json.loads(run.rank_peaks)
        places = tuple(
            RankLine(**place, last_bytes=peak) for place, peak in zip(ranks, chain(peaks, repeat(0)), strict=False)
        )
        line = RunLine.model_validate(run, from_attributes=True)
        return RunOut(run=line, ranks=places, joined=joined, summaries=summaries)

    def cards(self) -> list[Card]:
        """Return each card that a run has read in the last hour, with the live runs on it."""
        query = (
            select(
                ReadingRow.card.label("uuid"),
                *(ReadingRow.__table__.c),
                RunRow.model,
                RunRow.user,
                RunRow.state.label("state"),
            )
            .join(RunRow, RunRow.id == ReadingRow.run_id)
            .where(ReadingRow.at > time.time() - _RECENT_S)
            .order_by(ReadingRow.at.desc())
            .limit(5000)
        )
        groups = defaultdict[str, list[Any]](list)
        with self.database.read() as connection:
            for row in connection.execute(query):
                groups[row.card].append(row)
        cards = [
            Card(
                host=rows[0].host,
                seen_at=rows[0].at,
                reading=CardReading.model_validate(rows[0], from_attributes=True),
                runs=tuple(CardRun.model_validate(row, from_attributes=True) for row in rows if row.state == "live"),
            )
            for rows in groups.values()
        ]
        return sorted(cards, key=lambda card: (card.host, card.reading.uuid))

    def machines(self) -> list[Machine]:
        """Return the computers of these cards: what is free on each, and who is on it."""
        return [
            Machine(
                host=host,
                seen_at=max(card.seen_at for card in cards),
                total_bytes=sum(card.reading.total_bytes for card in cards),
                free_bytes=sum(card.reading.free_bytes for card in cards),
                users=tuple(sorted({run.user for card in cards for run in card.runs if run.user})),
                runs=len({run.run_id for card in cards for run in card.runs}),
                cards=tuple(cards),
            )
            for host, group in groupby(self.cards(), key=lambda card: card.host)
            for cards in [list(group)]
        ]

    def _note_cards(
        self, connection: Connection, run_id: str, host: str, cards: Sequence[CardReading], at: float
    ) -> None:
        for index, card in enumerate(cards):
            key = card.uuid or f"{card.name[:90]} {index} of {host[:90]}"
            row = {"run_id": run_id, "card": key, "host": host, "at": at}
            row |= card.model_dump(exclude={"uuid"})
            connection.execute(self._put_reading, row)


def _seen_at(at: float, cards: Sequence[CardReading]) -> float:
    """Return the time of the server, or the client's if that hands in what happened long before.

    Only a process that runs now reads its cards, so then a client's clock that is wrong does not matter.
    """
    now = time.time()
    return now if cards or at > now - _RECENT_S else at
