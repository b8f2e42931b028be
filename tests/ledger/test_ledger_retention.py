"""How much is kept, and the user's word on it."""

from __future__ import annotations

import logging

import pytest

from autobatch.ledger import warnings
from autobatch.ledger.retention import Retention, find_retention


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    """Begin as a process that has complained of nothing."""
    monkeypatch.setattr(warnings, "_told", set())


@pytest.mark.parametrize(("word", "days"), [("", 400.0), ("30", 30.0), (" 0.5 ", 0.5)])
def test_the_environment_changes_the_days(monkeypatch, word, days):
    """Days may be parts of one; the count of plans stays."""
    monkeypatch.setenv("AUTOBATCH_RETENTION_DAYS", word)
    assert find_retention() == Retention(days=days)


@pytest.mark.parametrize("word", ["a year", "0", "-3", "nan", "inf", "1e999"])
def test_what_is_no_number_of_days_is_told_once(monkeypatch, caplog, word):
    """It costs one line with the word in it, and the default is used: nothing is deleted for a typing error."""
    monkeypatch.setenv("AUTOBATCH_RETENTION_DAYS", word)
    with caplog.at_level(logging.WARNING, "autobatch"):
        assert [find_retention(), find_retention()] == [Retention(), Retention()]
    assert len(caplog.records) == 1
    assert word in caplog.text
