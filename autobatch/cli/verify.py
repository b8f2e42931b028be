"""Checks whether splitting a step is exact: the options and the answer of ``autobatch verify``."""

from __future__ import annotations

import argparse

from autobatch.cli.model_source import add_source, load, take
from autobatch.cli.output import DONE, NO, Answer
from autobatch.errors import InvalidArgument
from autobatch.exactness.verification import verify

__all__ = ["configure_verify"]

_TAKEN = ("model", "batch", "step", "weigh", "device")


def configure_verify(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Compares the gradient of a few samples, whole and in parts. Exit code 1 where they differ."
    add_source(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Answer:
    arguments = take(load(options.source), _TAKEN, options.source)
    if "batch" not in arguments:
        raise InvalidArgument(f"{options.source!r} returned no 'batch', and there is nothing to compare without one")
    verdict = verify(**arguments)
    return Answer(str(verdict), verdict, DONE if verdict.exact else NO)
