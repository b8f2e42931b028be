"""SVG's elements: escaped, well-formed, without what XML may not hold."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.report.svg import Frame, band, cross, dot, element, escape, picture, polyline, triangle


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn"))))
def test_any_text_survives_as_text_and_as_attribute(text):
    """What is read back is what was given."""
    read = ET.fromstring(element("p", escape(text), title=text))
    assert (read.text or "") == text
    assert read.get("title", "") == text


@given(before=st.text("<&ab"), wrong=st.sampled_from("\x00\x1b\x7f\x9f\ud800\uffff"))
def test_what_xml_cannot_hold_is_marked(before, wrong):
    """Control characters and halves of pairs become the replacement character, one for one."""
    assert ET.fromstring(f"<p>{escape(before + wrong)}</p>").text == before + "\N{REPLACEMENT CHARACTER}"
    escape(wrong).encode()


def test_nothing_is_drawn_of_nothing():
    """A band without height and a line of one point leave no mark."""
    assert band(0, 10, 5, 10, "beyond") == ""
    assert polyline([(1, 2)], "curve") == ""
    assert polyline([(1, 2), (3, 4.125)], "curve") == '<path d="M1 2 L3 4.12" class="curve"></path>'


def test_a_picture_says_what_it_is():
    """A role, a title and a description come first, and all values are escaped."""
    svg = ET.fromstring(picture(Frame(), "<title>", 'a "b"', element("g")))
    assert svg.get("role") == "img"
    assert [child.tag for child in svg] == ["title", "desc", "g"]
    assert svg[0].text == "<title>"
    assert svg[1].text == 'a "b"'


@pytest.mark.parametrize("mark", [dot, cross, triangle])
def test_a_mark_says_what_it_is_when_pointed_at(mark):
    """As a title inside of it, escaped."""
    drawn = ET.fromstring(mark(1, 2, "trial", "<43 & more>"))
    assert drawn.find("title").text == "<43 & more>"
    assert drawn.get("class") == "trial"
