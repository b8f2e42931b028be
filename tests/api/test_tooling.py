"""The commands of a checkout, and the versions that the tests run with."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from autobatch.torch_internals import OLDEST, OLDEST_TO_PREDICT, format_release, read_release

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(file.parent.name for file in (ROOT / "autobatch").glob("*/__init__.py"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def recipe(target: str) -> list[list[str]]:
    """The commands of a target, each as words, without the interpreter that runs them."""
    lines = re.search(rf"^{target}:.*\n((?:\t.+\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert lines is not None
    return [shlex.split(line)[2:] for line in lines[1].splitlines()]


def quick_files() -> dict[Path, str]:
    """The test files in which something is marked quick."""
    files = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    return {file: text for file, text in files.items() if "mark.quick\n" in text}


@pytest.mark.parametrize("package", PACKAGES)
def test_make_quick_takes_a_test_of_each_package(package: str) -> None:
    """One in the folder of its name, or one that imports from it where it has none."""
    folder = ROOT / "tests" / package
    files = quick_files()
    if folder.is_dir():
        assert [file for file in files if folder in file.parents]
    else:
        assert [file for file, text in files.items() if re.search(rf"^from autobatch\.{package}\b", text, re.MULTILINE)]


def test_a_commit_is_checked_with_the_commands_of_make_lint() -> None:
    """Each hook is local, downloads nothing, and is a command of ``make lint`` run by the same interpreter."""
    (config,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert config["repo"] == "local"
    assert {hook["language"] for hook in config["hooks"]} == {"system"}
    linted = recipe("lint")
    for hook in config["hooks"]:
        interpreter, module, *words = shlex.split(hook["entry"].replace(" --force-exclude", ""))
        assert [interpreter, module] == [".venv/bin/python", "-m"]
        assert words in [command[: len(words)] for command in linted], hook["id"]
    assert [hook["id"] for hook in config["hooks"]] == ["ruff", "ruff-format", "mypy"]


def test_make_proof_runs_whole_what_ci_runs_as_a_sample() -> None:
    """Each target of ``.ci/run`` that tests something."""
    ci = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE)
    proof = re.search(r"^proof: .*\n\t\$\(MAKE\) PROOF=1 (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert proof is not None
    assert {"test" if target == "check" else target for target in ci} == set(proof[1].split())


def test_ci_passes_one_seed_to_every_target_that_it_makes() -> None:
    """Each recipe that runs pytest hands the seed on, and ``.ci/run`` sets it."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^export .*\bSEED=\d+", ci, re.MULTILINE)
    runs = [line for line in MAKEFILE.splitlines() if line.startswith("\t") and "-m pytest" in line]
    assert len(runs) >= 8
    assert all("$(if $(SEED),--randomly-seed=$(SEED))" in line for line in runs)


tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML by itself")

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, LINTERS = METADATA["project"], METADATA["tool"]
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


def test_the_page_begins_with_the_oldest_and_ends_with_the_tested_torch() -> None:
    """And says where ``predict`` begins."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (\d.+) \|$", PAGE, flags=re.MULTILINE)]
    assert read_release(rows[0][0]) == OLDEST
    assert rows[0][2] == "no"
    assert read_release(next(row[0] for row in rows if row[2] == "yes")) == OLDEST_TO_PREDICT
    assert format_release(read_release(read_pins("constraints.txt")["torch"])) == rows[-1][0]
