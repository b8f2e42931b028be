"""The pages that newcomers read first: named things exist, and code can be pasted."""

from __future__ import annotations

import ast
import code
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

import autobatch

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML by itself")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
COMPARISON = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = ROOT / "docs" / "how-it-works.svg"
MOST_WORDS = 900

PLAN_LINE = re.compile(
    r"autobatch: \d+ = \d+ x \d+( \(\w+ of \d+\))? on .+; peak [\d.]+( [KMG]iB)? of [\d.]+ [KMG]iB; "
    r"\d+ trials?, \d+ out of memory, \d+\.\d s"
)


def first_example() -> tuple[str, str]:
    """The first block of Python, and what the page says that it prints."""
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    return found[1], found[2]


def test_the_readme_is_short() -> None:
    """Everything that a newcomer need not read first is in docs/."""
    assert len(README.split()) <= MOST_WORDS


def test_the_first_screen_is_a_sentence_a_script_and_a_plan() -> None:
    """One sentence, a script of at most 25 lines, the plan it prints, and two commands come before everything else."""
    sentence, rest = README.removeprefix("# autobatch\n\n").split("\n\n", 1)
    assert "\n" not in sentence
    assert rest.startswith("```python\nimport autobatch\n")
    code, printed = first_example()
    assert len([line for line in code.splitlines() if line]) <= 25
    assert PLAN_LINE.fullmatch(printed.splitlines()[0])
    first_screen = README.partition("## ")[0]
    assert re.findall(r"^make (\w+)", first_screen, flags=re.MULTILINE) == ["demo", "test"]


def test_the_picture_shows_the_page_plan() -> None:
    """The picture is well-formed, needs nothing from outside, and shows the sizes of the plan and of the retry."""
    root = ET.parse(PICTURE).getroot()  # our own file
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    line = next(iter(re.findall(r"^autobatch: (.*?) on ", README, flags=re.MULTILINE)))
    retried = next(iter(re.findall(r"^(\(43.*\)) 0$", README, flags=re.MULTILINE)))
    assert line in texts
    assert " ".join(map(str, ast.literal_eval(retried))) in texts
    assert "prefers-color-scheme: dark" in PICTURE.read_text()
    assert not re.search(r"href|https?://(?!www\.w3\.org/2000/svg)", PICTURE.read_text())


def _test_functions() -> set[str]:
    """The names of all tests in this folder."""
    return {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_each_test_that_is_named_exists() -> None:
    """Each test that the page names is a function of that name; each guarantee of the table names one."""
    table = CONTRACT.partition("| guarantee | shown by |\n")[2].partition("\n\n")[0]
    rows = table.splitlines()[1:]
    assert len(rows) >= 12
    assert all(re.search(r"`test_\w+`", row.split(" | ")[-1]) for row in rows)
    assert set(re.findall(r"`(test_\w+)`", CONTRACT)) <= _test_functions()


def test_each_figure_of_the_comparison_is_one_that_was_measured() -> None:
    """Rows of the table of searches, and the versions of peers, are those of benchmarks/RESULTS.md."""
    measured = {}
    for row in re.findall(r"^\| (.+? \| 300 \| .+) \|$", RESULTS, flags=re.MULTILINE):
        who, _, found, pieces, _, trials, shortages, _, samples = row.split(" | ")
        measured[who] = [found, pieces, trials, shortages, samples]
    table = COMPARISON.partition("| who | found |")[2].partition("\n\n")[0]
    shown = {row[2:-2].split(" | ")[0]: row[2:-2].split(" | ")[1:] for row in table.splitlines()[2:]}
    assert {"autobatch", "Lightning `BatchSizeFinder`, binsearch"} < set(shown)
    assert shown == {who: measured[who] for who in shown}
    versions = re.findall(r"(pytorch-lightning|accelerate) ([\d.]+\d)", COMPARISON.partition("## ")[0])
    assert len(versions) == 2
    assert all(f"{name} {version}" in RESULTS for name, version in versions)


@pytest.mark.parametrize("page", ["README.md", "docs/ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_each_link_into_the_repository_leads_somewhere(page: str) -> None:
    """Files that a page links to are there, and so are the headings."""
    file = ROOT / page
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", file.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = (file.parent / path) if path else file
        assert target.is_file(), link
        titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not heading or heading in [title.lower().replace(" ", "-") for title in titles], link


def test_each_command_that_is_named_can_be_made() -> None:
    """A ``make`` target that a page names is in the Makefile."""
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert (
        set(re.findall(r"(?:^|`)make ([a-z-]+)", README + ARCHITECTURE + CONTRACT + CONTRIBUTING, flags=re.MULTILINE))
        <= made
    )


def test_each_public_name_in_the_pages_exists() -> None:
    """``autobatch.something`` on a page is a public name, or a module of the package."""
    for name in re.findall(r"\bautobatch\.(\w+)", README + ARCHITECTURE + CONTRACT + COMPARISON):
        assert name in autobatch.__all__


def test_each_package_is_described_and_each_path_that_is_named_exists() -> None:
    """The table of packages has a line for every package, and what the page names lies where it says."""
    package = ROOT / "autobatch"
    table = ARCHITECTURE.partition("## Packages")[2].partition("## Layers")[0]
    described = set(re.findall(r"^\| `(\w+)/` \|", table, flags=re.MULTILINE))
    assert described == {file.parent.name for file in package.glob("*/__init__.py")}
    for path in re.findall(r"`([\w/]+(?:/|\.py))`", ARCHITECTURE):
        assert (package / path).exists() or (ROOT / path).exists(), path


def test_the_layers_are_those_that_the_linter_holds() -> None:
    """The list of layers is the one in pyproject.toml, line by line."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    shown = ARCHITECTURE.partition("## Layers")[2].partition("```text\n")[2].partition("```")[0].splitlines()
    assert shown == [layer.replace("(", "").replace(")", "") for layer in layers]


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
