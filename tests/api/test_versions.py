"""What `make test-oldest` and `make test-pythons` run with is what the metadata and the page of versions name."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from autobatch.torch_internals import OLDEST, OLDEST_TO_PREDICT, format_release, read_release

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML by itself")

ROOT = Path(__file__).resolve().parents[2]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, LINTERS = METADATA["project"], METADATA["tool"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
TOOLS = re.compile(r"hypothesis|import-linter|mypy|pytest\b.*|ruff|setuptools")
"""What checks the library and is no part of what it works with: of these the oldest need not be tested."""


def read_pins(name: str) -> dict[str, str]:
    """The version of each package in a file of constraints."""
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE))


def read_floors() -> dict[str, str]:
    """The oldest version of each library that the metadata names for use, or that the tests use it with."""
    extras = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *extras["dev"], *extras["watch"], *extras["examples"], *extras["serve"]]
    floors = dict(re.sub(r"\[.*\]", "", requirement).split(">=") for requirement in named)
    return {name: floor for name, floor in floors.items() if not TOOLS.fullmatch(name)}


@pytest.mark.parametrize(("name", "floor"), sorted(read_floors().items()))
def test_the_oldest_that_is_named_is_the_oldest_that_is_tested(name: str, floor: str) -> None:
    """The pin is the floor, or the first release of it."""
    pin = read_pins("constraints-oldest.txt")[name]
    assert pin == floor or pin.startswith(f"{floor}.")


def test_the_oldest_torch_is_the_one_the_code_goes_by() -> None:
    """``doctor``, the refusal of ``predict`` and the metadata name one release."""
    assert read_release(read_floors()["torch"]) == OLDEST
    assert read_release(read_pins("constraints-oldest.txt")["torch"]) == OLDEST


def test_no_tool_of_the_tests_is_without_a_pin() -> None:
    """A run repeats only with the same tools."""
    dev = {requirement.split(">=")[0] for requirement in PROJECT["optional-dependencies"]["dev"]}
    assert dev <= read_pins("constraints-oldest.txt").keys()


def test_pythons_begin_with_the_oldest_that_the_metadata_names() -> None:
    """The Makefile reads it there for `make test-oldest`, by this pattern; and ruff and mypy go by it."""
    pattern = re.search(r"^OLDEST_PYTHON := \$\(shell (sed .+) pyproject\.toml\)$", MAKEFILE, flags=re.MULTILINE)
    pythons = re.search(r"^PYTHONS \?= (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert pattern is not None
    assert pythons is not None
    words = [*shlex.split(pattern[1]), "pyproject.toml"]
    read = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    oldest = read.stdout.strip()
    assert PROJECT["requires-python"] == f">={oldest}"
    assert pythons[1].split()[0] == LINTERS["mypy"]["python_version"] == oldest
    assert LINTERS["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_ci_runs_the_oldest() -> None:
    """The run that a change is taken by."""
    assert "make test-oldest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_page_begins_with_the_oldest_and_ends_with_the_tested_torch() -> None:
    """And says where ``predict`` begins."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (\d.+) \|$", PAGE, flags=re.MULTILINE)]
    assert read_release(rows[0][0]) == OLDEST
    assert rows[0][2] == "no"
    assert read_release(next(row[0] for row in rows if row[2] == "yes")) == OLDEST_TO_PREDICT
    assert format_release(read_release(read_pins("constraints.txt")["torch"])) == rows[-1][0]
