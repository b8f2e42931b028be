"""Where the ledger is, whether it is enabled, and one warning for each cause."""

from __future__ import annotations

import os

import pytest

from autobatch.ledger.ledger import find_home, is_enabled


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *((word, False) for word in ("off", "Off ", "0", "False", "NO")),
        *((word, True) for word in ("", "1", "offline")),
    ],
)
def test_the_ledger_is_off_if_a_word_says_so(monkeypatch, word, expected):
    """In any case of letters; nobody has to ask for it."""
    monkeypatch.setenv("AUTOBATCH_LEDGER", word)
    assert is_enabled() is expected


def test_the_environment_names_the_home(monkeypatch, tmp_path):
    """As a path, from ~ or from the working directory; always absolute."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for named, expected in [(tmp_path / "here", "here"), ("~/there", "there"), ("below", "below")]:
        monkeypatch.setenv("AUTOBATCH_HOME", str(named))
        assert find_home() == tmp_path / expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="other systems have other folders")
def test_without_it_the_home_is_the_users_state_folder(monkeypatch, tmp_path):
    """The platform's folder for it, not the home folder itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for word in ("AUTOBATCH_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(word, raising=False)
    home = find_home()
    assert home.name == "autobatch"
    assert tmp_path in home.parents
    monkeypatch.setenv("AUTOBATCH_HOME", "  ")
    assert find_home() == home


@pytest.mark.skipif(os.name != "posix", reason="there is always a profile")
def test_where_no_home_is_known_that_is_said(monkeypatch, tmp_path):
    """A folder that is called ~ in the working directory is not what anybody meant."""
    import pwd

    def know_nobody(_):
        raise KeyError("no such user")

    for word in ("HOME", "AUTOBATCH_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(word, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", know_nobody)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="set AUTOBATCH_HOME"):
        find_home()
