"""``autobatch doctor``: is everything here as it should be, and if not, what to type?

Covers the answer. Does not cover what is read (``surroundings``) nor how it is judged (``checkup``). Nothing here
imports torch.
"""

from __future__ import annotations

import argparse
import os

from autobatch.cli.diagnostics import Finding, examine
from autobatch.cli.environment import read_environment
from autobatch.cli.ledger_access import find_fault
from autobatch.cli.output import DONE, NO, Answer

__all__ = ["configure", "run"]

_MARKS = {"wrong": "WRONG ", "beware": "beware", "fine": "fine  "}


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Looks at what training needs, without importing torch. Exit code 1 where something is wrong."


def run(_: argparse.Namespace) -> Answer:
    """Look, judge, and say what to do."""
    home, fault = find_fault()
    found = read_environment(os.environ, home, fault)
    findings = examine(found)
    wrong = any(finding.level == "wrong" for finding in findings)
    text = "\n".join(line for finding in findings for line in _show(finding))
    return Answer(text, {"findings": findings, "surroundings": found}, NO if wrong else DONE)


def _show(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.level]}  {finding.what}"]
    return [*lines, f"        -> {finding.advice}"] if finding.advice else lines
