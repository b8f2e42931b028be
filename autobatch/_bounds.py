"""Bounds the numbers, texts and lists of records, so that one from a file is as safe to show as one made here.

A number beyond its bound is refused everywhere. A text is one line. A file with control characters or too many letters
in a text is refused. A record that is made here escapes and cuts such a text of a driver or a user, since a plan must
not be lost for it.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field, Strict, ValidationInfo

from autobatch._formatting import STEERING, is_one_line

MOST_SAMPLES = 10**8  # of one optimizer step: sizes are searched among twice the root of it
MOST_MICRO_BATCHES = 10**6  # of one optimizer step: a plan lists them one by one
LONGEST_TEXT = 4000  # letters
LONGEST_LIST = 10_000  # entries; trials, ranges of steps and warnings are far fewer
LARGEST = 2**63 - 1  # no device has as many bytes
SHORTEST = 1e-9  # seconds; a rate over less might be infinite
_LAST_MOMENT = 253_402_214_400.0  # the last day of the year 9999: the calendar ends there, in any time zone


def _check_text(text: str, info: ValidationInfo) -> str:
    if len(text) <= LONGEST_TEXT and is_one_line(text):
        return text
    if info.mode == "json":
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"a text of {len(text)} letters, more than {LONGEST_TEXT}")
        raise ValueError("a text with a line break or another control character")
    spelt = STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text[:LONGEST_TEXT])
    return spelt if len(spelt) <= LONGEST_TEXT and len(text) <= LONGEST_TEXT else f"{spelt[: LONGEST_TEXT - 3]}..."


def _check_ratio(value: float) -> float:
    if value < 0:
        raise ValueError("must be at least 0")
    return math.inf if math.isnan(value) else value  # nan is not known to be small


Text = Annotated[str, AfterValidator(_check_text)]  # one line of at most LONGEST_TEXT letters
LISTED = Field(max_length=LONGEST_LIST)  # of a tuple, as Annotated[tuple[...], LISTED]

# Strict: pydantic would take `true`, `3.0` and "3" for an int, and 1, "yes" and "off" for a bool.
Flag = Annotated[bool, Strict()]
Bytes = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Whole = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST)]  # a difference of two of them
Steps = Annotated[int, Strict(), Field(ge=1, le=MOST_MICRO_BATCHES)]  # micro-batches of one optimizer step
Target = Annotated[int, Strict(), Field(ge=1, le=MOST_SAMPLES)]  # samples of one optimizer step
Samples = Annotated[int, Strict(), Field(ge=1, le=2**31)]  # in one micro-batch

Ratio = Annotated[float, AfterValidator(_check_ratio)]  # may be infinite, where what it is relative to is 0
Seconds = Annotated[float, Strict(), Field(ge=0, le=1e10, allow_inf_nan=False)]
Moment = Annotated[float, Strict(), Field(ge=0, le=_LAST_MOMENT, allow_inf_nan=False)]  # since 1970, UTC; 0: not noted
