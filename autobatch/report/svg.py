"""Writes scales, axes, marks and lines as SVG text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import markupsafe

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_FEWEST, _MOST = 3, 8
_FAR_APART = 200
"""From this ratio on the smaller values of a linear axis lie within a line's width of each other."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

# Ascending, each at most 2.5 times the one before, so that one of them gives three to eight ticks. Every third is a
# power, for a logarithmic scale. A rate may be far below one.
_DECIMAL_STEPS = [factor * 10.0**power for power in range(-15, 20) for factor in (1, 2, 5)]
_BINARY_STEPS = [
    float(factor * 1024**unit) for unit in range(len(_UNITS)) for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500)
]


class Scale(NamedTuple):
    """Values from ``low`` to ``high`` at positions from ``start`` to ``end``, by their logarithms if ``is_log``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def position(self, value: float) -> float:
        """Where the value lies; beyond the ends it is at the end."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / (self.high - self.low)
        if self.is_log:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def value(self, position: float) -> float:
        """What lies there."""
        share = (position - self.start) / (self.end - self.start)
        if self.is_log:
            return self.low * math.exp(share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)


def choose_scale(values: Iterable[float], start: float, end: float, *, margin: float = 1.12, least: float = 3) -> Scale:
    """A scale on which all positive values are distinct: logarithmic where they are 200 times apart, else from 0.

    It goes beyond the largest value by ``margin`` (1.1 is a tenth of its length); a linear one at least to ``least``
    (3 is enough for three whole numbers).
    """
    positive = [value for value in values if value > 0] or [1.0]
    smallest, largest = min(positive), max(positive)
    if largest < _FAR_APART * smallest:
        return Scale(0, max(largest * margin, least), start, end)
    ratio = largest / smallest  # margins as long as on a linear scale
    return Scale(smallest / ratio ** ((margin - 1) / 2), largest * ratio ** (margin - 1), start, end, is_log=True)


class Tick(NamedTuple):
    """A round value of an axis, and how it is written."""

    value: float
    label: str


def count_ticks(scale: Scale) -> list[Tick]:
    """Three to eight round numbers within the scale, ascending."""
    return [Tick(value, f"{value:.10g}") for value in _round_values(scale, _DECIMAL_STEPS)]


def byte_ticks(scale: Scale) -> list[Tick]:
    """Three to eight round numbers of bytes within the scale, ascending: ``20 MiB``, ``40 MiB``..."""
    values = _round_values(scale, _BINARY_STEPS)
    # On a linear scale all in the unit of the step: 1500 KiB is not 1.5 MiB.
    return [Tick(value, _label_bytes(value, value if scale.is_log else values[1] - values[0])) for value in values]


