"""The page on other libraries: each line names a test that is there, and each heading the releases that are tested."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| ---",))]
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)(?:\[(.+?)\])?`", PAGE)))


@cache
def read(file: str) -> tuple[dict[str, str], set[str]]:
    """The source of each test of a file by its name, and every text in the file and in the modules that it shares."""
    source = (ROOT / "tests" / "integrations" / file).read_text(encoding="utf-8")
    shared = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests" / "builders").glob("train*.py")))
    trees = [ast.parse(text) for text in (source, *shared)]
    tests = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in trees[0].body
        if isinstance(node, ast.FunctionDef)
    }
    return tests, {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize(("file", "test", "case"), NAMED)
def test_each_named_test_is_there(file: str, test: str, case: str) -> None:
    """In that file under that name, with that case among its parameters."""
    tests, texts = read(file)
    assert test in tests
    assert not case or case in texts


def test_each_line_names_a_test() -> None:
    """But for the headings of the tables."""
    lines = [row for row in ROWS if not row.endswith("| test |")]
    assert len(lines) > 30
    assert [row for row in lines if not re.search(r"`test_\w+\.py::test_\w+", row)] == []


def test_no_test_of_an_integration_is_skipped() -> None:
    """They need their libraries: where one is missing they fail."""
    for path in sorted((ROOT / "tests" / "integrations").glob("*.py")):
        assert not re.search(r"\b(importorskip|skipif|skip\()", path.read_text(encoding="utf-8")), path.name


def test_headings_name_the_releases_that_are_tested() -> None:
    """Those of constraints.txt."""
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    headings = re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    found = [pair for heading in headings for pair in re.findall(r"([\w-]+) (\d+\.\d+\.\d+)", heading)]
    assert len(found) >= len(headings)
    for library, release in found:
        assert pins[library.lower()] == release, library
