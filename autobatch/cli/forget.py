"""``autobatch forget``: delete plans with their runs.

Covers the options and the answer. Does not cover deleting (``ledger``). Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import math

from autobatch._formatting import plural
from autobatch.cli.ledger_access import open_store
from autobatch.cli.output import Answer
from autobatch.errors import InvalidArgument

__all__ = ["configure", "run"]

_DAY_S = 24 * 60 * 60


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("plans", nargs="*", metavar="ID", help="the beginnings of their ids")
    command.add_argument("--older-than", type=float, metavar="DAYS", help="all that were made before")
    command.add_argument("--all", action="store_true", help="everything")


def run(options: argparse.Namespace) -> Answer:
    """Delete, and say how many."""
    if bool(options.plans) + (options.older_than is not None) + options.all != 1:
        raise InvalidArgument("forget takes ids, --older-than DAYS or --all: one of them")
    with open_store() as store:
        if options.older_than is not None:
            if not (math.isfinite(options.older_than) and options.older_than > 0):
                raise InvalidArgument(f"--older-than {options.older_than:g} must be a number of days above 0")
            count = store.forget(older_than_seconds=options.older_than * _DAY_S)
        else:
            count = store.forget(everything=True) if options.all else store.forget(options.plans)
    return Answer(f"{plural(count, 'plan')} forgotten", {"forgotten": count})
