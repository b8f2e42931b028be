"""``autobatch serve`` and its commands, as a person types them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from services import make_run_in

from autobatch.cli.main import main
from autobatch.service.database import Database
from autobatch.service.records import RunIn
from autobatch.service.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "team.py"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's folder."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("AUTOBATCH_DATABASE", raising=False)
    return tmp_path / "home"


def run(capsys, *words):
    """Run a command and return its exit code and what it printed."""
    code = main([*words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_tokens_by_command(home, capsys):
    """Made, listed without their text, revoked; a name twice is refused in one line."""
    code, printed = run(capsys, "serve", "token", "create", "--name", "ci", "--role", "writer")
    token = printed.splitlines()[0]
    assert (code, token[:4], len(token)) == (0, "abt_", 47)
    assert home.joinpath("service.db").stat().st_size
    assert home.stat().st_mode & 0o77 == 0
    assert run(capsys, "serve", "token", "create", "--name", "ci")[0] == 2
    code, printed = run(capsys, "serve", "token", "list")
    assert "ci" in printed
    assert token[4:] not in printed
    assert run(capsys, "serve", "token", "revoke", "--name", "ci")[0] == 0
    (listed,) = json.loads(run(capsys, "serve", "token", "list", "--json")[1])
    assert listed["revoked_at"] > 0
    assert run(capsys, "serve", "token", "revoke", "--name", "ci")[0] == 2
    assert run(capsys, "serve", "token", "create", "--name", "a\nb")[0] == 2


def test_backup_and_restore_by_command(home, capsys, tmp_path):
    """A file that is there is not overwritten; a database with rows is not restored into."""
    run(capsys, "serve", "token", "create", "--name", "ci")
    file = str(tmp_path / "copy.db")
    assert run(capsys, "serve", "backup", file) == (0, f"1 row written to {file}\n")
    assert run(capsys, "serve", "backup", file)[0] == 2
    empty = f"sqlite:///{tmp_path / 'new.db'}"
    assert run(capsys, "serve", "restore", file, "--database", empty) == (0, "1 row restored\n")
    assert run(capsys, "serve", "restore", file, "--database", empty)[0] == 1
    assert run(capsys, "serve", "restore", str(tmp_path / "none"))[0] == 2


def test_a_backup_is_whole_or_none(home, capsys, tmp_path):
    """Of a database that is there, by a draft; a restore into rows changes nothing; nobody else reads either file."""
    code, printed = run(capsys, "serve", "backup", str(tmp_path / "b.db"), "--database", f"sqlite:///{tmp_path}/no.db")
    assert (code, len(printed.splitlines()), [path.name for path in tmp_path.iterdir()]) == (1, 1, [])
    for name in ("one", "two"):
        run(capsys, "serve", "token", "create", "--name", name, "--database", f"sqlite:///{tmp_path}/{name}.db")
    first, second = (f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two"))
    assert run(capsys, "serve", "backup", str(tmp_path / "b.db"), "--database", first)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.db", "one.db", "two.db"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    code, printed = run(capsys, "serve", "restore", str(tmp_path / "b.db"), "--database", second)
    assert (code, "has rows" in printed) == (1, True)
    assert "one" not in run(capsys, "serve", "token", "list", "--database", second)[1]


def test_old_records_are_pruned_by_command(home, capsys):
    """While another process has the database open; an age that would reach live runs is refused."""
    run(capsys, "serve", "token", "list")
    database = Database.open(f"sqlite:///{home / 'service.db'}")
    old = time.time() - 100 * 86400
    Store(database).add_run(RunIn.model_validate(make_run_in(started_at=old, cards=[])))
    for older in ("0d", "0.5d", "90 days", "-90d", ""):
        assert run(capsys, "serve", "prune", "--older", older)[0] == 2
    assert run(capsys, "serve", "prune", "--older", "101d") == (0, "0 runs, 0 plans, 0 predictions deleted\n")
    assert run(capsys, "serve", "prune", "--older", "90") == (0, "1 run, 0 plans, 0 predictions deleted\n")
    assert run(capsys, "serve", "prune", "--older", "90d") == (0, "0 runs, 0 plans, 0 predictions deleted\n")
    database.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@h:abc/db",
        "postgresql://u:s3cret@127.0.0.1:1/db",
        "postgresql://u:s3cret@127.0.0.1:1/db?nosuch=s3cret",
        "sqlite:///:memory:",
        "sqlite:///x.db?nosuch=s3cret",
        "sqlite:///x.db?timeout=s3cret",
    ],
)
def test_a_database_that_cannot_be_used_costs_one_line(home, capsys, url, tmp_path, monkeypatch):
    """Without the password, with the cause."""
    monkeypatch.chdir(tmp_path)
    code, printed = run(capsys, "serve", "token", "list", "--database", url)
    assert code in {1, 2}
    assert len(printed.splitlines()) == 1
    assert "s3cret" not in printed
    if url.endswith(":1/db"):
        assert "port 1 failed" in printed


def test_a_home_that_is_a_file_costs_one_line(tmp_path, monkeypatch, capsys):
    """And no traceback."""
    monkeypatch.delenv("AUTOBATCH_DATABASE", raising=False)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    code, printed = run(capsys, "serve", "token", "list")
    assert (code, len(printed.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    "words",
    [
        ("--open", "--host", "0.0.0.0"),
        ("--webhook", "file:///etc/passwd"),
        ("--port", "0", "--database", "mysql://x"),
        ("--database", "sqlite:///x", "token", "list"),
    ],
)
def test_what_makes_no_sense_is_refused(home, capsys, words):
    """In one line, with exit code 2."""
    code, printed = run(capsys, "serve", *words)
    assert code == 2
    assert len(printed.splitlines()) == 1


def test_without_the_extra_one_line_says_what_to_install(home, capsys, monkeypatch):
    """Whatever command needs it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else find(name))
    for words in (("serve",), ("serve", "token", "list"), ("serve", "backup", "x")):
        code, printed = run(capsys, *words)
        assert code == 1
        assert printed == "autobatch: the service needs sqlalchemy and more: pip install 'torch-autobatch[serve]'\n"


