"""The databases of the service's tests: a SQLite file and a real PostgreSQL."""

from __future__ import annotations

import shutil

import pytest
import services
from fastapi.testclient import TestClient

from autobatch.service.database import Database
from autobatch.service.server import make_app
from autobatch.service.state import Service, Settings


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL for all tests of this process."""
    if services.find_postgres() is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql, or PGBIN")
    with services.run_postgres() as url_of:
        yield url_of


@pytest.fixture(scope="session")
def postgres_with_tables(postgres):
    """The name of a database that others are copied from."""
    with services.new_database(postgres, "with_tables") as url:
        Database.open(url).close()
        yield "with_tables"


@pytest.fixture(scope="session")
def sqlite_with_tables(tmp_path_factory):
    """The same, as a file."""
    path = tmp_path_factory.mktemp("sqlite") / "service.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """A database without tables, of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'service.db'}"
        return
    with services.new_database(request.getfixturevalue("postgres")) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    """A database with tables, of each kind."""
    if request.param == "sqlite":
        path = tmp_path / "service.db"
        shutil.copy(request.getfixturevalue("sqlite_with_tables"), path)
        opened = Database.open(f"sqlite:///{path}", migrate=False)
        yield opened
        opened.close()
        return
    template = request.getfixturevalue("postgres_with_tables")
    with services.new_database(request.getfixturevalue("postgres"), template=template) as url:
        opened = Database.open(url, migrate=False)
        yield opened
        opened.close()


@pytest.fixture
def service(database):
    """A server's parts."""
    return Service(Settings(port=0, hosts=("testserver",)), database)


@pytest.fixture
def client_of(service):
    """Make a client with a token of a role, or with none."""
    app = make_app(service)

    def make(role=None, name=None):
        headers = {"Authorization": f"Bearer {service.tokens.create(name or f'a {role}', role)}"} if role else {}
        return TestClient(app, headers=headers, raise_server_exceptions=False)

    return make


@pytest.fixture
def client(client_of):
    """A client that may do all."""
    return client_of("admin")
