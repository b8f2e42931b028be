"""Alerts: four kinds, each once for a run, sent until the webhook has taken it."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from services import GIB, make_run_in, make_summary

from autobatch.service.alerts import Alerts
from autobatch.service.database import Database
from autobatch.service.records import RunEnd, RunIn, RunSummary
from autobatch.service.store import Store


class Webhook(BaseHTTPRequestHandler):
    """Takes messages, and refuses as many as it is asked to."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refuses = self.server.refusals > 0 or "Poison" in body["text"]
        self.server.refusals -= self.server.refusals > 0
        self.server.asked += 1
        if not refuses:
            self.server.messages.append(body)
        self.send_response(self.server.refusal if refuses else 200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def webhook():
    """A server that takes the alerts."""
    server = HTTPServer(("127.0.0.1", 0), Webhook)
    server.messages, server.asked, server.refusals, server.refusal = [], 0, 0, 500
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def alerts(service, webhook):
    """What checks the runs."""
    return Alerts(service.store, f"http://127.0.0.1:{webhook.server_address[1]}")


@pytest.fixture
def database_pair(database):
    """The database as two servers have opened it."""
    other = Database.open(database._engine.url.render_as_string(hide_password=False), migrate=False)
    yield database, other
    other.close()


@pytest.fixture
def hour(monkeypatch):
    """A clock that can be set."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def begin(service, name="r1", **changes):
    """Begin a run."""
    service.store.add_run(RunIn.model_validate(make_run_in(name, **changes)))


def summarise(service, number, name="r1", **changes):
    """Hand in a summary."""
    service.store.add_summary(name, RunSummary.model_validate(make_summary(number, **changes)))


def kinds(webhook):
    """What was sent."""
    return [message["kind"] for message in webhook.messages]


def test_a_run_near_its_limit_is_reported_once(service, alerts, webhook):
    """Within 3 %, and not again with the next peak; another run has its own."""
    begin(service)
    summarise(service, 0, held_bytes=19 * GIB)
    alerts.check()
    assert webhook.messages == []
    for number in (1, 2):
        summarise(service, number, held_bytes=round(19.5 * GIB))
        alerts.check()
    begin(service, "r2", host="node2")
    summarise(service, 0, "r2", held_bytes=20 * GIB)
    alerts.check()
    assert kinds(webhook) == ["near limit", "near limit"]
    assert "19.5 GiB of a limit of 20.0 GiB" in webhook.messages[0]["text"]
    assert [message["run"] for message in webhook.messages] == ["r1", "r2"]


def test_a_run_that_stays_small(service, alerts, webhook, hour):
    """Ten minutes in a row; one that grows back in between begins again."""
    begin(service)
    start = hour[0]
    for minutes, size in ((0, 21), (8, 43), (9, 21), (18, 10)):
        hour[0] = start + 60 * minutes
        summarise(service, minutes, micro_batch_size=size, at=hour[0])
        alerts.check()
    assert webhook.messages == []
    hour[0] = start + 60 * 19.1
    alerts.check()
    assert kinds(webhook) == ["small"]
    assert "10 samples in a micro-batch instead of 43" in webhook.messages[0]["text"]


def test_many_retries(service, alerts, webhook, hour):
    """Five within ten minutes that are more than one step in twenty."""
    for name, steps in (("often", 50), ("rarely", 5000)):
        begin(service, name)
        for number in range(3):
            summarise(service, number, name, steps=steps * number, retries=2 * number)
    alerts.check()
    hour[0] += 60
    for name, steps in (("often", 50), ("rarely", 5000)):
        summarise(service, 3, name, steps=steps * 4, retries=10)
    alerts.check()
    assert [(message["kind"], message["run"]) for message in webhook.messages] == [("retries", "often")]


def test_a_run_that_fell_silent(service, alerts, webhook, hour):
    """Five minutes without a summary, unless it has ended or nobody saw it for an hour."""
    for name in ("silent", "ended", "old"):
        begin(service, name, **({"started_at": hour[0] - 7200, "cards": []} if name == "old" else {}))
    service.store.end_run("ended", RunEnd(at=hour[0], outcome="finished"))
    alerts.check()
    hour[0] += 301
    alerts.check()
    assert [(message["kind"], message["run"]) for message in webhook.messages] == [("silent", "silent")]


@pytest.mark.parametrize("refusal", [500, 429])
def test_an_alert_is_sent_until_it_is_taken(service, alerts, webhook, hour, refusal):
    """A webhook that is in trouble costs no alert; a taken one is not sent a second time."""
    begin(service)
    summarise(service, 0, held_bytes=20 * GIB)
    webhook.refusals, webhook.refusal = 2, refusal
    for _ in range(8):
        alerts.check()
        hour[0] += 10
    assert (kinds(webhook), webhook.asked) == (["near limit"], 3)
    assert service.store.alerts()[0].sent_at > 0


def test_a_webhook_in_trouble_is_asked_less_and_less(service, alerts, webhook, hour):
    """The waits grow, and a day later it is left alone."""
    begin(service)
    summarise(service, 0, held_bytes=20 * GIB)
    webhook.refusals = 10**6
    alerts.check()
    service.store.end_run("r1", RunEnd(at=hour[0], outcome="finished"))
    asked = []
    for _ in range(2 * 24 * 6):
        alerts.check()
        hour[0] += 600
        asked.append(webhook.asked)
    assert 5 < asked[24 * 6] < 20
    assert asked[-1] == asked[24 * 6]
    assert service.store.alerts()[0].failure == "the webhook answered 500"


@pytest.mark.parametrize("refusal", [400, 404])
def test_a_refusal_is_final_and_logged_once(  # noqa: PLR0917 - fixtures
    service, alerts, webhook, hour, caplog, refusal
):
    """The same text would be refused the same way again; the page says why it was not sent."""
    begin(service)
    summarise(service, 0, held_bytes=20 * GIB)
    webhook.refusals, webhook.refusal = 10**6, refusal
    for _ in range(4):
        alerts.check()
        hour[0] += 70
    assert webhook.asked == 1
    assert len([line for line in caplog.messages if str(refusal) in line]) == 1
    [alert] = service.store.alerts()
    assert (alert.sent_at, str(refusal) in alert.failure) == (0, True)


def test_a_text_that_the_webhook_refuses_stops_no_other(service, alerts, webhook):
    """Those behind it are sent."""
    for name, model in (("r1", "Net"), ("r2", "Poison"), ("r3", "Net")):
        begin(service, name, model=model)
        summarise(service, 0, name, held_bytes=20 * GIB)
    alerts.check()
    assert sorted(message["run"] for message in webhook.messages) == ["r1", "r3"]


def test_no_error_ends_the_watch(service, monkeypatch, caplog):
    """It costs a line, and the next look goes on."""
    monkeypatch.setattr("autobatch.service.alerts._LOOK_EVERY_S", 0.01)
    looks = []
    monkeypatch.setattr(service.store, "live_runs", lambda since: looks.append(1) or 1 / 0)
    service.alerts.start()
    deadline = time.monotonic() + 60
    while len(looks) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    service.alerts.stop()
    assert len(looks) >= 3
    assert "ZeroDivisionError" in caplog.messages[0]


def test_the_test_button(service, alerts, webhook):
    """One message; what fails is said in one line."""
    assert alerts.test() == ""
    assert kinds(webhook) == ["test"]
    webhook.refusals = 1
    assert alerts.test() == "the webhook answered 500"
    assert "cannot be reached" in Alerts(service.store, "http://127.0.0.1:1").test()
    assert "has no webhook" in Alerts(service.store, None).test()


def test_two_servers_send_an_alert_once(service, database_pair, webhook):
    """Whoever claims it in the database sends it."""
    url = f"http://127.0.0.1:{webhook.server_address[1]}"
    for index in range(8):
        begin(service, f"r{index}")
        summarise(service, 0, f"r{index}", held_bytes=20 * GIB)
    servers = [Alerts(Store(database), url) for database in database_pair]
    threads = [threading.Thread(target=one.check) for one in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(message["run"] for message in webhook.messages) == [f"r{index}" for index in range(8)]


def test_another_server_sends_what_a_dead_one_has_claimed(service, alerts, webhook, hour):
    """A minute later."""
    begin(service)
    summarise(service, 0, held_bytes=20 * GIB)
    service.store.add_alert("r1", "near limit", "the text")
    assert [alert.kind for alert in service.store.claim_alerts(0)] == ["near limit"]
    alerts.check()
    assert webhook.messages == []
    hour[0] += 61
    alerts.check()
    alerts.check()
    assert [message["text"] for message in webhook.messages] == ["the text"]
