"""Tables, migrations, groups of writes, backups, and a database that cannot be used."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from fastapi.testclient import TestClient
from services import make_plan_in, make_run_in, make_summary, new_database
from sqlalchemy import func, insert, select, text

from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.service import database as database_module
from autobatch.service.database import Busy, Database
from autobatch.service.server import make_app
from autobatch.service.state import Service, Settings
from autobatch.service.tables import Base, NameRow


def make_client(database):
    """An open server's client."""
    service = Service(Settings(is_open=True, hosts=("testserver",)), database)
    return TestClient(make_app(service), raise_server_exceptions=False)


def add_name(name):
    """Return an action that writes one row."""
    return lambda connection: connection.execute(insert(NameRow).values(kind="k", name=name, folded=name)).rowcount


def count(database):
    """Return the number of these rows."""
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(NameRow)).scalar()


def test_tables_are_made_and_migrated(database_url, tmp_path, monkeypatch):
    """A new database has the tables of the module; an older one gets what is new, a second start nothing."""
    Database.open(database_url).close()
    folder = tmp_path / "migrations"
    shutil.copytree(database_module._MIGRATIONS, folder)
    change = "op.add_column('names', sa.Column('added', sa.String(9), nullable=True))"
    text = "import sqlalchemy as sa\nfrom alembic import op\nrevision, down_revision = '0002', '0001'\n"
    (folder / "versions" / "0002_next.py").write_text(f"{text}def upgrade():\n    {change}\n")
    for migrations, columns in ((database_module._MIGRATIONS, []), (folder, ["added"]), (folder, ["added"])):
        monkeypatch.setattr(database_module, "_MIGRATIONS", migrations)
        database = Database.open(database_url)
        with database.read() as connection:
            found = compare_metadata(MigrationContext.configure(connection), Base.metadata)
        assert [(kind, column.name) for kind, _, _, column in found] == [("remove_column", name) for name in columns]
        database.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE runs DROP COLUMN ranks", "runs.ranks is missing"),
        ("DROP TABLE forgotten", "forgotten is missing"),
        ("UPDATE alembic_version SET version_num = '9999'", "their revision is unknown"),
    ],
)
def test_tables_of_another_version_are_refused(database_url, change, said):
    """Otherwise the server would start, and each request would fail."""
    database = Database.open(database_url)
    database.write(lambda connection: connection.execute(text(change)))
    database.close()
    with pytest.raises(AutobatchError, match=f"tables of another version of autobatch .{said}.: start the server"):
        Database.open(database_url)


def test_several_servers_may_start_at_once(database_url):
    """One of them migrates, the others wait."""
    program = "import sys; from autobatch.service.database import Database; Database.open(sys.argv[1]).close()"
    servers = [subprocess.Popen([sys.executable, "-c", program, database_url]) for _ in range(2)]
    assert [server.wait(60) for server in servers] == [0, 0]
    database = Database.open(database_url)
    assert count(database) == 0
    database.close()


def test_writers_do_not_lose_each_others_rows(database):
    """Thirty threads, each with rows that are there when its call returns; one that fails undoes only itself."""
    seen = []

    def write(thread):
        for index in range(20):
            name = f"{thread} {index}"
            database.write(add_name(name))
            with pytest.raises(Exception, match=r"(?i)unique"):
                database.write(add_name(name))
            with database.read() as connection:
                seen.append(connection.execute(select(NameRow.name).where(NameRow.name == name)).scalar() == name)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 600
    assert count(database) == 600


def test_a_failing_action_undoes_all_that_it_wrote(database):
    """And its error comes out as it was raised."""

    def write_and_fail(connection):
        add_name("a")(connection)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        database.write(write_and_fail)
    assert count(database) == 0


@pytest.mark.parametrize("url", ["nonsense", "mysql://x", "sqlite://", "postgresql+asyncpg://x/y"])
def test_other_databases_are_refused(url):
    """In one line, without the password."""
    with pytest.raises(InvalidArgument, match="sqlite:///FILE"):
        Database.open(url)


