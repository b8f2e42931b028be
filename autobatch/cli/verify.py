"""``autobatch verify``: is splitting this step exact?

Covers the options and the answer. Does not cover how it is found out (``exactness``).
"""

from __future__ import annotations

import argparse

from autobatch.cli.model_source import KNOWN, add_source, load, take
from autobatch.cli.output import DONE, NO, Answer
from autobatch.errors import InvalidArgument
from autobatch.exactness.verification import verify

__all__ = ["configure", "run"]

_TAKEN = ("model", "batch", "step", "weigh", "device")


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Compares the gradient of a few samples, whole and in parts. Exit code 1 where they differ."
    add_source(command)


def run(options: argparse.Namespace) -> Answer:
    """Load, compare, and say what came of it."""
    arguments = take(load(options.source), _TAKEN, options.source, others=KNOWN)
    if "batch" not in arguments:
        raise InvalidArgument(f"{options.source!r} returned no 'batch', and there is nothing to compare without one")
    verdict = verify(**arguments)
    return Answer(str(verdict), verdict, DONE if verdict.exact else NO)
