"""``autobatch show``: one plan and how its runs went, as text.

Covers the options and the answer. Does not cover the text itself (``report``). Nothing here imports torch.
"""

from __future__ import annotations

import argparse

from autobatch.cli.ledger_access import find_plan
from autobatch.cli.output import Answer
from autobatch.report.text import show_plan

__all__ = ["configure", "run"]


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("plan", metavar="ID|FILE", help="the beginning of a plan's id, or a file it was saved to")


def run(options: argparse.Namespace) -> Answer:
    """The plan's story, and that of its runs."""
    plan, runs = find_plan(options.plan)
    return Answer(show_plan(plan, runs), {"plan": plan, "runs": runs})
