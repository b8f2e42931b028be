"""Blocks of Python on the pages, pasted line by line into ``python`` as a reader does it."""

from __future__ import annotations

import ast
import code
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FIRST = ["README.md", "docs/quickstart.md", "docs/tour.md"]
"""Pages that newcomers read first."""


def blocks_of(page: str) -> list[str]:
    """The page's blocks of Python in order, but those that a comment leaves out or writes to a file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^(<!-- (?:file|not run): .+? -->\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for mark, block in found if not mark]


@pytest.mark.parametrize("page", FIRST)
def test_no_pasted_line_is_taken_wrongly(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statement is whole where the console takes it for whole, and no block leaves one open for the next block.

    An empty line ends a compound statement there, and nothing else does. Nothing is run, only compiled.
    """
    console = code.InteractiveConsole()
    monkeypatch.setattr(console, "runcode", lambda _: None)
    monkeypatch.setattr(console, "write", pytest.fail)
    for block in blocks_of(page):
        waits = [console.push(line) for line in block.splitlines()]
        assert not waits[-1], f"waits for another line after:\n{block}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_an_empty_line_follows_each_compound_statement(page: str) -> None:
    """On every page: without it the console takes what follows for more of the statement, a SyntaxError."""
    for block in blocks_of(page):
        for statement, following in pairwise(ast.parse(block).body):
            if hasattr(statement, "body"):
                first = min(node.lineno for node in [following, *getattr(following, "decorator_list", [])])
                assert first > statement.end_lineno + 1, f"line {first} of:\n{block}"
