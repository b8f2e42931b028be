"""``autobatch diff``: what differs between two plans.

Covers the options and the answer. Does not cover the comparison (``report.difference``). Nothing here imports torch.
"""

from __future__ import annotations

import argparse

from autobatch.cli.ledger_access import find_plan
from autobatch.cli.output import DONE, NO, Answer
from autobatch.report.difference import diff_plans, diff_plans_data

__all__ = ["configure", "run"]


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "What differs between two plans. Exit code 1 where something does."
    command.add_argument("first", metavar="ID|FILE", help="as for show")
    command.add_argument("second", metavar="ID|FILE")


def run(options: argparse.Namespace) -> Answer:
    """Field by field."""
    (first, _), (second, _) = find_plan(options.first), find_plan(options.second)
    data = diff_plans_data(first, second)
    differ = data["fields"] or data["trials"] or data["curve"]
    return Answer(diff_plans(first, second), data, NO if differ else DONE)
