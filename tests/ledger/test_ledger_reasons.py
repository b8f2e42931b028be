"""What is kept of an error's text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.ledger.failure_reason import shorten


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", ""),
        ("\n  \n", ""),
        ("CUDA out of memory.\nTried to allocate 2.00 GiB", "CUDA out of memory."),
        ("\n  first\nsecond", "first"),
        ("No such file: '/home/bob/my data.csv' here", "No such file: <path> here"),
        ('cannot open "C:\\Users\\bob\\a.pt"', "cannot open <path>"),
        ("cannot open /home/bob/a.pt: denied", "cannot open <path>: denied"),
        ("cannot open C:\\Users\\bob\\a.pt", "cannot open <path>"),
        ("cannot open ~/a.pt, ~bob/b, ./c/d and ../e", "cannot open <path>, <path>, <path> and <path>"),
        ("(/scratch/x) file:///scratch/x \\\\box\\share\\x", "(<path>) <path> <path>"),
        ("cannot open data/private/patients and data/a.csv", "cannot open <path> and <path>"),
        ("512 samples/s and/or 3 GiB/s at 4 / 5", "512 samples/s and/or 3 GiB/s at 4 / 5"),
        ("lone \udc80 surrogate", "lone ? surrogate"),
    ],
)
def test_a_reason_is_the_first_line_without_paths(text, kept):
    """One line, in which no file of the user's is named, and which can be written."""
    assert shorten(text) == kept


@given(st.text(st.characters()))
def test_any_text_becomes_a_line_that_can_be_kept(text):
    """At most 300 characters that are UTF-8, whatever was raised."""
    kept = shorten(text)
    assert len(kept) <= 300
    assert len(kept.splitlines()) <= 1
    kept.encode()


def test_a_long_line_is_cut_visibly():
    """Three dots say that there was more."""
    assert shorten("x" * 301) == "x" * 297 + "..."
    assert shorten("x" * 300) == "x" * 300


def test_an_endless_line_takes_no_time():
    """What is hardest to search is searched in a moment."""
    began = time.perf_counter()
    for text in ("'" + "/" * 10**6, "a." * 10**6, "'/" * 10**6):
        assert len(shorten(text)) <= 300
    assert time.perf_counter() - began < 20  # where each position begins a new search it takes hours
