"""Stores and finds plans and predictions, and puts what was predicted beside what was measured."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from fastapi import HTTPException
from sqlalchemy import Connection, func, select

from autobatch.planning.plan_record import PlanRecord
from autobatch.service.answers import Comparison, PageQuery, PlanLine, PlanPage, PlanQuery, PredictionPage
from autobatch.service.comparison import card_key, card_keys, predicted_bytes
from autobatch.service.records import PlanIn, PredictionIn, PredictionLine
from autobatch.service.rows import Rows, cut
from autobatch.service.tables import PeakRow, PlanRow, PredictionRow

_MOST_RECALLED = 10
_MOST_PEAKS = 200  # of one plan: it has far fewer trials
_MOST_COMPARED = 1000  # predictions, the newest
_MOST_OF_STEP = 10  # of these, the newest, on one card
_MOST_PEAKS_OF_STEP = 100  # that they are compared with, the highest
_ALL = PlanQuery()


class PlanRows(Rows):
    """The plans and predictions of one database."""

    def add_plan(self, sent: PlanIn) -> bool:
        plan, now = sent.plan, time.time()
        columns = ("rank", "world_size", "target_batch", "micro_batch_size", "accumulation_steps", "peak_bytes")
        row: dict[str, Any] = {name: getattr(plan, name) for name in (*columns, "limit_bytes")}
        row |= {"id": sent.id, "host": sent.host, "step": sent.step, "fingerprint": plan.fingerprint[:64]}
        row |= {"model": cut(plan.model), "device": cut(plan.device.name), "version": cut(plan.version)}
        row |= {"added_at": now, "made_at": min(plan.made_at or now, now)}
        row["content"] = plan.model_dump_json(exclude_defaults=True)
        # With lengths a trial's size counts samples of one length, which a prediction does not have.
        trials = [trial for trial in plan.trials if trial.length is None]
        peaks = {trial.micro_batch_size: (plan.limit_bytes, 1) for trial in trials if trial.outcome == "oom"}
        peaks |= {
            trial.micro_batch_size: (trial.peak_reserved, 0)
            for trial in trials
            if trial.outcome == "fits" and trial.peak_reserved
        }
        place = {"step": sent.step, "card_key": card_key(plan.device.name), "world_size": plan.world_size}
        place["source_id"] = sent.id

        def write(connection: Connection) -> bool:
            is_new = self.add(connection, PlanRow, row)
            for size, (peak, ran_out) in sorted(peaks.items())[: _MOST_PEAKS if is_new and sent.step else 0]:
                self.insert(connection, PeakRow, {"size": size, "bytes": peak, "ran_out": ran_out, **place})
            return is_new

        return self.database.write(write)

    def list_plans(self, query: PlanQuery = _ALL) -> PlanPage:
        plans, following = self.read_page(PlanRow.made_at, PlanLine, query)
        return PlanPage(plans=plans, next=following)

    def find_plan(self, plan_id: str) -> tuple[str, PlanRecord]:
        """Return a plan's host and the plan."""
        with self.database.read() as connection:
            row = connection.execute(select(PlanRow.host, PlanRow.content).where(PlanRow.id == plan_id)).first()
        if row is None:
            raise HTTPException(404, f"no plan has the id {plan_id}")
        return row.host, PlanRecord.model_validate_json(row.content)

    def recall(self, fingerprint: str, rank: int) -> list[PlanRecord]:
        """Return the newest plan of each division on each host first, by the server's clock.

        A host that restarts often does not hide the plans of others. Nor do two machines with one name, since a
        smaller one has another division. A host's name counts for nothing else: the fingerprint has the card.
        """
        same = (PlanRow.host, PlanRow.target_batch, PlanRow.micro_batch_size)
        turn = func.row_number().over(partition_by=same, order_by=PlanRow.added_at.desc())
        query = select(PlanRow.content).where(PlanRow.fingerprint == fingerprint, PlanRow.rank == rank)
        query = query.order_by(turn, PlanRow.added_at.desc()).limit(_MOST_RECALLED)
        with self.database.read() as connection:
            rows = connection.execute(query).scalars().all()
        return [PlanRecord.model_validate_json(content) for content in rows]

    def add_prediction(self, sent: PredictionIn) -> bool:
        now = time.time()
        row: dict[str, Any] = {name: getattr(sent, name) for name in (*PredictionLine.model_fields, "step")}
        row |= {"added_at": now, "made_at": min(sent.made_at or now, now), "content": sent.model_dump_json()}
        return self.database.write(lambda connection: self.add(connection, PredictionRow, row))

    def list_predictions(self, query: PageQuery = _ALL) -> PredictionPage:
        predictions, following = self.read_page(PredictionRow.made_at, PredictionLine, query)
        return PredictionPage(predictions=predictions, next=following)

    def comparisons(self) -> list[Comparison]:
        """Return each prediction beside each plan or run of its step, at the size that took the most beyond it.

        The newest prediction of each plan or run is marked as such, by the server's clock: a client's may be wrong.
        """
        newest = (
            select(PredictionRow.content)
            .where(PredictionRow.step != "", PredictionRow.step.in_(select(PeakRow.step)))
            .order_by(PredictionRow.added_at.desc(), PredictionRow.id.desc())
            .limit(_MOST_COMPARED)
        )
        rank = func.row_number().over(partition_by=PeakRow.step, order_by=PeakRow.bytes.desc()).label("rank")
        with self.database.read() as connection:
            contents = connection.execute(newest).scalars().all()
            predictions: list[PredictionIn] = []
            counts = Counter[tuple[str, int, str]]()
            for content in contents:
                prediction = PredictionIn.model_validate_json(content)
                kind = (prediction.step, prediction.world_size, card_key(prediction.card))
                counts[kind] += 1
                if counts[kind] <= _MOST_OF_STEP:
                    predictions.append(prediction)
            ranked = select(PeakRow.__table__, rank).where(PeakRow.step.in_({step for step, _, _ in counts})).subquery()
            peaks: dict[tuple[str, int], dict[tuple[str, str], list[Any]]] = {}  # by step and ranks, then by source
            for row in connection.execute(select(ranked).where(ranked.c.rank <= _MOST_PEAKS_OF_STEP)):
                sources = peaks.setdefault((row.step, row.world_size), {})
                sources.setdefault((row.source_id, row.card_key), []).append(row)
        comparisons: list[Comparison] = []
        seen: set[str] = set()  # sources that have their newest prediction
        for prediction in predictions:
            cards = card_keys(prediction)
            for (source, card), rows in peaks.get((prediction.step, prediction.world_size), {}).items():
                beside = [
                    (predicted / row.bytes, predicted, row.size, row.bytes)
                    for row in rows
                    if card in cards
                    and row.bytes
                    and (predicted := predicted_bytes(prediction, row.size)) is not None
                    and not (row.ran_out and predicted >= row.bytes)  # as predicted
                ]
                if beside:
                    _, predicted, size, measured = min(beside)
                    one: dict[str, Any] = {
                        "prediction_id": prediction.id,
                        "model": prediction.model,
                        "card": prediction.card,
                    }
                    one |= {"card_key": card, "source_id": source, "is_newest": source not in seen, "size": size}
                    comparisons.append(Comparison(**one, predicted_bytes=predicted, measured_bytes=measured))
                    seen.add(source)
        return comparisons
