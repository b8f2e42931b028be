"""One seed repeats a run of the tests: CI judges a change by the same examples each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT, *(ROOT / folder for folder in ("tests", "tests/builders", "tests/card"))]

PROPERTY = """
import os, random
from pathlib import Path
{imports}
from hypothesis import given, strategies as st

drawn = []

@given(st.integers(), st.floats(), st.lists(st.integers(0, 10_000)))
def test_{name}(integer, number, several):
    drawn.append((integer, number, several))

def test_random_numbers():
    drawn.append(random.random())

def teardown_module():
    drawn.sort(key=repr)
    Path(os.environ["DRAWN"], "{name}").write_text("\\n".join(map(repr, drawn)))
"""


def draw(folder: Path, *options: str, imports: str = "") -> dict[str, str]:
    """What the properties of two files drew, run with the ``conftest.py`` of these tests."""
    (drawn := folder / "drawn").mkdir(parents=True)
    for name, imported in (("one", imports), ("two", "")):
        (folder / f"test_{name}.py").write_text(PROPERTY.format(name=name, imports=imported))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-c", os.devnull, "--rootdir", ".", *options, "."],
        cwd=folder,
        env={**os.environ, "DRAWN": str(drawn), "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not (folder / ".hypothesis" / "examples").exists()  # failures of earlier runs, which would be drawn first
    return {path.name: path.read_text() for path in drawn.iterdir()}


@pytest.mark.slow
def test_one_seed_draws_the_same_examples(tmp_path: Path) -> None:
    """In several processes or one, whatever modules are imported there; another seed draws others."""
    alone = draw(tmp_path / "alone", "--randomly-seed=7", imports="import autobatch.cli.main, autobatch.plan")
    assert draw(tmp_path / "beside", "--randomly-seed=7", "--numprocesses=2", "--dist=loadfile") == alone
    assert draw(tmp_path / "other", "--randomly-seed=8")["two"] != alone["two"]


def test_ci_passes_one_seed_to_every_target_that_it_makes() -> None:
    """Each recipe that runs pytest hands the seed on, and ``.ci/run`` sets it."""
    makefile, ci = (ROOT / "Makefile").read_text(encoding="utf-8"), (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^export .*\bSEED=\d+", ci, re.MULTILINE)
    runs = [line for line in makefile.splitlines() if line.startswith("\t") and "-m pytest" in line]
    assert len(runs) >= 8
    assert all("$(if $(SEED),--randomly-seed=$(SEED))" in line for line in runs)
