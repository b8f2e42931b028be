"""Forgets and prunes all kinds of records, and keeps the alerts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from fastapi import HTTPException
from sqlalchemy import Connection, func, select, update
from sqlalchemy.sql import ColumnElement, Select

from autobatch.service.answers import Alert
from autobatch.service.plan_rows import PlanRows
from autobatch.service.rows import columns_of, delete_rows
from autobatch.service.run_rows import RunRows
from autobatch.service.tables import AlertRow, PeakRow, PlanRow, PredictionRow, RecordRow, RunRow

Kind = Literal["plans", "runs", "predictions"]

_TABLES: dict[Kind, type[RecordRow]] = {"plans": PlanRow, "runs": RunRow, "predictions": PredictionRow}
_MOST_PLANS = 2000  # of one fingerprint, as a local ledger keeps them
_CLAIM_S = 60.0  # of an alert: a server that has not sent it by then is gone
_DELETED_AT_ONCE = 20  # records of one transaction: a run may have many thousand summaries


class Store(PlanRows, RunRows):
    """The team's plans, runs, predictions and alerts in one database."""

    def forget(self, kind: Kind, record_id: str) -> int:
        """Delete a record for good, a plan with its runs; return the number of these runs."""

        def write(connection: Connection) -> int:
            if not self.forget_rows(connection, _TABLES[kind], _TABLES[kind].id == record_id):
                raise HTTPException(404, f"no {kind.removesuffix('s')} has the id {record_id}")
            return self.forget_rows(connection, RunRow, RunRow.plan_id == record_id) if kind == "plans" else 0

        return self.database.write(write)

    def prune(self, before: float) -> dict[Kind, int]:
        """Delete what nobody needs, and return how much of it. A client may hand it in again.

        It deletes runs that were last seen before this time, and older predictions that nothing was measured beside.
        The newest plans of each fingerprint stay, as many as in a local ledger, and those with a run. The peaks of
        runs stay, since the gate's margin rests on them.
        """
        newest_first = (PlanRow.added_at.desc(), PlanRow.id.desc())
        turn = func.row_number().over(partition_by=(PlanRow.fingerprint, PlanRow.rank), order_by=newest_first)
        counted = select(PlanRow.id, turn.label("turn")).subquery()
        is_old = RunRow.seen_at < before
        is_alone = PredictionRow.step.not_in(select(PeakRow.step)) & (PredictionRow.added_at < before)
        has_no_run = PlanRow.id.not_in(select(RunRow.plan_id))
        return {
            "runs": self._delete(RunRow, select(RunRow.id).where(is_old), is_old),
            "plans": self._delete(PlanRow, select(counted.c.id).where(counted.c.turn > _MOST_PLANS), has_no_run),
            "predictions": self._delete(PredictionRow, select(PredictionRow.id).where(is_alone), is_alone),
        }

    def _delete(self, table: type[RecordRow], found: Select[Any], still: ColumnElement[bool]) -> int:
        """Delete in small transactions, so that a server can write meanwhile."""
        with self.database.read() as connection:
            ids = connection.execute(found).scalars().all()
        count = 0
        for start in range(0, len(ids), _DELETED_AT_ONCE):
            wanted = table.id.in_(ids[start : start + _DELETED_AT_ONCE]) & still
            count += self.database.write(partial(delete_rows, table=table, wanted=wanted, keep_peaks=table is RunRow))
        return count

    def add_alert(self, run_id: str, kind: str, text: str) -> bool:
        row = {"run_id": run_id, "kind": kind, "made_at": time.time(), "text": text[:1000]}
        return self.database.write(lambda connection: self.insert(connection, AlertRow, row))

    def alerts(self, *wanted: ColumnElement[bool]) -> list[Alert]:
        """Return a hundred alerts, the newest first."""
        query = select(*columns_of(AlertRow, Alert)).where(*wanted).order_by(AlertRow.made_at.desc()).limit(100)
        with self.database.read() as connection:
            return [Alert.model_validate(row, from_attributes=True) for row in connection.execute(query)]

    def claim_alerts(self, since: float) -> Iterator[Alert]:
        """Yield alerts for this server to send, which others that share the database then leave alone.

        A claim ends after a minute. If its server dies before it has sent the alert, another one sends it. If it dies
        after that, and before it has noted so, the alert is sent twice.
        """
        now = time.time()
        for alert in self.alerts(AlertRow.made_at > since, AlertRow.sent_at == 0, AlertRow.next_at <= now):
            if self.note_alert(alert, AlertRow.next_at <= now, next_at=now + _CLAIM_S):
                yield alert

    def note_alert(self, alert: Alert, *still: ColumnElement[bool], **values: Any) -> bool:
        """Note what became of an alert that is not sent yet; return whether there is such a one."""
        wanted = (AlertRow.run_id == alert.run_id, AlertRow.kind == alert.kind, AlertRow.sent_at == 0, *still)
        change = update(AlertRow).where(*wanted).values(values)
        return bool(self.database.write(lambda connection: connection.execute(change).rowcount))
