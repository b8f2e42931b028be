"""Who may do what, and what is refused before any endpoint sees it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from fastapi.testclient import TestClient
from services import make_plan_in, make_run_in, run_in_thread
from sqlalchemy import text
from team_server import wait_for

from autobatch.errors import InvalidArgument
from autobatch.service.records import LARGEST_BODY
from autobatch.service.server import make_app, make_server
from autobatch.service.shield import RateLimit
from autobatch.service.state import Service, Settings

ASKED = [("GET", "/me", 1), ("GET", "/plans", 1), ("GET", "/cards", 1), ("GET", "/predictions/errors", 1)]
ASKED += [("POST", "/recall", 1), ("POST", "/gate", 1), ("POST", "/plans", 2), ("POST", "/runs", 2)]
ASKED += [("POST", "/predictions", 2), ("POST", "/runs/r/summaries", 2), ("POST", "/runs/r/end", 2)]
ASKED += [("DELETE", "/plans/a", 3), ("POST", "/alerts/test", 3), ("GET", "/openapi.json", 1)]


ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""Of tests that end before the database, or that ask it for a token only."""


def test_each_role_may_do_its_own(client_of):
    """No token: 401, a lower role: 403, a high enough one gets to the record."""
    for level, role in enumerate(("reader", "writer", "admin"), 1):
        client = client_of(role)
        assert client.get("/api/v1/me").json() == {"name": f"a {role}", "role": role}
        for method, path, needed in ASKED:
            status = client.request(method, f"/api/v1{path}").status_code
            assert (status == 403) == (level < needed), (method, path, status)
    nobody = client_of()
    for method, path, _ in ASKED:
        answer = nobody.request(method, f"/api/v1{path}")
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_token_is_shown_once_and_revocable(service, database, client_of):
    """Only the hash is in the database; a revoked one is refused at once; a name has one valid token."""
    token = service.tokens.create("ci", "writer")
    assert token.startswith("abt_")
    with database.read() as connection:
        (row,) = connection.execute(text("SELECT * FROM tokens")).all()
    assert token[4:] not in str(row)
    client = client_of()
    asked = {"Authorization": f"Bearer {token}"}
    assert client.get("/api/v1/me", headers=asked).status_code == 200
    with pytest.raises(InvalidArgument, match="'ci'"):
        service.tokens.create("ci", "reader")
    service.tokens.revoke("ci")
    assert client.get("/api/v1/me", headers=asked).status_code == 401
    with pytest.raises(InvalidArgument, match="'ci'"):
        service.tokens.revoke("ci")
    service.tokens.create("ci", "reader")


@ON_SQLITE
@pytest.mark.parametrize("given", ["abt_wrong", "wrong", "abt_" + "x" * 5000, "abt_\u00e9"])
def test_wrong_tokens_are_refused_and_counted(service, client_of, given):
    """After thirty of them at once an address has to wait."""
    service.failures = RateLimit(1e-9, 30)
    client = client_of()
    headers = {b"authorization": b"Bearer " + given.encode()}
    answers = [client.get("/api/v1/me", headers=headers).status_code for _ in range(40)]
    assert answers[:30] == [401] * 30
    assert answers[-1] == 429


@ON_SQLITE
def test_an_open_server_asks_for_no_token(database):
    """But checks one that is given."""
    service = Service(Settings(is_open=True, hosts=("testserver",)), database)
    client = TestClient(make_app(service))
    assert client.post("/api/v1/runs", json=make_run_in()).status_code == 201
    assert client.get("/api/v1/me", headers={"Authorization": "Bearer abt_wrong"}).status_code == 401


