"""How bytes, counts and lists are said in a sentence.

Covers text for people. Does not cover whole reports (``report``). Bytes are int everywhere else; GiB appears only here.
"""

from __future__ import annotations

__all__ = ["format_bytes", "plural", "spell"]

_WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def format_bytes(count: int) -> str:
    """``1536`` -> ``"1.5 KiB"``; powers of 1024, one decimal from KiB on."""
    if abs(count) < 1024:
        return f"{count} bytes"
    size = float(count)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if abs(size) < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"


def plural(count: int, singular: str, several: str | None = None) -> str:
    """``plural(2, "trial")`` -> ``"2 trials"``."""
    return f"{count} {singular if count == 1 else several or singular + 's'}"


def spell(count: int) -> str:
    """Small counts as words, larger ones as digits: ``2`` -> ``"two"``, ``37`` -> ``"37"``."""
    return _WORDS[count] if 0 <= count < len(_WORDS) else str(count)
