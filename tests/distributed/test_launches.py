"""The tests of launchers can fail: what a command leaves behind is found, and killed, and so is one that hangs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from launches import launch

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")

SLEEPER = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"


def sleepers():
    """How many there are."""
    commands = [folder / "cmdline" for folder in Path("/proc").glob("[0-9]*")]
    return sum(1 for path in commands if path.exists() and path.read_bytes() == b"sleep\x001000\x00")


def test_what_is_left_behind_is_found_and_killed():
    """Also in a group of its own."""
    before = sleepers()
    (ran,) = launch([sys.executable, "-c", SLEEPER], grace_seconds=0.3)
    assert (ran.code, ran.left_behind) == (0, ["sleep 1000"])
    assert sleepers() == before


def test_what_hangs_is_killed_with_all_that_it_has_started():
    """At the limit; another command that has ended keeps its result."""
    before, began = sleepers(), time.monotonic()
    hung, ended = launch(
        [sys.executable, "-c", f"{SLEEPER}; import time; time.sleep(1000)"],
        [sys.executable, "-c", "import os; print(os.environ['WHO'], os.getpgid(0))"],
        limit_seconds=3.0,
        WHO="you",
    )
    assert time.monotonic() - began < 60
    assert (hung.code, ended.code) == (-9, 0)
    assert ended.line("you") != f"you {os.getpgid(0)}"
    assert sleepers() == before
