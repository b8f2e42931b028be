"""Opens the database, brings its tables up to date, and lets actions read and write: SQLite or PostgreSQL.

One thread writes all that waits in one transaction, and answers after its COMMIT. Many threads that write would wait
for each other: on SQLite for its lock, on PostgreSQL for Python's.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # not Python's own one before 3.11
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SAWarning, SQLAlchemyError

from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.service.tables import Base

_COUNTED = {"preserve_rowcount": True}  # of inserts too: 0 if there was such a row
_Answer = TypeVar("_Answer")
_LONGEST_QUEUE = 2000  # actions that wait for the writer
_LARGEST_GROUP = 200  # actions of one transaction
_PATIENCE_S = 10.0  # of a request for its COMMIT
_ROWS_AT_ONCE = 1000  # of a backup
_ADDITIONS = {"add_table", "add_column"}  # that would make the tables those of this version
_MIGRATIONS = Path(__file__).parent / "migrations"
_OTHER_TABLES = (
    "the database has tables of another version of autobatch ({}): start the server of that version, or name a new "
    "database"
)


class Busy(Exception):
    """Too many writes wait."""


class Database:
    """One database. ``write`` returns after COMMIT; ``read`` sees one state."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        # BEGIN and ROLLBACK would double the requests of a read to PostgreSQL.
        self._reader = engine if self.is_sqlite else engine.execution_options(isolation_level="AUTOCOMMIT")
        self.insert = sqlite.insert if self.is_sqlite else postgresql.insert
        self.changes = 0  # grows with each write: streams watch it
        self._waiting: queue.Queue[tuple[Callable[[Connection], Any], Future[Any]] | None] = queue.Queue(_LONGEST_QUEUE)
        self._writer = threading.Thread(target=self._write_groups, name="autobatch-writer", daemon=True)
        self._writer.start()

    @classmethod
    def open(cls, url: str, *, migrate: bool = True) -> Database:
        """Connect, and create or update the tables.

        Raises:
            InvalidArgument: The URL is not one of SQLite or PostgreSQL.
            AutobatchError: The database cannot be used.
        """
        engine = _make_engine(url)
        if engine.dialect.name == "sqlite":
            with suppress(OSError):  # SQLite reports it
                Path(engine.url.database or "").touch(mode=0o600)  # hashes of tokens and names are for nobody else
        try:
            if migrate:
                _migrate(engine)
            else:
                engine.connect().close()
        except AutobatchError:
            engine.dispose()
            raise
        except (SQLAlchemyError, OSError, TypeError, ValueError) as error:  # also settings that a driver does not know
            engine.dispose()
            raise AutobatchError(f"the database cannot be used: {_describe_start(error, engine)}") from error
        return cls(engine)

    def close(self) -> None:
        self._waiting.put(None)
        self._writer.join(_PATIENCE_S)
        self._engine.dispose()

    def read(self) -> Connection:
        return self._reader.connect()

    def write_later(self, action: Callable[[Connection], object]) -> None:
        """Write what nobody waits for, unless much waits already or the database cannot be used."""
        with suppress(queue.Full):
            self._waiting.put_nowait((action, Future()))

    def write(self, action: Callable[[Connection], _Answer]) -> _Answer:
        """Run an action in a transaction, and return its answer once that is on the disk."""
        future: Future[_Answer] = Future()
        try:
            self._waiting.put((action, future), timeout=_PATIENCE_S)
            return future.result(_PATIENCE_S)
        except (queue.Full, Late) as error:
            raise Busy from error

    def _write_groups(self) -> None:
        while (first := self._waiting.get()) is not None:
            group = [first]
            while len(group) < _LARGEST_GROUP and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    self._waiting.put(None)
                    break
                group.append(following)
            self._write_group(group)

    def _write_group(self, group: list[tuple[Callable[[Connection], Any], Future[Any]]]) -> None:
        """Write a group in one transaction. If one fails, each is written alone; a failing disk fails all."""
        try:
            with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                answers = [action(connection) for action, _ in group]
        except Exception as error:  # noqa: BLE001 - the requests raise it
            if len(group) > 1 and not isinstance(error, OperationalError):
                for one in group:
                    self._write_group([one])
            else:
                for _, future in group:
                    future.set_exception(error)
            return
        self.changes += 1
        for (_, future), answer in zip(group, answers, strict=True):
            future.set_result(answer)

    def copy_to(self, other: Database) -> int:
        """Copy all rows, as they are at one moment, to a database without rows in one transaction; return how many."""
        count = 0
        level = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        with (
            self._engine.connect().execution_options(**level) as source,
            source.begin(),
            other._engine.connect().execution_options(writes=True) as target,
            target.begin(),
        ):
            if any(target.execute(select(table).limit(1)).first() for table in Base.metadata.sorted_tables):
                raise AutobatchError("the database has rows already, and takes a copy only if it is empty")
            for table in Base.metadata.sorted_tables:
                with source.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table)) as rows:
                    for part in rows.mappings().partitions(_ROWS_AT_ONCE):
                        target.execute(insert(table), [dict(row) for row in part])
                        count += len(part)
        return count


