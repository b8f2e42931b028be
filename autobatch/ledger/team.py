"""The ledger of a user whose team has a server: local files first, and the server behind the same verbs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.courier import Courier
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.server import Server, ServerAway
from autobatch.ledger.store import Written, warn_once
from autobatch.ledger.wire import describe_forecast
from autobatch.plan import Plan
from autobatch.records import DeviceInfo
from autobatch.service.records import RecallQuestion


def open_team_ledger(home: Path, device: DeviceInfo | None) -> Ledger:
    """Return the ledger with the server that the environment names; an address that cannot be one costs a log line."""
    try:
        server = Server.named()
    except InvalidArgument as error:
        warn_once("server", f"{error}: it is not used")
        server = None
    return Ledger(home) if server is None else TeamLedger(home, Courier.of(home, server), device)


class TeamLedger(Ledger):
    """Hands in what rank 0 stores, and asks the server for plans."""

    def __init__(self, home: Path, courier: Courier, device: DeviceInfo | None = None) -> None:
        super().__init__(home)
        self._courier, self._device = courier, device
        self._plan: Plan | None = None  # of the run
        self._run_id = ""

    def remember(self, plan: Plan, forecast: Iterable[tuple[int, int]] = ()) -> bool:
        if plan.rank:
            return super().remember(plan)
        self._use(lambda _: self._note(plan, [*forecast]), otherwise=None)  # first: a kill after it loses nothing
        is_stored = super().remember(plan)
        self._courier.wake()
        return is_stored

    def recall_from_team(self, fingerprint: str) -> list[Plan]:
        if time.monotonic() < self._courier.away_until:
            return []
        try:
            question = RecallQuestion(fingerprint=fingerprint).model_dump_json().encode()
            answer = self._courier.server.ask_in_time("POST", "/recall", question)
            return _read_plans(answer, fingerprint)
        except Exception as error:  # noqa: BLE001 - no failure here is worth a search
            self._courier.note_failure(error)
            return []

    def begin_run(self, plan: Plan) -> bool:
        self._plan = plan
        self._use(lambda _: self._courier.note_plan(plan), otherwise=None)
        return super().begin_run(plan)

    def update_run(self, new: Run) -> Written:
        plan = self._plan
        has_begun = new.id == self._run_id
        if plan is not None and not has_begun:
            self._use(lambda _: self._courier.note_run(plan, new, self._device or plan.device), otherwise=None)
            self._run_id = new.id
        written = super().update_run(new)
        if not has_begun or new.outcome != "running":
            self._courier.wake()
        return written

    def _note(self, plan: Plan, forecast: list[tuple[int, int]]) -> None:
        self._courier.note_plan(plan)
        if forecast:
            self._courier.note_prediction(describe_forecast(plan, forecast))


def _read_plans(answer: object, fingerprint: str) -> list[Plan]:
    """Return the plans in an answer; those that this version does not read, or did not ask for, are left out."""
    found = answer.get("plans") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise ServerAway("it answered something else than plans")
    plans = []
    for one in found[:10]:
        with suppress(ValidationError):
            plans.append(Plan.model_validate_json(json.dumps(one)))
    return [plan for plan in plans if plan.fingerprint == fingerprint]
