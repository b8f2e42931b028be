"""kill -9 of the server amid eight writers: what it accepted is there, and once. Sampled; whole in ``make proof``."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid

import pytest
from sampling import IN_PROOF
from services import find_postgres, make_prediction, make_run_in, make_summary, new_database, run_postgres
from sqlalchemy import select

from autobatch.service.database import Database
from autobatch.service.tables import PredictionRow, RunRow, SummaryRow

KILLS = 20 if IN_PROOF else 2
WRITERS = 8

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=["sqlite", "postgresql"])
def durable_url(request, tmp_path):
    """A database that waits for the disk."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'service.db'}"
        return
    if find_postgres() is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql, or PGBIN")
    with run_postgres(durable=True) as url_of, new_database(url_of) as url:
        yield url


class Writer(threading.Thread):
    """Hands in predictions and summaries, each until it has an answer."""

    def __init__(self, port, index, ending):
        super().__init__(daemon=True)
        self.port, self.run_id, self.ending = port, f"r{index}", ending
        self.accepted, self.again, self.faults = {}, 0, []

    def run(self):
        self.hand_in("/runs", make_run_in(self.run_id))
        number = 0
        while not self.ending.is_set():
            peak = random.randrange(2**40)
            self.hand_in("/predictions", make_prediction(uuid.uuid4().hex, total_bytes=peak))
            self.hand_in(f"/runs/{self.run_id}/summaries", make_summary(number, peak_bytes=peak))
            number += 1

    def hand_in(self, path, record):
        """Try until it is answered, or the test ends."""
        body, tried = json.dumps(record), False
        while not self.ending.is_set() or not tried:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15)
            try:
                connection.request("POST", f"/api/v1{path}", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                tried = True
                time.sleep(0.02)
                continue
            finally:
                connection.close()
            if answer.status != 201:
                self.faults.append((answer.status, content))
            elif "total_bytes" in record:
                self.accepted[record["id"]] = record["total_bytes"]
            elif "number" in record:
                self.accepted[self.run_id, record["number"]] = record["peak_bytes"]
            self.again += tried and answer.status == 201 and not content["new"]
            return


def start(url, port):
    """Start a server in a process of its own."""
    words = [sys.executable, "-m", "autobatch", "serve", "--open", "--port", str(port), "--database", url]
    return subprocess.Popen([*words, "--rate", "100000"], stderr=subprocess.DEVNULL, env={**os.environ})


def test_no_accepted_record_is_lost_or_there_twice(durable_url):
    """Whatever the moment of the kill."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ending = threading.Event()
    server = start(durable_url, port)
    writers = [Writer(port, index, ending) for index in range(WRITERS)]
    for writer in writers:
        writer.start()
    for _ in range(KILLS):
        before = sum(len(writer.accepted) for writer in writers)
        deadline = time.monotonic() + 60
        while sum(len(writer.accepted) for writer in writers) < before + 2 * WRITERS:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(random.uniform(0.2, 0.7))
        server.kill()
        server.wait()
        server = start(durable_url, port)
    time.sleep(2)
    ending.set()
    for writer in writers:
        writer.join(60)
    server.terminate()
    server.wait(20)
    database = Database.open(durable_url)
    with database.read() as connection:
        there = {row.id: row.total_bytes for row in connection.execute(select(PredictionRow))}
        rows = connection.execute(select(SummaryRow)).all()
        there |= {(row.run_id, row.number): row.peak_bytes for row in rows}
        assert len(connection.execute(select(RunRow)).all()) == WRITERS
        if database.is_sqlite:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
    database.close()
    accepted = {key: value for writer in writers for key, value in writer.accepted.items()}
    assert [fault for writer in writers for fault in writer.faults] == []
    assert {key: there.get(key) for key in accepted} == accepted
    print(f"{KILLS} kills, {len(accepted)} accepted, {sum(writer.again for writer in writers)} handed in again")  # noqa: T201 - shown by pytest -s
