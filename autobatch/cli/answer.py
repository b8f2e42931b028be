"""What a command answers: text for people, the same as data, and an exit code.

Covers the record and how it is put out. Does not cover any command.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["DONE", "NO", "USAGE", "Answer"]

DONE, NO, USAGE = 0, 1, 2
"""Exit codes: it was done; it was done and the answer is no; the command line cannot mean anything."""


class Answer(NamedTuple):
    """What is printed, and how the process ends.

    Attributes:
        text: For people.
        data: The same for programs: records, or what JSON can hold.
        code: One of the exit codes.
    """

    text: str
    data: Any
    code: int = DONE

    def show(self, *, as_json: bool) -> str:
        """As asked for with ``--json``."""
        if not as_json:
            return self.text
        from pydantic_core import to_jsonable_python  # noqa: PLC0415 - a quarter of the time that --help takes

        return json.dumps(to_jsonable_python(self.data), indent=2)
