"""Records that travel to the service, a real PostgreSQL, and a server in a thread."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import plans

GIB = 2**30
FINGERPRINT, STEP = "0123456789abcdef0123456789abcdef", "fedcba9876543210"


def make_plan_in(name="a1", *, step=STEP, host="node1", **changes):
    """A plan as a client hands it in."""
    fields = {"id": name, "made_at": 1.7e9, "model": "Net", "fingerprint": FINGERPRINT, "step": step, "host": host}
    fields |= changes
    kept = {name: fields.pop(name) for name in ("step", "host")}
    plan = plans.make_plan(**fields)
    return {"id": name, **kept, "plan": plan.model_dump(mode="json", exclude_defaults=True)}


def make_run_in(name="r1", **changes):
    fields = {"id": name, "plan_id": "a1", "host": "node1", "user": "ada", "pid": 7, "started_at": time.time()}
    fields |= {"model": "Net", "step": STEP, "target_batch": 256, "micro_batch_size": 43, "limit_bytes": 20 * GIB}
    return fields | {"cards": [make_card()], **changes}


def make_card(**changes):
    """A reading of a card that is half free."""
    fields = {"uuid": "GPU-1", "name": "NVIDIA L4", "kind": "cuda", "total_bytes": 24 * GIB}
    return fields | {"free_bytes": 12 * GIB, "own_bytes": 10 * GIB, **changes}


def make_summary(number=0, **changes):
    """The message that a run sends every 30 seconds."""
    fields = {"number": number, "at": time.time(), "steps": 10 * (number + 1), "samples": 2560 * (number + 1)}
    fields |= {"seconds": 30.0, "micro_batch_size": 43, "peak_bytes": 17 * GIB, "held_bytes": 18 * GIB}
    return fields | {"cards": [make_card()], **changes}


def make_prediction(name="p1", **changes):
    """A prediction of 1 GiB and 0.4 GiB a sample on an L4."""
    points = [{"size": size, "reserved_bytes": GIB + size * GIB * 2 // 5} for size in (1, 2, 21, 43, 60)]
    fields = {"id": name, "made_at": 1.7e9, "model": "Net", "step": STEP, "card": "L4", "card_names": ["L4-24GB"]}
    fields |= {"total_bytes": 24 * GIB, "context_bytes": GIB // 2, "target_batch": 256, "margin": 0.1}
    return fields | {"micro_batch_size": 43, "points": points, **changes}


def post(client, path, record, status=201):
    """Hand in a record, and return the answer."""
    answer = client.post(f"/api/v1{path}", json=record)
    assert answer.status_code == status, answer.text
    return answer.json()


def get(client, path, status=200, **query):
    """Ask for something."""
    answer = client.get(f"/api/v1{path}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def find_postgres():
    """Return the folder of PostgreSQL's programs: of PGBIN, of Debian, of a wheel; ``None`` if there is none."""
    places = [os.environ.get("PGBIN", ""), *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)]
    places += [str(Path(shutil.which("initdb") or "").resolve().parent)]
    return next((Path(place) for place in places if place and (Path(place) / "initdb").exists()), None)


@contextmanager
def run_postgres(*, durable=False):
    """Run a PostgreSQL in a folder of its own, on a socket without a port; yields its URL for a database's name."""
    programs = find_postgres()
    root = Path(tempfile.mkdtemp(prefix="pg"))  # short: a socket's path has at most 107 bytes
    who = {}
    if os.geteuid() == 0:  # PostgreSQL refuses root
        nobody = pwd.getpwnam("nobody")
        os.chown(root, nobody.pw_uid, nobody.pw_gid)
        who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    run = {"cwd": root, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}, **who}
    make = [programs / "initdb", "-D", root / "d", "-U", "test", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run([*make, "--no-instructions"], check=True, capture_output=True, **run)
    serve = [programs / "postgres", "-D", root / "d", "-k", root, "-h", "", "-c", "shared_buffers=32MB"]
    server = subprocess.Popen([*serve, *([] if durable else ["-F"])], stderr=subprocess.DEVNULL, **run)
    try:
        while subprocess.run([programs / "pg_isready", "-q", "-h", root], check=False).returncode:
            assert server.poll() is None
            time.sleep(0.02)
        yield lambda name: f"postgresql+psycopg://test@/{name}?host={root}"
    finally:
        server.send_signal(signal.SIGINT)  # at once: SIGTERM waits for clients
        server.wait(60)
        shutil.rmtree(root)


@contextmanager
def new_database(url_of, name=None, template="template0"):
    """Yield the URL of a new database on a PostgreSQL."""
    import psycopg

    name = name or f"t{secrets.token_hex(4)}"
    address = url_of("postgres").replace("+psycopg", "")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield url_of(name)
    finally:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def run_in_thread(service):
    """Serve on a free port of this machine; yields the address."""
    from autobatch.service.server import make_server

    server = make_server(service)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
