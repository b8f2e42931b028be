"""The site: what its pages run and print, what they link to, and whether every error is explained.

A block of Python is run unless a comment above it says why not; ``file`` writes it to a file instead. A ``console``
block's commands are run after the page's Python, in the same folder. ``differs`` compares with all numbers masked,
``shown`` does not compare.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from builders.forked_programs import Ran, run_program
from sampling import sample

import autobatch
from autobatch import errors, events
from autobatch.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
PICTURES = sorted(path.name for path in DOCS.glob("*.svg"))
BORROWED = {
    DOCS / "results.md": ROOT / "benchmarks" / "RESULTS.md",
    DOCS / "changelog.md": ROOT / "CHANGELOG.md",
    DOCS / "contributing.md": ROOT / "CONTRIBUTING.md",
}
"""Pages whose headings stand in another file."""

MARK = "=== next block ==="
MODULES = ("batches", "hooks", "testing")
"""Public names that are modules."""


class Block(NamedTuple):
    """A fenced block, the comment above it, and the block of text right below it."""

    mark: str
    language: str
    content: str
    printed: str
    printed_mark: str


def read_page(page: str) -> str:
    """Its text as it is in the repository."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    mark = r"(?:<!-- ((?:file|not run|differs|shown): .+?) -->\n)?"
    pattern = rf"^{mark}```(\w+)\n(.*?)^```$(?:\n\n{mark}```text\n(.*?)^```$)?"
    found = re.findall(pattern, read_page(page), flags=re.MULTILINE | re.DOTALL)
    return [Block(before, language, code, text, between) for before, language, code, between, text in found]


def normalise(text: str, mark: str = "") -> str:
    """Without what differs from run to run: seconds and ids always, all numbers and spaces where the page says so."""
    text = re.sub(r"\d+\.\d s\b", "? s", text).strip()
    text = re.sub(r"relative error \S+?(?=[:,;)\s]|$)", "relative error ?", text)
    if mark.startswith("differs"):
        text = re.sub(r"[0-9a-f]{12,}|[\d.]+", "#", text)
        text = re.sub(r"\s+", " ", re.sub(r"[-+#~*.]{3,}", "#", text))
    return text


def environment(home: Path) -> dict[str, str]:
    """Environment of a process that runs a page's code."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    found |= {"MLFLOW_TRACKING_URI": (home / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    found |= {"MLFLOW_DISABLE_TELEMETRY": "true", "COLUMNS": "80"}
    return {**found, "AUTOBATCH_HOME": str(home), "AUTOBATCH_LEDGER": "on"}


def run(program: Path) -> Ran:
    """Run it in its folder, with stderr between stdout's lines."""
    return run_program(program, environment(program.parent / "home"))


def commands_in(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what stands below it."""
    for part in re.split(r"^\$ ", block.content, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def run_python(page: str, folder: Path) -> None:
    """Run the page's Python as one program, and compare what each block prints."""
    blocks = []
    for block in blocks_of(page):
        if block.language == "python" and block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.content, encoding="utf-8")
        elif block.language == "python" and not block.mark:
            blocks.append(block)
    if not blocks:
        return
    (folder / "page.py").write_text(f"\nprint({MARK!r}, flush=True)\n".join(block.content for block in blocks))
    ran = run(folder / "page.py")
    assert ran.returncode == 0, ran.stdout
    for block, printed in zip(blocks, ran.stdout.split(f"{MARK}\n"), strict=True):
        if not block.printed_mark.startswith("shown"):
            assert normalise(printed, block.printed_mark) == normalise(block.printed, block.printed_mark), printed


def run_console(page: str, folder: Path) -> None:
    """Run the page's commands in one process, since each imports torch, and compare their output."""
    shown = []
    for block in blocks_of(page):
        if block.language == "console" and not block.mark.startswith("not run"):
            shown += [(block.mark, command, printed) for command, printed in commands_in(block)]
    if not shown:
        return
    assert all(command.startswith("autobatch ") for _, command, _ in shown)
    lines = ["from autobatch.cli.main import main"]
    for _, command, _ in shown:
        lines += [f"assert main({shlex.split(command)[1:]!r}) in (0, 1)", f"print({MARK!r}, flush=True)"]
    (folder / "console.py").write_text("\n".join(lines))
    ran = run(folder / "console.py")
    assert ran.returncode == 0, ran.stdout
    for (mark, _, expected), printed in zip(shown, ran.stdout.split(f"{MARK}\n")[:-1], strict=True):
        if not mark.startswith("shown"):
            assert normalise(printed, mark) == normalise(expected, mark), printed


