"""Why something failed, in a line that may be kept.

Covers cutting an error's text down to what holds none of the user's files. Does not cover other words of an error:
what a user's own code raises is its author's.
"""

from __future__ import annotations

import re

__all__ = ["shorten"]

_LONGEST = 300
_LOOKED_AT = 2000
"""Some errors print a whole tensor in one line, and looking for paths takes the square of its length."""

_QUOTED_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1""")  # in quotes a path may hold blanks
_PATH = re.compile(
    r"""
    (?<![\w<])                                        # samples/s is no path, nor is what was already taken out
    (?: (?:[A-Za-z]+:|~\w*|\.{1,2})? [/\\]+ [^\s'",;:)\]]+    # /home/a, ~/a, ./a, C:\a, file:///a
      | [\w.-]+ (?:[/\\][\w.-]+){2,}                  # data/private/a
      | [\w.-]+ [/\\] [\w-]+ \.\w{1,5} \b             # data/a.csv
    )
    """,
    re.VERBOSE,
)


def shorten(text: str) -> str:
    """The first line that says anything, without paths, of at most 300 characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = _PATH.sub("<path>", _QUOTED_PATH.sub("<path>", line[:_LOOKED_AT]))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST - 3]}..."
    return line.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written: it would stop all notes
