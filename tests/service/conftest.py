"""The databases of the service's tests: a SQLite file and a real PostgreSQL."""

from __future__ import annotations

import pytest
import services

pytest.importorskip("sqlalchemy", reason="needs the extra: pip install 'torch-autobatch[serve]'")
pytest.importorskip("fastapi", reason="needs the extra: pip install 'torch-autobatch[serve]'")

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


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """A database without tables, of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'service.db'}"
        return
    with services.new_database(request.getfixturevalue("postgres")) as url:
        yield url


@pytest.fixture
def database(database_url):
    """A database with tables."""
    opened = Database.open(database_url)
    yield opened
    opened.close()


@pytest.fixture
def service(database):
    """A server's parts."""
    return Service(Settings(hosts=("testserver",)), database)


@pytest.fixture
def client_of(service):
    """Make a client with a token of a role, or with none."""
    app = make_app(service)

    def make(role=None):
        headers = {"Authorization": f"Bearer {service.tokens.create(f'a {role}', role)}"} if role else {}
        return TestClient(app, headers=headers, raise_server_exceptions=False)

    return make


@pytest.fixture
def client(client_of):
    """A client that may do all."""
    return client_of("admin")
