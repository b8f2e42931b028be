"""``autobatch report``: one plan and its runs as a page with pictures.

Covers the options and writing the file. Does not cover the page (``report.html``). Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autobatch.cli.ledger_access import find_plan
from autobatch.cli.output import Answer, check_folder
from autobatch.errors import InvalidArgument
from autobatch.report.html import render_report

__all__ = ["configure", "run"]


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("plan", metavar="ID|FILE", help="as for show")
    command.add_argument("-o", "--output", metavar="FILE", help="default: autobatch-ID.html; - is stdout")


def run(options: argparse.Namespace) -> Answer:
    """The page, written to a file."""
    if options.output != "-":
        check_folder("--output", options.output)
    plan, runs = find_plan(options.plan)
    page = render_report(plan, runs)
    if options.output == "-":
        return Answer(page, {"page": page})
    path = Path(options.output or f"autobatch-{plan.id or Path(options.plan).stem}.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--output {path} cannot be written: {error}") from error
    return Answer(f"written to {path}", {"written": str(path.absolute())})
