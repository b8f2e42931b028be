"""What a benchmark found: a table, and the goals it is held against, as Markdown.

Covers how numbers are shown. Does not cover how any of them was measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Goal", "Table", "judge", "show_goals", "write_part"]


@dataclass(frozen=True)
class Goal:
    """What was wanted, what was found, and whether that is the same, in words."""

    what: str
    wanted: str
    found: str
    verdict: str


@dataclass(frozen=True)
class Table:
    """One table with what must be known to read it."""

    title: str
    explanation: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    goals: Sequence[Goal] = ()

    def __str__(self) -> str:
        """The table as a section of a Markdown page."""
        return f"## {self.title}\n\n{self.explanation}\n\n{_draw(self.columns, self.rows)}\n"


def show_goals(tables: Sequence[Table]) -> str:
    """The goals of all tables as one, missed or met."""
    goals = [goal for table in tables for goal in table.goals]
    rows = [(goal.what, goal.wanted, goal.found, goal.verdict) for goal in goals]
    return _draw(("goal", "wanted", "found", "verdict"), rows)


def judge(met: bool, *, sure: bool = True) -> str:  # noqa: FBT001 - it reads as a question put to a judge
    """A verdict in words; ``sure`` is False where the noise of the measurement reaches over the goal."""
    return f"{'met' if met else 'MISSED'}{'' if sure else ', within the noise'}"


def write_part(page: Path, mark: str, text: str) -> None:
    """Replace one of the parts of a page, which others write the rest of; a part begins at its mark.

    Args:
        page: A Markdown file; it need not be there.
        mark: A word; it stands in a comment, which no reader sees.
        text: What comes instead of what stood there.
    """
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    parts = {"": ""}
    for part in re.split(r"^(?=<!-- \w+ -->$)", before, flags=re.MULTILINE):
        found = re.match(r"<!-- (\w+) -->\n", part)
        parts[found[1] if found else ""] = part[found.end() :].strip() if found else part.strip()
    parts[mark] = text.strip()
    marked = [f"<!-- {name} -->\n{part}" if name else part for name, part in sorted(parts.items()) if part]
    page.write_text("\n\n".join(marked) + "\n", encoding="utf-8")


def _draw(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
