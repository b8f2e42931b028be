"""The commands of a checkout: ``make quick``, ``make lint``, the hooks of a commit, and the picture of the packages."""

from __future__ import annotations

import itertools
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML by itself")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(file.parent.name for file in (ROOT / "autobatch").glob("*/__init__.py"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


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


def test_make_help_names_each_command() -> None:
    """Each phony target says what it does."""
    named = set(re.findall(r"^([a-z-]+): .*## ", MAKEFILE, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert named == set(phony[1].split())
    assert "quick" in named


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


def test_the_picture_has_the_layers_of_the_linter() -> None:
    """Packages at one height are of one layer, and those further up of a layer further up."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = {name: index for index, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    drawn: dict[str, float] = {}
    for text in ET.parse(ROOT / "docs" / "packages.svg").iter("{http://www.w3.org/2000/svg}text"):
        if "name" in (text.get("class") or "").split():
            drawn |= dict.fromkeys(re.findall(r"(\w+)/", "".join(text.itertext())), float(text.get("y", 0)))
    assert set(drawn) == set(PACKAGES)
    for upper, lower in itertools.combinations(sorted(drawn, key=lambda name: drawn[name]), 2):
        if drawn[upper] == drawn[lower]:
            assert floors[upper] == floors[lower], (upper, lower)
        else:
            assert floors[upper] < floors[lower], (upper, lower)


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
