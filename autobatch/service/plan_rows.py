"""Stores and finds plans and predictions, and puts what was predicted beside what was measured."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, delete, func, select

from autobatch.planning.plan_record import PlanRecord
from autobatch.service.answers import Comparison, PlanLine, PredictionLine
from autobatch.service.comparison import predicted_bytes
from autobatch.service.records import PlanIn, PredictionIn
from autobatch.service.rows import NotFound, Rows, card_key, cursor, cut
from autobatch.service.tables import AlertRow, PeakRow, PlanRow, PredictionRow, ReadingRow, RunRow, SummaryRow

_MOST_RECALLED = 10
_MOST_PEAKS = 200  # of one plan: it has far fewer trials
_MOST_COMPARED = 1000  # predictions, the newest

_PLAN_COLUMNS = [PlanRow.__table__.c[name] for name in PlanLine.model_fields]
_PREDICTION_COLUMNS = [PredictionRow.__table__.c[name] for name in PredictionLine.model_fields]


class PlanRows(Rows):
    """The plans and predictions of one database."""

    def add_plan(self, sent: PlanIn) -> bool:
        plan = sent.plan
        names = {"model": cut(plan.model), "device": cut(plan.device.name), "host": sent.host}
        row = {
            "id": sent.id,
            "made_at": plan.made_at or time.time(),
            **names,
            "version": cut(plan.version),
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
            is_new = self.insert(connection, PlanRow, row)
            if is_new and sent.step:
                for size, peak in sorted(peaks.items())[:_MOST_PEAKS]:
                    self.insert(connection, PeakRow, {"source_id": sent.id, "size": size, "bytes": peak, **place})
            return is_new

        return self.write_named(names, write)

    def list_plans(
        self,
        after: tuple[float, str] | None = None,
        limit: int = 50,
        *,
        model: str = "",
        device: str = "",
        host: str = "",
    ) -> tuple[list[PlanLine], str | None]:
        wanted = [self.has_part(PlanRow, name, part) for name, part in (("model", model), ("device", device)) if part]
        wanted += [PlanRow.host == host] if host else []
        rows = self.page(select(*_PLAN_COLUMNS).where(*wanted), PlanRow.made_at, PlanRow.id, after, limit)
        lines = [PlanLine.model_validate(row) for row in rows]
        return lines, cursor(lines[-1].made_at, lines[-1].id) if len(lines) == limit else None

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

    def add_prediction(self, sent: PredictionIn) -> bool:
        columns = ("id", "model", "card", "host", "step", "target_batch", "micro_batch_size", "total_bytes")
        row: dict[str, Any] = {name: getattr(sent, name) for name in columns}
        row |= {"made_at": sent.made_at or time.time(), "content": sent.model_dump_json()}
        return self.write_named({"model": sent.model}, lambda connection: self.insert(connection, PredictionRow, row))

    def list_predictions(
        self, after: tuple[float, str] | None = None, limit: int = 50, *, model: str = ""
    ) -> tuple[list[PredictionLine], str | None]:
        wanted = [self.has_part(PredictionRow, "model", model)] if model else []
        query = select(*_PREDICTION_COLUMNS).where(*wanted)
        rows = self.page(query, PredictionRow.made_at, PredictionRow.id, after, limit)
        lines = [PredictionLine.model_validate(row) for row in rows]
        return lines, cursor(lines[-1].made_at, lines[-1].id) if len(lines) == limit else None

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
