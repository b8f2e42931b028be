"""Blocks of Python on the pages, pasted line by line into ``python`` as a reader does it."""

from __future__ import annotations

import ast
import code
import json
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from builders.forked_programs import run_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FIRST = ["README.md", "docs/quickstart.md", "docs/tour.md"]
"""Pages that newcomers read first."""

SESSION = """
import code, json, sys
console = code.InteractiveConsole()
console.write = sys.exit  # what Python says of an error
for block in json.loads({blocks!r}):
    for line in block.splitlines():
        waits = console.push(line)
    if waits:
        sys.exit(f"waits for another line after {{line!r}}")
"""


def blocks_of(page: str) -> list[str]:
    """The page's blocks of Python in order, but those that a comment leaves out or writes to a file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^(<!-- (?:file|not run): .+? -->\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for mark, block in found if not mark]


def paste(blocks: list[str], folder: Path) -> str:
    """What ``python`` complains of when blocks are pasted one after the other; empty where it runs them all."""
    program = folder / "session.py"
    program.write_text(SESSION.format(blocks=json.dumps(blocks)), encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOBATCH_HOME": str(folder / "home")}
    ran = run_program(program, variables)
    return "" if ran.returncode == 0 else ran.stdout


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


@pytest.mark.slow
@pytest.mark.parametrize("page", FIRST)
def test_a_page_can_be_pasted_into_python(page: str, tmp_path: Path) -> None:
    """All blocks of the page in one session, in order, raise nothing."""
    assert paste(blocks_of(page), tmp_path) == ""