def test_a_taken_port_is_named(home, capsys):
    """And nothing is left behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, printed = run(capsys, "serve", "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "cannot listen on 127.0.0.1 port" in printed


def test_the_example_names_a_taken_port_too():
    """In one line, with what to type."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = subprocess.run(
            [sys.executable, EXAMPLE, str(port)], check=False, capture_output=True, text=True, timeout=200
        )
    assert ran.returncode == 1
    [line] = ran.stderr.splitlines()
    assert line.endswith(f"take another with make serve PORT={port + 1}")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_at_once(home, end):
    """With a stream open, half a body on its way and a webhook that does not answer; no traceback, and no torch."""
    webhook = socket.create_server(("127.0.0.1", 0))
    words = [sys.executable, "-X", "importtime", "-m", "autobatch", "serve", "--open", "--port", "0"]
    words += ["--webhook", f"http://127.0.0.1:{webhook.getsockname()[1]}/"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    printed = []
    while not (address := re.search(r"http://\S+", "".join(printed[-1:]))):
        printed.append(server.stderr.readline())
        assert printed[-1], printed[-20:]
    imported = {line.rpartition("|")[2].strip() for line in printed}
    assert "torch" not in imported
    deadline = time.monotonic() + 100
    while True:
        try:
            stream = urllib.request.urlopen(f"{address[0]}/api/v1/events")
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert stream.readline() == b"event: runs\n"
    place = ("127.0.0.1", int(address[0].rpartition(":")[2]))
    waiting = [socket.create_connection(place) for _ in range(2)]
    waiting[0].sendall(b"POST /api/v1/alerts/test HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
    waiting[1].sendall(b"POST /api/v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf")
    waiting.append(webhook.accept()[0])
    began = time.monotonic()
    server.send_signal(end)
    _, errors = server.communicate(timeout=100)
    assert time.monotonic() - began < 4.5  # 0.2 s where nothing else runs; the webhook may take 5 s to answer
    lines = [line for line in errors.splitlines() if line.strip() and "import time" not in line]
    assert [line for line in lines if "anyone on this machine" not in line] == []
    for connection in (stream, webhook, *waiting):
        connection.close()
