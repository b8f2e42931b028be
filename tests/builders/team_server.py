"""A small team's server in a thread: it reads the service's records, stores each once, and can be in trouble."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import ValidationError

from autobatch.service.records import PlanIn, PredictionIn, RecallQuestion, RunEnd, RunIn, RunSummary

TOKEN = "abt_" + "a" * 40


class TeamServer:
    """Its records by id, and the requests in order."""

    def __init__(self) -> None:
        self.plans: dict[str, PlanIn] = {}
        self.runs: dict[str, RunIn] = {}
        self.summaries: dict[tuple[str, int], RunSummary] = {}
        self.ends: dict[str, RunEnd] = {}
        self.predictions: dict[str, PredictionIn] = {}
        self.asked: list[str] = []
        self.bodies: list[bytes] = []
        self.trouble: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.answers: dict[str, Any] = {}  # in place of its own, by path
        self.url = ""

    def take(self, path: str, body: bytes) -> tuple[int, Any]:
        kind, *rest = path.removeprefix("/api/v1/").split("/")
        if path.removeprefix("/api/v1") in self.answers:
            return 200, self.answers[path.removeprefix("/api/v1")]
        if kind == "recall":
            question = RecallQuestion.model_validate_json(body)
            plans = [one.plan for one in self.plans.values() if one.plan.fingerprint == question.fingerprint]
            return 200, {"plans": [plan.model_dump(mode="json") for plan in plans]}
        if kind == "runs" and rest:
            if rest[0] not in self.runs:
                return 404, {"detail": "no such run"}
            if rest[1] == "end":
                return self._store(self.ends, rest[0], RunEnd.model_validate_json(body))
            summary = RunSummary.model_validate_json(body)
            return self._store(self.summaries, (rest[0], summary.number), summary)
        model = {"plans": PlanIn, "runs": RunIn, "predictions": PredictionIn}[kind]
        record = model.model_validate_json(body)
        return self._store(getattr(self, kind), record.id, record)

    def _store(self, records: dict[Any, Any], key: Any, record: Any) -> tuple[int, Any]:
        new = key not in records
        records.setdefault(key, record)
        return 201, {"id": "x", "new": new}


@contextmanager
def serving_team(port: int = 0) -> Iterator[TeamServer]:
    team = TeamServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            team.asked.append(self.path.removeprefix("/api/v1"))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            team.bodies.append(body)
            try:
                if team.trouble is not None:
                    team.trouble(self)
                    return
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    status, answer = 401, {"detail": "no such token"}
                else:
                    status, answer = team.take(self.path, body)
            except ValidationError as error:
                status, answer = 422, {"detail": str(error).splitlines()[0]}
            self.reply(status, json.dumps(answer).encode())

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if status < 400 else "application/problem+json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    team.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield team
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for(condition: Callable[[], Any], seconds: float = 100.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return found