def test_a_database_that_is_away(tmp_path):
    """One line at the start."""
    for url in (f"sqlite:///{tmp_path}/no/folder.db", "postgresql://u:secret@/x?host=/nowhere"):
        with pytest.raises(AutobatchError) as caught:
            Database.open(url)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_full_disk_is_reported_and_the_server_goes_on(tmp_path):
    """503 for what cannot be written, while lists are read; with room again it is taken."""
    database = Database.open(f"sqlite:///{tmp_path / 'service.db'}")
    client = make_client(database)
    assert client.post("/api/v1/plans", json=make_plan_in("a0")).status_code == 201

    def limit_pages(pages):
        with database._engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            raw.execute(f"PRAGMA max_page_count={pages}").close()

    database._engine.dispose()  # so that one connection is left, which the pool hands to the writer
    limit_pages(1)
    answers = [client.post("/api/v1/plans", json=make_plan_in(f"a{index}")) for index in range(1, 100)]
    failed = [answer for answer in answers if answer.status_code == 503]
    assert failed
    assert failed[0].json()["detail"] == "the database cannot be used: its disk is full"
    assert failed[0].headers["retry-after"] == "5"
    assert {answer.status_code for answer in answers} <= {201, 503}
    assert client.get("/api/v1/plans").status_code == 200
    limit_pages(100_000)
    assert client.post("/api/v1/plans", json=make_plan_in("b")).status_code == 201
    database.close()


def test_a_read_only_database_is_reported(database_url):
    """503 for each write; lists are read."""
    first = Database.open(database_url)
    make_client(first).post("/api/v1/plans", json=make_plan_in())
    first.close()
    if database_url.startswith("sqlite"):
        url = database_url.replace("sqlite:///", "sqlite:///file:") + "?mode=ro&uri=true"
    else:
        url = f"{database_url}&options=-c%20default_transaction_read_only%3Don"
    database = Database.open(url, migrate=False)
    client = make_client(database)
    answer = client.post("/api/v1/runs", json=make_run_in())
    assert (answer.status_code, answer.json()["detail"]) == (503, "the database cannot be used: it is read-only")
    assert [line["id"] for line in client.get("/api/v1/plans").json()["plans"]] == ["a1"]
    database.close()


def test_a_fault_of_the_server_shows_no_traceback(database, monkeypatch):
    """One line to the client; the log has the rest."""
    client = make_client(database)
    monkeypatch.setattr("autobatch.service.store.Store.cards", lambda self: 1 / 0)
    answer = client.get("/api/v1/cards")
    assert answer.status_code == 500
    assert answer.json()["detail"] == "the server has a fault; its log has more"


def test_a_backup_is_a_database_of_its_own(database, tmp_path, request):
    """Made while the server writes; served as it is, or copied into an empty PostgreSQL."""
    client = make_client(database)
    client.post("/api/v1/plans", json=make_plan_in())
    client.post("/api/v1/runs", json=make_run_in())
    for number in range(5):
        client.post("/api/v1/runs/r1/summaries", json=make_summary(number))
    everything = [client.get(f"/api/v1/{path}").json() for path in ("plans/a1", "runs/r1", "cards")]
    copy = Database.open(f"sqlite:///{tmp_path / 'copy.db'}")
    assert database.copy_to(copy) >= 8
    copies = [copy]
    with new_database(request.getfixturevalue("postgres")) as url:
        copies.append(Database.open(url))
        copy.copy_to(copies[1])
        for one in copies:
            restored = make_client(one)
            assert [restored.get(f"/api/v1/{path}").json() for path in ("plans/a1", "runs/r1", "cards")] == everything
            with pytest.raises(Exception, match="has rows"):
                database.copy_to(one)
            one.close()


def test_a_crowd_that_cannot_be_served_is_sent_away(tmp_path, monkeypatch):
    """A writer that hangs does not fill the memory."""
    monkeypatch.setattr("autobatch.service.database._PATIENCE_S", 0.1)
    database = Database.open(f"sqlite:///{tmp_path / 'service.db'}")
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(pytest.raises, Busy, database.write, lambda connection: go_on.wait(10))
        slow.result()
        answer = make_client(database).post("/api/v1/runs", json=make_run_in())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        go_on.set()
    database.close()


def test_an_answer_comes_after_the_disk_has_the_record(tmp_path):
    """SQLite with a write-ahead log that each COMMIT syncs."""
    database = Database.open(f"sqlite:///{tmp_path / 'service.db'}")
    with database.read() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
    database.close()
