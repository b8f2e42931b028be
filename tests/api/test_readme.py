"""The pages that newcomers read first: what they show runs and prints that, and what they name exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest

import autobatch

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML by itself")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
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


class Example(NamedTuple):
    """A block of Python, and what the page says that it prints."""

    code: str
    printed: str


def _examples(page: str = README) -> list[Example]:
    """Every Python block of a page in the order in which they run."""
    pattern = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.DOTALL)
    return [Example(code, printed) for code, printed in pattern.findall(page)]


def _without_times(text: str) -> str:
    return re.sub(r"\d+\.\d s$", "? s", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each block prints, errors and warnings included, when all are run as one program from the top."""
    mark = "=== next block ==="
    program = f"\nprint({mark!r}, flush=True)\n".join(example.code for example in _examples())
    ran = subprocess.run(
        [sys.executable, "-u", "-W", "error", "-c", program],
        cwd=tmp_path_factory.mktemp("readme"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return [part.removeprefix("\n") for part in ran.stdout.split(mark)]


@pytest.mark.parametrize("index", range(len(_examples())))
def test_a_block_prints_what_the_page_shows(outputs: list[str], index: int) -> None:
    """Blocks run one after the other in one namespace, and each prints exactly what stands below it, but for times."""
    assert _without_times(outputs[index]) == _without_times(_examples()[index].printed)


def _first_example() -> Example:
    return _examples()[0]


def _run_fresh(arguments: list[str], folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, which reads the text from its stdin."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"},
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_first_screen_runs_as_it_stands(tmp_path: Path) -> None:
    """As a script with nothing before it, it prints the plan that is shown."""
    done = _run_fresh(["-W", "error", "-"], tmp_path, _first_example().code)
    assert done.returncode == 0, done.stderr
    assert _without_times(done.stdout) == _without_times(_first_example().printed)
    assert done.stderr == ""


def test_the_first_screen_can_be_pasted_into_python(tmp_path: Path) -> None:
    """Line by line, as the interactive interpreter takes it, where an empty line ends a block and nothing else does."""
    done = _run_fresh(["-W", "error", "-i", "-q"], tmp_path, _first_example().code)
    assert _without_times(done.stdout) == _without_times(_first_example().printed)
    assert "Error" not in done.stderr
    assert set(done.stderr.split()) <= {">>>", "..."}


def test_a_reader_with_the_loader_of_the_old_loop_gets_steps_of_the_target(tmp_path: Path) -> None:
    """Every step on the first screen has 256 samples, though the loader yields 32, and the log has no warning."""
    look = "\nassert loader.batch_size == 32\n"
    look += "print([sum(result.micro_batch_sizes) for result in runner.run(loader)], runner.steps)\n"
    done = _run_fresh(["-W", "error", "-"], tmp_path, _first_example().code + look)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[256, 256, 256, 256] 8"  # four are the page's own
    assert done.stderr == ""  # where the logger writes what is a warning or worse


def test_the_docs_begin_with_the_readmes_sentence() -> None:
    """The same sentence comes first on both pages; the program is on one."""
    assert INDEX.splitlines()[:3] == README.splitlines()[:3]
    assert _first_example().code not in INDEX


def test_the_readme_is_short() -> None:
    """Everything that a newcomer need not read first is in docs/."""
    assert len(README.split()) <= MOST_WORDS


def test_the_first_screen_is_a_sentence_a_script_and_a_plan() -> None:
    """One sentence, a script of at most 25 lines, the plan it prints, and two commands come before everything else."""
    sentence, rest = README.removeprefix("# autobatch\n\n").split("\n\n", 1)
    assert "\n" not in sentence
    assert rest.startswith("```python\nimport autobatch\n")
    code, printed = _first_example()
    assert len([line for line in code.splitlines() if line]) <= 25
    assert PLAN_LINE.fullmatch(printed.splitlines()[0])
    first_screen = README.partition("## ")[0]
    assert re.findall(r"^make (\w+)", first_screen, flags=re.MULTILINE) == ["demo", "test"]


def test_the_plan_shown_divides_its_target() -> None:
    """The sizes below the plan's line sum to the target that it names."""
    line, sizes, *_ = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)[0].splitlines()
    committed = ast.literal_eval(sizes.rpartition(" ")[0])
    assert sum(committed) == int(line.split()[1])


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
    """What the page says is shown by a test, is a function of that name; each guarantee of the table names one."""
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


def test_what_others_leave_behind_is_what_was_measured() -> None:
    """Each cell marked *ran* that has a figure or a state stands on the page of results."""
    measured = RESULTS.partition("# What others leave behind")[2].partition("<!--")[0]
    for shown, found in (
        ("two continued with 16 and 10, *ran*", "they continue with 16 and 10."),
        ("16 x 2 became 14 x 2, *ran*", "| Trainer, `auto_find_batch_size` | 32 | 28 |"),
        ("of the same 32 samples, *ran*", "| autobatch `Runner` | 32 | 32 |"),
        ("as before, bit for bit, *ran*", "| autobatch `fit` | as before | as before | as before |"),
        ("random generators and non-persistent buffers not, *ran*", "| as before | changed | changed |"),
        ("weights and generators changed, *ran*", "`find_executable_batch_size` | changed | changed | changed |"),
        ("stays at 2, *ran*", "is 2 before the search and 2 after it"),
        (
            "starts again at step 0 with weights already trained, *ran*",
            "continues at step 0 with weights that are already",
        ),
    ):
        assert shown in COMPARISON, shown
        assert found in measured, found


def test_the_readme_compares_with_the_same_figures() -> None:
    """The few figures in the README are cells of that table."""
    paragraph = README.partition("## Compared with other tools\n")[2].partition("##")[0]
    table = COMPARISON.partition("| who | found |")[2].partition("\n\n")[0]
    figures = set(re.findall(r"\d+", paragraph)) - {"8192", "300"}
    assert len(figures) >= 8
    assert figures <= set(re.findall(r"\d+", table))


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
