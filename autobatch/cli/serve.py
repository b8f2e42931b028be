"""The commands of ``autobatch serve``: run the service, make its tokens and backups. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer

from autobatch._formatting import is_one_line, plural
from autobatch.cli.declare import commands_of, option
from autobatch.cli.output import Answer, Table, check_folder
from autobatch.errors import AutobatchError, InvalidArgument

if TYPE_CHECKING:  # the extra may be missing
    from autobatch.service.database import Database
    from autobatch.service.state import Service

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}

serve_app = typer.Typer(help="Run the service of a team, make its tokens and backups, and delete old records.")
_token_app = typer.Typer(help="Make, list and revoke the tokens that clients and browsers need.")
serve_app.add_typer(_token_app, name="token")
_DATABASE = option(
    "--database",
    "URL",
    "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME; default: AUTOBATCH_DATABASE, or a file beside the ledger.",
)
_NAME = option("--name", "NAME", "Name of the token.")


@serve_app.callback(invoke_without_command=True)
def _serve(
    context: typer.Context,
    *,
    database: Annotated[str | None, _DATABASE] = None,
    host: Annotated[str, option("--host", "ADDRESS", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("--port", "N", "Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8765,
    is_open: Annotated[
        bool, typer.Option("--open", help="Let anyone on this machine read and write without a token.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, option("--allow-host", "NAME", "A name that browsers and clients call this server by.")
    ] = None,
    webhook: Annotated[str | None, option("--webhook", "URL", "Where alerts are sent to, as JSON.")] = None,
    rate: Annotated[float, option("--rate", "N", "Requests a second that one address may make.", min=1)] = 1000.0,
) -> Callable[[], Answer] | None:
    """Run the service until Ctrl-C. Needs pip install 'torch-autobatch[serve]'."""
    if context.invoked_subcommand is not None:
        if database is not None:
            raise InvalidArgument(f"pass --database after serve {context.invoked_subcommand}")
        return None
    return partial(_run, database, host, port, is_open=is_open, allowed=allow_host or [], webhook=webhook, rate=rate)


def _run(
    database: str | None, host: str, port: int, *, is_open: bool, allowed: list[str], webhook: str | None, rate: float
) -> Answer:
    _check_installed()
    from autobatch.service.server import serve  # noqa: PLC0415 - an extra
    from autobatch.service.state import Settings  # noqa: PLC0415 - an extra

    if is_open and host not in _LOOPBACK:
        raise InvalidArgument(f"--open lets anyone in, so it needs --host 127.0.0.1, and this is {host}")
    if webhook and not (webhook.startswith(("http://", "https://")) and urlsplit(webhook).netloc):
        raise InvalidArgument("--webhook takes a URL that begins with http:// or https://")
    settings = Settings(host, port, is_open, tuple(allowed), webhook, rate)

    def announce(service: Service, address: str) -> None:
        lines = [f"autobatch: serving on {address}"]
        if is_open:
            lines.append("anyone on this machine may read and write (--open)")
        elif not any(not token.revoked_at for token in service.tokens.list()):
            lines.append("there is no token yet: autobatch serve token create --name NAME --role admin")
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201 - the server answers nobody else

    serve(_find_database(database), settings, announce)
    return Answer(["autobatch: the server has ended"], {"ended": True})


@commands_of(_token_app)
def create_token(
    *,
    name: Annotated[str, _NAME],
    role: Annotated[
        Literal["reader", "writer", "admin"],
        typer.Option(help="Look; hand in as well; or do all, such as forget plans."),
    ] = "reader",
    database: Annotated[str | None, _DATABASE] = None,
) -> Answer:
    """Make a token and print it, once."""
    if not name.strip() or len(name) > 200 or not is_one_line(name):
        raise InvalidArgument("--name takes one line of at most 200 letters")
    with _open(database) as opened:
        from autobatch.service.auth import Tokens  # noqa: PLC0415 - an extra

        text = Tokens(opened).create(name, role)
    lines = [text, "keep it: it is not shown a second time; clients take it from AUTOBATCH_TOKEN"]
    return Answer(lines, {"name": name, "role": role, "token": text})


@commands_of(_token_app)
def list_tokens(*, database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """List the tokens, without their text."""
    with _open(database) as opened:
        from autobatch.service.auth import Tokens  # noqa: PLC0415 - an extra

        tokens = Tokens(opened).list()
    data = [token.model_dump(exclude={"hash"}) for token in tokens]
    if not tokens:
        return Answer(["there is no token; autobatch serve token create --name NAME --role reader makes one"], data)
    rows = [
        (
            token.name,
            token.role,
            _date(token.made_at),
            _date(token.used_at),
            f"revoked {_date(token.revoked_at)}" if token.revoked_at else "valid",
        )
        for token in tokens
    ]
    return Answer([Table(rows, ("name", "role", "made", "last used", "state"))], data)


@commands_of(_token_app)
def revoke_token(*, name: Annotated[str, _NAME], database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """Revoke a token; it is refused from then on."""
    with _open(database) as opened:
        from autobatch.service.auth import Tokens  # noqa: PLC0415 - an extra

        Tokens(opened).revoke(name)
    return Answer([f"the token {name} is revoked"], {"revoked": name})


_FILE = typer.Argument(metavar="FILE", help="A SQLite file.")


@commands_of(serve_app)
def backup(*, file: Annotated[str, _FILE], database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """Copy the database to a new file while the server runs. ``serve`` can use that file."""
    check_folder("FILE", file)
    if Path(file).exists():
        raise InvalidArgument(f"{file} exists already: name a new file")
    _check_installed()
    path, url = Path(file).absolute(), _find_database(database)
    source = Path(url.partition("?")[0].removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not source.is_file():
        raise AutobatchError(f"no database at {source}: name one with --database")
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        draft = Path(folder) / path.name
        with _open(url) as opened, _open(f"sqlite:///{draft}") as copy:
            count = opened.copy_to(copy)
        draft.replace(path)
    return Answer([f"{plural(count, 'row')} written to {file}"], {"rows": count, "file": str(Path(file).absolute())})


@commands_of(serve_app)
def restore(*, file: Annotated[str, _FILE], database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """Copy a backup to a database that has no rows yet, such as a new one of PostgreSQL."""
    if not Path(file).is_file():
        raise InvalidArgument(f"no file {file}")
    with _open(f"sqlite:///{Path(file).absolute()}") as copy, _open(database) as opened:
        count = copy.copy_to(opened)
    return Answer([f"{plural(count, 'row')} restored"], {"rows": count})


@commands_of(serve_app)
def prune(
    *,
    older: Annotated[str, option("--older", "DAYS", "Age from which records go, such as 90d.")],
    database: Annotated[str | None, _DATABASE] = None,
) -> Answer:
    """Delete old runs, predictions that nothing was measured beside, and all but the newest plans of a step."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)d?", older)
    if found is None or (days := float(found[1])) < 1:  # a run that is live reports more often
        raise InvalidArgument(f"--older takes days, at least one, such as 90d; this is {older!r}")
    with _open(database) as opened:
        from autobatch.service.store import Store  # noqa: PLC0415 - an extra

        counts = Store(opened).prune(time.time() - 86400 * days)
    parts = [plural(count, kind.removesuffix("s")) for kind, count in counts.items()]
    return Answer([f"{', '.join(parts)} deleted"], counts)


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment else "never"


@contextmanager
def _open(database: str | None) -> Iterator[Database]:
    _check_installed()
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - an extra

    from autobatch.service.database import Database, describe_fault  # noqa: PLC0415 - an extra

    opened = Database.open(_find_database(database))
    try:
        yield opened
    except SQLAlchemyError as error:
        raise AutobatchError(f"the database cannot be used: {describe_fault(error)}") from error
    finally:
        opened.close()


def _find_database(database: str | None) -> str:
    """Return the database's URL; default: one SQLite file in the folder of the ledger."""
    url = database or os.environ.get("AUTOBATCH_DATABASE", "").strip()
    if url:
        return url
    from autobatch.ledger.ledger import find_home  # noqa: PLC0415 - --help needs no ledger

    try:
        home = find_home()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"AUTOBATCH_HOME cannot be used: {error}") from None
    return f"sqlite:///{home / 'service.db'}"


def _check_installed() -> None:
    for name in ("alembic", "fastapi", "prometheus_client", "psycopg", "sqlalchemy", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise AutobatchError(f"the service needs {name} and more: pip install 'torch-autobatch[serve]'")