def _round_values(scale: Scale, steps: Sequence[float]) -> list[float]:
    low, high = scale.low, scale.high
    if not scale.is_log:
        rows = [(step, range(math.ceil(low / step), math.floor(high / step) + 1)) for step in steps]
        # Not by len(row), which ends in an OverflowError for a row of 2^63 numbers.
        step, factors = [(step, row) for step, row in rows if len(row[:_FEWEST]) == _FEWEST][-1]
        return [step * factor for factor in factors]
    powers = [power for power in steps[::3] if low <= power <= high]
    if len(powers) < _FEWEST:
        return sorted(value for power in steps[::3] for value in (power, 3 * power) if low <= value <= high)
    return powers[:: -(-len(powers) // _MOST)]


def _label_bytes(value: float, like: float) -> str:
    unit = max((unit for unit in range(len(_UNITS)) if like >= 1024**unit), default=0)
    return f"{value / 1024**unit:.10g} {_UNITS[unit]}" if value else "0"


def thin_ticks(ticks: Sequence[Tick]) -> Sequence[Tick]:
    """All of a few ticks, every other one of many: seven numbers of five digits side by side touch on a telephone."""
    return ticks[::2] if len(ticks) > 5 else ticks


class Frame(NamedTuple):
    """A picture's size and the plot inside of it, in units of the picture."""

    width: float = 440
    height: float = 300
    left: float = 78
    right: float = 424
    top: float = 30
    bottom: float = 246


FRAME = Frame()
"""Of the charts with axes."""


def escape(text: str) -> str:
    """Safe in HTML and in SVG, as text and as an attribute; what neither may hold becomes U+FFFD."""
    return str(markupsafe.escape(replace_unprintable(text)))


def replace_unprintable(text: str) -> str:
    """With U+FFFD for each character that neither HTML nor SVG may hold; not escaped."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def element(name: str, *children: str, about: str = "", **attributes: float | str) -> str:
    """``element("circle", cx=1.5, class_="fits")`` -> ``<circle cx="1.5" class="fits"></circle>``.

    ``children`` are markup, as other functions of this module return it; ``about``, which is shown when the element is
    pointed at, and the attributes' values are escaped here. An attribute without a value is left out.
    """
    children = (element("title", escape(about)), *children) if about else children
    given = ((key.removesuffix("_").replace("_", "-"), value) for key, value in attributes.items() if value != "")
    written = "".join(f' {key}="{_value(value)}"' for key, value in given)
    return f"<{name}{written}>{''.join(children)}</{name}>"


def _value(value: float | str) -> str:
    """Numbers to a hundredth, which is below what any screen can show."""
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}"


def picture(frame: Frame, title: str, about: str, *children: str) -> str:
    """A whole chart, with its name and description for those who do not see it."""
    names = element("title", escape(title)), element("desc", escape(about))
    return element("svg", *names, *children, role="img", viewBox=f"0 0 {frame.width:g} {frame.height:g}")


def label(text: str, x: float, y: float, kind: str = "", **attributes: str) -> str:
    """Text at a position; ``kind`` is its classes."""
    return element("text", escape(text), x=x, y=y, class_=kind, **attributes)


def dot(x: float, y: float, kind: str, about: str, radius: float = 4.5) -> str:
    """A circle that says what it is when pointed at."""
    return element("circle", about=about, cx=x, cy=y, r=radius, class_=kind)


def cross(x: float, y: float, kind: str, about: str) -> str:
    """An upright cross turned by 45 degrees, centred there."""
    arms = f"M{_value(x - 5)} {_value(y - 5)} l10 10 m0 -10 l-10 10"
    return element("path", about=about, d=arms, class_=kind)


def triangle(x: float, y: float, kind: str, about: str, *, height: float = 9) -> str:
    """A triangle around there; it points up, or down with a negative height."""
    shape = f"M{_value(x - 5.5)} {_value(y + height / 2)} h11 l-5.5 {_value(-height)} z"
    return element("path", about=about, d=shape, class_=kind)


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through the points; nothing where there are less than two."""
    corners = [f"{_value(x)} {_value(y)}" for x, y in points]
    return element("path", d="M" + " L".join(corners), class_=kind) if len(corners) > 1 else ""


def band(left: float, top: float, right: float, bottom: float, kind: str) -> str:
    """A filled rectangle between two heights; nothing where it has none."""
    if bottom - top <= 0 or right - left <= 0:
        return ""
    return element("rect", x=left, y=top, width=right - left, height=bottom - top, class_=kind)


def axes(across: Scale, x_name: str, upward: Scale, y_name: str, *, in_bytes: bool = False) -> str:
    """Both axes of a plot with their ticks, named below the one and above the other; upward may be ``in_bytes``."""
    left, right, top, bottom = FRAME.left, FRAME.right, FRAME.top, FRAME.bottom
    drawn, log_scale = [], ("", " (log scale)")
    for value, text in thin_ticks(count_ticks(across)):
        x = across.position(value)
        drawn.append(element("path", d=f"M{_value(x)} {bottom:g} v5", class_="axis"))
        drawn.append(label(text, x, bottom + 21, "soft middle", data_across=f"{value:.17g}"))
    for value, text in byte_ticks(upward) if in_bytes else count_ticks(upward):
        y = upward.position(value)
        drawn.append(element("path", d=f"M{left:g} {_value(y)} H{right:g}", class_="grid"))
        drawn.append(label(text, left - 7, y + 4.5, "soft end", data_upward=f"{value:.17g}"))
    return "".join(
        [
            *drawn,
            element("path", d=f"M{left:g} {top:g} V{bottom:g} H{right:g}", class_="axis"),
            label(x_name + log_scale[across.is_log], (left + right) / 2, bottom + 44, "soft middle"),
            label(y_name + log_scale[upward.is_log], 4, 18, "soft"),
        ]
    )
