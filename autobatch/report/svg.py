"""Writes marks, lines and axes as SVG text.

Covers escaping and the few shapes that the charts are made of; colours are classes (``style``). No element has an id,
so that any number of charts can be on one page. Does not cover what is drawn (``charts``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import markupsafe

from autobatch.report.scales import Scale, Tick

__all__ = [
    "Frame",
    "axes",
    "band",
    "cross",
    "dot",
    "element",
    "escape",
    "label",
    "picture",
    "polyline",
    "replace_unprintable",
    "room_for",
    "triangle",
]

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Frame:
    """A picture's size and the plot inside of it, in units of the picture."""

    width: float = 440
    height: float = 300
    left: float = 78
    right: float = 424
    top: float = 30
    bottom: float = 246


def escape(text: str) -> str:
    """Safe in HTML and in SVG, as text and as an attribute; what neither may hold becomes U+FFFD."""
    return str(markupsafe.escape(replace_unprintable(text)))


def replace_unprintable(text: str) -> str:
    """With U+FFFD for each character that neither HTML nor SVG may hold; not escaped."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def element(name: str, *children: str, **attributes: float | str) -> str:
    """``element("circle", cx=1.5, class_="fits")`` -> ``<circle cx="1.5" class="fits"></circle>``.

    Args:
        name: Of the element.
        children: Markup, as other functions of this module return it; text has to be escaped.
        attributes: ``_`` stands for ``-``, and one at the end for nothing. Values are escaped here; those without any
            are left out.
    """
    given = ((key.removesuffix("_").replace("_", "-"), value) for key, value in attributes.items() if value != "")
    written = "".join(f' {key}="{_value(value)}"' for key, value in given)
    return f"<{name}{written}>{''.join(children)}</{name}>"


def picture(frame: Frame, title: str, about: str, *children: str) -> str:
    """A whole chart, with its name and description for those who do not see it."""
    return element(
        "svg",
        element("title", escape(title)),
        element("desc", escape(about)),
        *children,
        role="img",
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
    )


def label(text: str, x: float, y: float, kind: str = "") -> str:
    """Text at a position; ``kind`` is its classes."""
    return element("text", escape(text), x=x, y=y, class_=kind)


def dot(x: float, y: float, kind: str, about: str, radius: float = 4.5) -> str:
    """A circle that says what it is when pointed at."""
    return element("circle", element("title", escape(about)), cx=x, cy=y, r=radius, class_=kind)


def cross(x: float, y: float, kind: str, about: str) -> str:
    """An upright cross turned by 45 degrees, centred there."""
    arms = f"M{_value(x - 5)} {_value(y - 5)} l10 10 m0 -10 l-10 10"
    return element("path", element("title", escape(about)), d=arms, class_=kind)


def triangle(x: float, y: float, kind: str, about: str, *, height: float = 9) -> str:
    """A triangle around there; it points up, or down with a negative height."""
    shape = f"M{_value(x - 5.5)} {_value(y + height / 2)} h11 l-5.5 {_value(-height)} z"
    return element("path", element("title", escape(about)), d=shape, class_=kind)


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through the points; nothing where there are less than two."""
    corners = [f"{_value(x)} {_value(y)}" for x, y in points]
    return element("path", d="M" + " L".join(corners), class_=kind) if len(corners) > 1 else ""


def band(left: float, top: float, right: float, bottom: float, kind: str) -> str:
    """A filled rectangle between two heights; nothing where it has none."""
    if bottom - top <= 0 or right - left <= 0:
        return ""
    return element("rect", x=left, y=top, width=right - left, height=bottom - top, class_=kind)


def axes(
    frame: Frame,
    across: tuple[Scale, Sequence[Tick], str],
    upward: tuple[Scale, Sequence[Tick], str],
) -> str:
    """Both axes: the scale, its ticks and what it shows, named below the one and above the other."""
    x_scale, x_ticks, x_name = across
    y_scale, y_ticks, y_name = upward
    corner = f"M{frame.left:g} {frame.top:g} V{frame.bottom:g} H{frame.right:g}"
    return "".join(
        [
            *(_tick_across(frame, x_scale.position(tick.value), tick) for tick in room_for(x_ticks)),
            *(_tick_upward(frame, y_scale.position(tick.value), tick) for tick in y_ticks),
            element("path", d=corner, class_="axis"),
            label(x_name, (frame.left + frame.right) / 2, frame.bottom + 44, "soft middle"),
            label(y_name, 4, 18, "soft"),
        ]
    )


def room_for(ticks: Sequence[Tick]) -> Sequence[Tick]:
    """All of a few ticks, every other one of many: seven numbers of five digits side by side touch on a telephone."""
    return ticks[::2] if len(ticks) > 5 else ticks


def _tick_across(frame: Frame, x: float, tick: Tick) -> str:
    mark = element("path", d=f"M{_value(x)} {frame.bottom:g} v5", class_="axis")
    text = element(
        "text", escape(tick.label), x=x, y=frame.bottom + 21, class_="soft middle", data_across=f"{tick.value:.17g}"
    )
    return mark + text


def _tick_upward(frame: Frame, y: float, tick: Tick) -> str:
    line = element("path", d=f"M{frame.left:g} {_value(y)} H{frame.right:g}", class_="grid")
    text = element(
        "text", escape(tick.label), x=frame.left - 7, y=y + 4.5, class_="soft end", data_upward=f"{tick.value:.17g}"
    )
    return line + text


def _value(value: float | str) -> str:
    """Numbers to a hundredth, which is below what any screen can show."""
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}"