@ON_SQLITE
def test_other_hosts_and_sites_are_refused(client):
    """A name that an attacker points at this machine, and a page of another site that posts here."""
    for host in ("evil.example", "evil.example:8765", "", "127.0.0.1.evil.example"):
        assert client.get("/api/v1/me", headers={"Host": host}).status_code == 421
    for host in ("127.0.0.1:8765", "localhost", "[::1]:8765", "TestServer"):
        assert client.get("/api/v1/me", headers={"Host": host}).status_code == 200
    for origin in ("http://evil.example", "null", "http://testserver:1"):
        answer = client.post("/api/v1/runs", json=make_run_in(), headers={"Origin": origin})
        assert answer.status_code == 403, origin
    assert client.post("/api/v1/runs", json=make_run_in(), headers={"Origin": "http://testserver"}).status_code == 201


@ON_SQLITE
def test_large_bodies_are_refused(client):
    """By their announced length, and by what comes if there is none."""

    def parts():
        for _ in range(LARGEST_BODY // 65536 + 2):
            yield b" " * 65536

    for content in (b" " * (LARGEST_BODY + 1), parts()):
        answer = client.post("/api/v1/plans", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "application/problem+json"


@ON_SQLITE
def test_a_stranger_s_body_is_not_read(client_of):
    """Without a token the first bytes are too many, and a login takes no more than a token."""
    stranger = client_of()
    for path in ("/api/v1/plans", "/api/v1/runs/r/summaries"):
        body = b"[" * 100_000
        assert stranger.post(path, content=body, headers={"Content-Type": "application/json"}).status_code == 401
    app, messages, answers = stranger.app, [], []

    async def receive():
        messages.append(1)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/v1/plans", "query_string": b"", "client": ("1.2.3.4", 5)}
    scope |= {"headers": [(b"host", b"testserver")], "http_version": "1.1", "scheme": "http", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    assert (answers[0]["status"], messages) == (401, [])
    assert stranger.post("/login", content=b"a=&" * 2000).status_code == 413


@ON_SQLITE
def test_silent_connections_are_ended(service, monkeypatch):
    """Without a byte, within the headers, after a request and within the body; a stream stays open."""
    monkeypatch.setattr("autobatch.service.server._REQUEST_WITHIN_S", 0.3)
    monkeypatch.setattr("autobatch.service.shield._BODY_WITHIN_S", 0.3)
    token = service.tokens.create("ci", "admin")
    server = make_server(service)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    head = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    body = f"POST /api/v1/plans {head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n["
    try:
        wait_for(lambda: server.started)
        stream = socket.create_connection(listener.getsockname())
        stream.sendall(f"GET /api/v1/events {head}\r\n".encode())
        for sent in ("", "GET", f"GET /healthz {head}\r\nGET", body):
            with socket.create_connection(listener.getsockname()) as silent:
                silent.settimeout(5)
                silent.sendall(sent.encode())
                answer = b"".join(iter(lambda: silent.recv(65536), b""))
                assert (b"408" in answer) == (sent == body), sent
        assert sum(service.streams.values()) == 1
        stream.close()
    finally:
        server.should_exit = True
        thread.join()


@ON_SQLITE
def test_a_flood_of_silent_connections_keeps_nobody_out(service, monkeypatch):
    """One too many ends the one that has been silent the longest; whoever asks is answered, and a stream stays open."""
    monkeypatch.setattr("autobatch.service.server._MOST_SILENT", 20)
    head = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.tokens.create('ci', 'admin')}\r\n\r\n"
    with run_in_thread(service) as url, ExitStack() as open_ones:

        def connect(sent=""):
            one = open_ones.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            one.settimeout(5)
            one.sendall(sent.encode())
            return one

        stream = connect(f"GET /api/v1/events {head}")
        assert b"200 OK" in stream.recv(65536)
        flood = [connect("GET" if index % 2 else "") for index in range(100)]
        assert b"200 OK" in connect(f"GET /healthz {head}").recv(65536)
        with suppress(ConnectionResetError):
            assert flood[0].recv(1) == b""
        flood[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            flood[-1].recv(1)
        assert sum(service.streams.values()) == 1


@ON_SQLITE
def test_streams_of_one_token_are_counted(service, client):
    """Twenty, so that one reader cannot take those of all."""
    [token] = service.tokens.list()
    service.streams[token.hash] = 20
    assert client.get("/api/v1/events").status_code == 503
    service.streams.clear()


@ON_SQLITE
def test_too_many_requests(database):
    """Some at once, then 429 with a time to wait."""
    service = Service(Settings(is_open=True, hosts=("testserver",)), database)
    service.limit = RateLimit(1e-9, 15)
    client = TestClient(make_app(service))
    answers = [client.get("/api/v1/me") for _ in range(30)]
    assert [answer.status_code for answer in answers[:15]] == [200] * 15
    assert answers[-1].status_code == 429
    assert answers[-1].headers["retry-after"] == "1"


@pytest.mark.quick
def test_addresses_do_not_fill_the_memory():
    """The oldest are dropped."""
    limit = RateLimit(1, 1)
    for index in range(20_000):
        limit.take(str(index))
    assert len(limit._left) == 10_000


@ON_SQLITE
def test_answers_cannot_be_framed_or_cached(client):
    """The headers of every answer, errors too."""
    for path in ("/healthz", "/api/v1/me", "/nothing"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"


BAD_TEXTS = ["\x00", "a\nb", "\u202e", "x" * 201]
BAD_NUMBERS = [True, 1.5, "1", -1, 2**53, 2**63, 10**400, None]


def test_each_field_has_bounds(client):
    """What SQLite, PostgreSQL or JavaScript would not hold is refused in one line."""
    bad = [make_run_in(host=text) for text in BAD_TEXTS]
    bad += [make_run_in(pid=number) for number in BAD_NUMBERS]
    bad += [make_run_in(started_at=moment) for moment in (-1, 1e300, "now", True)]
    bad += [make_run_in(id=name) for name in ("", "a b", "../x", "x" * 65, 5)]
    bad += [make_run_in(unknown=1), make_run_in(cards=[{}]), make_run_in(cards=[make_run_in()] * 100), [], "x", None]
    for record in bad:
        answer = client.post("/api/v1/runs", json=record)
        assert answer.status_code in {400, 422}, record
        assert answer.headers["content-type"] == "application/problem+json"
        assert "\n" not in answer.json()["detail"]
        assert len(answer.json()["detail"]) <= 300
    for content in (b"", b"{", b"[" * 100_000, b'{"host": "\xff"}', b'{"host": "\\ud800"}', b'{"pid": 1e999}'):
        answer = client.post("/api/v1/runs", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in {400, 422}, content[:20]
    for query in ("after=1_", "after=x_a", "after=1e99_a", "limit=0", "limit=501", "model=%00", "host=%0a"):
        assert client.get(f"/api/v1/plans?{query}").status_code == 422
    assert client.get("/api/v1/runs").json()["runs"] == []


def test_a_hostile_plan_is_shown_and_breaks_nothing(client):
    """Its texts are escaped or cut; its numbers fit the columns."""
    plan = make_plan_in("evil", model="<script>\x00\u202e" + "m" * 5000, fingerprint="f" * 5000, version="v" * 300)
    largest = 2**63 - 1
    plan["plan"] |= {"budget_bytes": largest, "peak_bytes": largest, "headroom_bytes": 0, "made_at": 1e-300}
    plan["plan"]["verdict"] = {"exact": False, "relative_error": "Infinity"}
    assert client.post("/api/v1/plans", json=plan).status_code == 201
    page = client.get("/api/v1/plans", params={"limit": 1}).json()
    (line,) = page["plans"]
    assert line["model"].startswith("<script>\\x00")
    assert len(line["model"]) == 200
    assert client.get("/api/v1/plans", params={"limit": 1, "after": page["next"]}).json()["plans"] == []
    assert client.get("/api/v1/plans/evil").status_code == 200
