"""Creates the tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _text(length: int, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String(length), nullable=False) for name in names]


def _number(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=False) for name in names]


def _moment(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def _content() -> list[sa.Column[Any]]:
    return [sa.Column("content", sa.Text(), nullable=False)]


def upgrade() -> None:
    op.create_table(
        "alerts",
        *_text(64, "run_id"),
        *_text(200, "kind"),
        *_moment("made_at", "sent_at"),
        *_text(1000, "text"),
        sa.PrimaryKeyConstraint("run_id", "kind", name="pk_alerts"),
    )
    op.create_index("alerts_by_age", "alerts", ["made_at"])
    op.create_table(
        "names",
        *_text(200, "kind", "name"),
        sa.PrimaryKeyConstraint("kind", "name", name="pk_names"),
    )
    op.create_table(
        "peaks",
        *_text(64, "source_id"),
        *_number("size"),
        *_text(64, "step"),
        *_text(200, "card_key"),
        *_number("world_size", "total_bytes", "bytes", "ran_out"),
        sa.PrimaryKeyConstraint("source_id", "size", name="pk_peaks"),
    )
    op.create_index("peaks_by_step", "peaks", ["step", "card_key", "size"])
    op.create_table(
        "plans",
        *_text(64, "id"),
        *_moment("made_at"),
        *_text(200, "model", "device", "host", "version"),
        *_text(64, "fingerprint", "step"),
        *_number(
            "rank", "world_size", "target_batch", "micro_batch_size", "accumulation_steps", "peak_bytes", "limit_bytes"
        ),
        *_moment("added_at"),
        *_content(),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
    )
    op.create_index("plans_by_age", "plans", ["made_at", "id"])
    op.create_index("plans_by_device", "plans", ["device", "made_at", "id"])
    op.create_index("plans_by_fingerprint", "plans", ["fingerprint", "rank", "host", "added_at"])
    op.create_index("plans_by_host", "plans", ["host", "made_at", "id"])
    op.create_index("plans_by_model", "plans", ["model", "made_at", "id"])
    op.create_table(
        "predictions",
        *_text(64, "id"),
        *_moment("made_at"),
        *_text(200, "model", "card", "host"),
        *_text(64, "step"),
        *_number("target_batch", "micro_batch_size", "total_bytes"),
        *_moment("added_at"),
        *_content(),
        sa.PrimaryKeyConstraint("id", name="pk_predictions"),
    )
    op.create_index("predictions_by_arrival", "predictions", ["added_at", "id"])
    op.create_index("predictions_by_age", "predictions", ["made_at", "id"])
    op.create_index("predictions_by_model", "predictions", ["model", "made_at", "id"])
    op.create_table(
        "readings",
        *_text(64, "run_id"),
        *_text(200, "card", "host", "name", "kind"),
        *_moment("at"),
        *_number("total_bytes", "free_bytes", "own_bytes"),
        sa.PrimaryKeyConstraint("run_id", "card", name="pk_readings"),
    )
    op.create_index("readings_by_age", "readings", ["at"])
    op.create_table(
        "runs",
        *_text(64, "id"),
        *_moment("started_at"),
        *_text(64, "plan_id"),
        *_text(200, "model", "device", "card_key", "host", "user", "version", "owner"),
        *_text(64, "step"),
        *_moment("added_at"),
        *_number("pid", "world_size", "target_batch", "first_size", "limit_bytes"),
        *_moment("seen_at", "small_since"),
        *_number("summaries", "steps", "samples"),
        *_moment("seconds"),
        *_number("retries", "size_changes", "micro_batch_size", "last_bytes", "peak_bytes"),
        *_text(200, "outcome"),
        *_moment("ended_at"),
        *_text(500, "reason"),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("runs_by_age", "runs", ["started_at", "id"])
    op.create_index("runs_by_host", "runs", ["host", "started_at", "id"])
    op.create_index("runs_by_model", "runs", ["model", "started_at", "id"])
    op.create_index("runs_by_outcome", "runs", ["outcome", "started_at", "id"])
    op.create_index("runs_by_plan", "runs", ["plan_id", "started_at", "id"])
    op.create_table(
        "summaries",
        *_text(64, "run_id"),
        *_number("number"),
        *_moment("at"),
        *_number("steps", "retries", "micro_batch_size", "peak_bytes", "held_bytes"),
        *_content(),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_summaries"),
    )
    op.create_table(
        "tokens",
        *_text(64, "hash"),
        *_text(200, "name", "role"),
        *_moment("made_at", "used_at", "revoked_at"),
        sa.PrimaryKeyConstraint("hash", name="pk_tokens"),
    )


def downgrade() -> None:
    for table in ("alerts", "names", "peaks", "plans", "predictions", "readings", "runs", "summaries", "tokens"):
        op.drop_table(table)
