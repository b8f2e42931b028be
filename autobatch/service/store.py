"""Stores and finds all that the team hands in."""

from __future__ import annotations

from autobatch.service.plan_rows import PlanRows
from autobatch.service.run_rows import RunRows


class Store(PlanRows, RunRows):
    """The team's plans, runs and predictions in one database."""