def has_code(page: str) -> bool:
    return any(block.language in {"python", "console"} for block in blocks_of(page))


@pytest.mark.parametrize("page", ["../README.md", *sample([page for page in PAGES if has_code(page)], 3)])
def test_what_a_page_shows_runs_and_prints_that(page: str, tmp_path: Path) -> None:
    """A page's Python is one program and its commands follow, and each prints what stands below it."""
    run_python(page, tmp_path)
    run_console(page, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_says_why(page: str) -> None:
    """Every mark has a reason or a name, and only blocks with a mark are left out."""
    marks = re.findall(r"^<!-- (file|not run|differs|shown): ?(.*) -->$", read_page(page), flags=re.MULTILINE)
    assert all(len(reason) > 3 for _, reason in marks)
    blocks = [mark for block in blocks_of(page) for mark in (block.mark, block.printed_mark) if mark]
    assert len(marks) == len(blocks), "a mark that stands above no block"


def slugs_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_each_link_leads_somewhere(page: str) -> None:
    """Files and headings that a page links to are there."""
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", read_page(page).replace("\n", " ")):
        path, _, heading = link.partition("#")
        target = (DOCS / page).parent / path if path else DOCS / page
        assert target.is_file(), link
        target = target.resolve()
        assert not heading or heading in slugs_of(BORROWED.get(target, target)), link


@pytest.mark.parametrize("page", PAGES)
def test_each_page_can_be_reached(page: str) -> None:
    """Every page is in the index's list, and so in the site's menu."""
    listed = set(re.findall(r"^([\w/-]+)$", read_page("index.md"), flags=re.MULTILINE))
    assert page == "index.md" or page.removesuffix(".md") in listed


def shown_commands() -> Iterator[tuple[str, str]]:
    """Every whole ``autobatch ...`` on a page, in a block or between backticks."""
    for page in PAGES:
        text = read_page(page)
        for line in re.findall(r"^(?:\$ )?autobatch ([a-z].*)$", text, flags=re.MULTILINE):
            yield page, line
        for line in re.findall(r"`autobatch ([a-z][^`]*)`", text):
            yield page, line


@pytest.mark.parametrize(("page", "line"), sorted(set(shown_commands())))
def test_each_command_that_is_shown_is_known(
    page: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is a command, and its options are in that command's help."""
    name, *arguments = shlex.split(line)
    monkeypatch.setenv("COLUMNS", "200")
    within = ("token", "create", "list", "revoke", "backup", "restore", "prune")  # commands of `autobatch serve`
    inner = [word for word in arguments if name == "serve" and word in within]
    assert main([name, *inner, "--help"]) == 0, page
    assert {argument for argument in arguments if argument.startswith("--")} <= set(
        re.findall(r"--[a-z-]+", capsys.readouterr().out)
    )


def test_every_command_has_a_section() -> None:
    """The page of the command line has one heading for each command that ``--help`` lists, by its name."""
    names = set(re.findall(r"@_command\ndef (\w+)", (ROOT / "autobatch" / "cli" / "main.py").read_text()))
    assert len(names) >= 10
    assert names <= slugs_of(DOCS / "howto" / "command-line.md")


def test_every_public_name_is_in_the_api() -> None:
    """Each name of ``autobatch.__all__``, of its modules and events is documented."""
    page = read_page("api.md")
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", page, flags=re.MULTILINE))
    spelled = {f"autobatch.{name}" for name in autobatch.__all__ if name not in {"__version__", *MODULES}}
    assert spelled <= documented
    for module in map(importlib.import_module, ("autobatch.events", *(f"autobatch.{name}" for name in MODULES))):
        names = {f"{module.__name__}.{name}" for name in module.__all__}
        assert names - {"autobatch.events.emit", "autobatch.events.log_event"} <= documented


def _spell(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"(… ?)+(?<! )|…+", "…", "".join(_spell(part) for part in node.values))
    if isinstance(node, ast.BinOp):
        return f"{_spell(node.left)}{_spell(node.right)}".replace("……", "…")
    return "…"


def strings_of_the_package() -> str:
    """Return every string in the package's source, one a line, with an ellipsis for each value in it."""
    strings = [
        _spell(node)
        for file in sorted((ROOT / "autobatch").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.JoinedStr, ast.Constant))
    ]
    return re.sub(r"%[sd]", "…", "\n".join(strings))


def sections_of_errors() -> dict[str, str]:
    """Return the text below each heading of the page of errors."""
    found = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", read_page("errors.md"), flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def quoted_in(section: str) -> list[str]:
    """Return the messages in its tables: a cell in backticks, in a row of an event behind the event's name."""
    return re.findall(r"^\| (?:`\w+` \| )?`([^`]* [^`]*)` \|", section, flags=re.MULTILINE)


@pytest.mark.parametrize("name", errors.__all__)
def test_each_class_of_error_is_explained(name: str) -> None:
    """The page says what happened and what to do, and quotes at least one message."""
    section = sections_of_errors()[name]
    assert quoted_in(section)
    if name != "AutobatchError":
        assert "**What happened.** " in section
        assert "**What to do.** " in section


def test_each_warning_is_explained() -> None:
    """The page has a line for each event that may be a warning in the log."""
    levels = {
        name: vars(getattr(events, name)).get("level")
        for name in set(events.__all__) - {"Event", "Hook"}
        if name[0].isupper()
    }
    warn = {name for name, level in levels.items() if isinstance(level, property) or level == logging.WARNING}
    assert len(warn) >= 8
    assert warn == set(re.findall(r"^\| `(\w+)` \|", sections_of_errors()["Warnings"], flags=re.MULTILINE))


def test_each_quoted_message_is_in_the_source() -> None:
    """A message on the page of errors is in the package, with an ellipsis where a value goes."""
    source = strings_of_the_package()
    quoted = [message for section in sections_of_errors().values() for message in quoted_in(section)]
    assert len(quoted) > 40
    assert [message for message in quoted if message not in source] == []


def test_each_picture_is_self_contained_and_knows_the_dark() -> None:
    """Pictures are well-formed, described, need nothing from outside, and have a dark version."""
    for name in PICTURES:
        root = ET.parse(DOCS / name).getroot()  # our own file
        assert root.find("{http://www.w3.org/2000/svg}title") is not None, name
        assert root.find("{http://www.w3.org/2000/svg}desc") is not None, name
        text = (DOCS / name).read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text, name
        assert not re.search(r"href|https?://(?!www\.w3\.org/2000/svg)", text), name


def texts_of(picture: str) -> str:
    root = ET.parse(DOCS / picture).getroot()  # our own file
    return " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))


def test_the_pictures_show_the_numbers_of_their_page() -> None:
    """Peaks in one picture and sizes in the other are those that the page's own code prints."""
    printed = "".join(block.printed for block in blocks_of("concepts.md"))
    peaks = re.findall(r"\d+\.\d", texts_of("peak.svg"))
    sizes = set(re.findall(r"\b[1-9]\d\d\b", texts_of("retry.svg"))) - {"682"}
    assert len(peaks) >= 4
    assert len(sizes) >= 2  # before the shortage and after it
    assert all(number in printed for number in (*peaks, *sizes))


def test_sections_of_docstrings_have_entries_alone():
    """The API page shows a sentence among them as an entry without a name."""
    found = []
    for file in sorted((ROOT / "autobatch").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            is_documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            text = (ast.get_docstring(node) if is_documented else None) or ""
            for section in re.findall(r"^(?:Args|Raises|Attributes):\n((?: .*\n?|\n)*)", text, flags=re.MULTILINE):
                entries = re.findall(r"^ {4}\S.*", section, flags=re.MULTILINE)
                found += [f"{file.name}: {one}" for one in entries if not re.match(r" {4}[\w*., ]+: ", one)]
    assert not found