def describe_fault(error: Exception) -> str:
    """Return what is wrong with the database in one line, without its address or its statements."""
    original = getattr(error, "orig", None) or error
    text = str(original).lower()
    if getattr(original, "sqlite_errorname", "") == "SQLITE_FULL" or "disk is full" in text or "no space" in text:
        return "its disk is full"
    if "readonly" in text or "read-only" in text:
        return "it is read-only"
    if isinstance(error, IntegrityError):
        return "it has such rows already"
    if isinstance(error, (DBAPIError, OSError)):
        return " ".join(str(original).split())[:200] if "unable to open" in text else f"{type(original).__name__}"
    return type(error).__name__


def _describe_start(error: Exception, engine: Engine) -> str:
    """Return why a database cannot be opened, to whoever starts the server: with the driver's first line."""
    fault = describe_fault(error)
    original = getattr(error, "orig", None) or error
    lines = str(original).splitlines()
    if fault != type(original).__name__ or not lines:
        return fault
    password = engine.url.password
    return lines[0].replace(str(password), "***")[:300] if password else lines[0][:300]


def _make_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the second one for a port that is not a number
        raise InvalidArgument(
            "--database takes sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME, and this is neither"
        ) from None
    options: dict[str, Any] = {"pool_size": 20, "max_overflow": 20, "pool_timeout": 5, "execution_options": _COUNTED}
    if parsed.drivername in {"postgresql", "postgresql+psycopg"}:
        parsed = parsed.set(drivername="postgresql+psycopg")
        options |= {"pool_pre_ping": True, "connect_args": {"connect_timeout": 5}}
    elif parsed.drivername not in {"sqlite", "sqlite+pysqlite"} or parsed.database in {None, "", ":memory:"}:
        raise InvalidArgument(
            f"--database {parsed.drivername}: take sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SAWarning)
            engine = create_engine(parsed, **options)
    except (SAWarning, ValueError):  # their texts have values, and one may be a password
        names = ", ".join(parsed.query)
        raise InvalidArgument(f"--database: its driver does not take a setting as given here, of: {names}") from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # else Python's module would begin transactions
    # FULL: a COMMIT is on the disk before its answer goes out, and a power cut loses nothing.
    for setting in ("busy_timeout=5000", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {setting}").close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later would fail as locked, whatever the timeout.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(engine: Engine) -> None:
    """Make the tables of a new database as they are now; bring those of an older version up to date."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with engine.connect().execution_options(writes=True) as connection:
        if engine.dialect.name == "postgresql":  # of several servers that start at once, one migrates
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(4217330961)")
        config.attributes["connection"] = connection
        if not inspect(connection).has_table("alembic_version"):
            Base.metadata.create_all(connection)
            command.stamp(config, "head")
        else:
            try:
                command.upgrade(config, "head")
            except CommandError as error:  # a revision that this version does not know
                raise AutobatchError(_OTHER_TABLES.format("their revision is unknown")) from error
            context = MigrationContext.configure(connection)
            missing = [change[-1] for change in compare_metadata(context, Base.metadata) if change[0] in _ADDITIONS]
            if missing:
                raise AutobatchError(_OTHER_TABLES.format(f"{missing[0]} is missing"))
        connection.commit()
