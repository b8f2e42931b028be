"""Declares commands and options to typer, which only reads the command line and returns the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from autobatch.cli.output import Answer


def _shared(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print each event on stderr.")] = False,
) -> None:
    """Declare the options of all commands, which ``main`` reads."""


def commands_of(group: typer.Typer) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Return a decorator that adds a command with the shared options to ``group``."""

    def add(run: Callable[..., Answer]) -> Callable[..., Answer]:
        name = run.__name__.split("_", maxsplit=1)[0]  # create_token is `autobatch serve token create`
        group.command(name, help=run.__doc__)(_read(run))
        return run

    return add


def _read(run: Callable[..., Answer]) -> Callable[..., Callable[[], Answer]]:
    """Return what typer calls: it has the options of ``run`` and the shared ones, and returns the call."""

    def read(*, json: bool, verbose: bool, **options: Any) -> Callable[[], Answer]:
        del json, verbose
        return partial(run, **options)

    parameters = [one for of in (run, _shared) for one in inspect.signature(of, eval_str=True).parameters.values()]
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Not as text: typer would look for its names in this module.
    read.__annotations__ = {one.name: one.annotation for one in parameters}
    return read


def option(name: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, **more)
