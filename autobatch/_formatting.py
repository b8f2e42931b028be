"""Formats bytes and counts for sentences, and a user's own values for messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST_VALUE = 80  # characters of a value in a message, which is one line
_LONGEST_INT = 10**40
_LONGEST_FIELD = 40  # characters of a value in a record's repr
_LONGEST_REPR = 150

_VOWEL_SOUND = re.compile(
    r"[FHLMNRSX](?=[A-Z0-9]|$)"  # spelt letter by letter, as in SGD and LBFGS
    r"|(?i:(?!one|eu)[aeio])"  # but not OneCycleLR
    r"|[uU](?!s|ni|int|t|[A-Z])"  # but not UserDict, uint8 and UNet
)

STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: line breaks, escape sequences
    "\u2028\u2029"  # line and paragraph separators
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions: what is shown is not in the order of what is there
    "\ud800-\udfff]"  # halves of a character, which cannot be written as UTF-8
)

_WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def is_one_line(text: str) -> bool:
    """Return whether a text has no character that steers a terminal, ends the line or cannot be written."""
    return STEERING.search(text) is None


def format_bytes(count: int) -> str:
    """``1536`` -> ``"1.5 KiB"``; powers of 1024, one decimal from KiB on."""
    if abs(count) < 1024:
        return plural(count, "byte")
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


def divide_columns(widths: Sequence[int], gap: int, room: int) -> list[list[int]]:
    """Divide the columns of a table into blocks that fit; each block has the first column."""
    blocks = [[0]] if widths else []
    for index, wide in enumerate(widths[1:], 1):
        if len(blocks[-1]) > 1 and sum(widths[i] + gap for i in blocks[-1]) + wide > room:
            blocks.append([0])
        blocks[-1].append(index)
    return blocks


def with_article(name: str) -> str:
    """``"list"`` -> ``"a list"``, ``"object"`` -> ``"an object"``, ``"SGD"`` -> ``"an SGD"``."""
    return f"{'an' if _VOWEL_SOUND.match(name) else 'a'} {name}"


def name_type(value: Any) -> str:
    """Return the kind of an object: ``"an int"``; a class itself is ``"the class SGD"``."""
    return f"the class {value.__name__}" if isinstance(value, type) else with_article(type(value).__name__)


def show_value(value: Any) -> str:
    """Show an argument as its user wrote it, in one short line, or its type if that takes more.

    Python writes no int of more than 4300 digits (``sys.set_int_max_str_digits``), and ``repr`` of a user's own class
    may raise.
    """
    if isinstance(value, int) and abs(value) >= _LONGEST_INT:
        return f"an int of about {math.ceil(value.bit_length() * math.log10(2))} digits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of the user's own class, and the message is about something else
        return name_type(value)
    if len(text) > _LONGEST_VALUE and isinstance(value, str | bytes):
        text = f"{text[: _LONGEST_VALUE - 3]}..."
    return text if len(text) <= _LONGEST_VALUE and is_one_line(text) else name_type(value)


def describe_fields(kind: str, fields: Iterable[tuple[str, Any]]) -> str:
    """``Trial(micro_batch_size=43, outcome='fits', peak_reserved=18.0 GiB, ...)``, in one short line."""
    line = f"{kind}("
    for name, value in fields:
        shown = f"{name}={_show_field(name, value)}"
        if len(line) + len(shown) > _LONGEST_REPR:
            return f"{line}...)"
        line += f"{shown}, "
    return f"{line.removesuffix(', ')})"


def _show_field(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and ("bytes" in name or "peak" in name):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    text = repr(value)
    if len(text) <= _LONGEST_FIELD and is_one_line(text):
        return text
    if isinstance(value, str):
        return f"{text[: _LONGEST_FIELD - 4]}...'"
    return f"<{len(value)}>" if isinstance(value, tuple | list | dict | set) else f"{type(value).__name__}(...)"
