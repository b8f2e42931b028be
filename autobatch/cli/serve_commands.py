"""Declares the commands of ``autobatch serve``; ``autobatch.cli.serve`` runs them, and is imported when one runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import typer

from autobatch.cli.declare import commands_of, option
from autobatch.cli.output import Answer
from autobatch.errors import InvalidArgument

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
    from autobatch.cli.serve import run_server  # noqa: PLC0415 - --help needs none of these

    return partial(
        run_server, database, host, port, is_open=is_open, allowed=allow_host or [], webhook=webhook, rate=rate
    )


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
    from autobatch.cli import serve as service  # noqa: PLC0415

    return service.create_token(database, name, role)


@commands_of(_token_app)
def list_tokens(*, database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """List the tokens, without their text."""
    from autobatch.cli import serve as service  # noqa: PLC0415

    return service.list_tokens(database)


@commands_of(_token_app)
def revoke_token(*, name: Annotated[str, _NAME], database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """Revoke a token; it is refused from then on."""
    from autobatch.cli import serve as service  # noqa: PLC0415

    return service.revoke_token(database, name)


_FILE = typer.Argument(metavar="FILE", help="A SQLite file.")


@commands_of(serve_app)
def backup(*, file: Annotated[str, _FILE], database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """Copy the database to a new file while the server runs. ``serve`` can use that file."""
    from autobatch.cli import serve as service  # noqa: PLC0415

    return service.back_up(database, file)


@commands_of(serve_app)
def restore(*, file: Annotated[str, _FILE], database: Annotated[str | None, _DATABASE] = None) -> Answer:
    """Copy a backup to a database that has no rows yet, such as a new one of PostgreSQL."""
    from autobatch.cli import serve as service  # noqa: PLC0415

    return service.restore(database, file)


@commands_of(serve_app)
def prune(
    *,
    older: Annotated[str, option("--older", "DAYS", "Age from which records go, such as 90d.")],
    database: Annotated[str | None, _DATABASE] = None,
) -> Answer:
    """Delete old runs, predictions that nothing was measured beside, and all but the newest plans of a step."""
    from autobatch.cli import serve as service  # noqa: PLC0415

    return service.prune(database, older)
