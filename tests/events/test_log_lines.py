"""Each log line names this package once, however the application has set up logging."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
import torch
from sampling import sample
from torch import nn

import autobatch
from autobatch.events import TrialFinished, emit
from autobatch.events.progress import showing_progress
from autobatch.records import Trial

OWN = "logging.getLogger('autobatch')"
DICT = (
    "{'version': 1, 'disable_existing_loggers': False, 'handlers': {'h': {'class': 'logging.StreamHandler'}}, 'root': "
    "{'handlers': ['h']}}"
)
SETUPS = {
    "none": ("", "autobatch: {line}"),
    "basicConfig": ("logging.basicConfig()", "WARNING:autobatch:{line}"),
    "debug": ("logging.basicConfig(level=logging.DEBUG)", "WARNING:autobatch:{line}"),
    "message alone": ("logging.basicConfig(format='%(message)s')", "{line}"),
    "its own handler": (f"{OWN}.addHandler(logging.StreamHandler())", "{line}"),
    "both": (f"{OWN}.addHandler(logging.StreamHandler())\n{OWN}.propagate = False\nlogging.basicConfig()", "{line}"),
    "silence": (f"{OWN}.addHandler(logging.NullHandler())", ""),
    "dictConfig": (f"import logging.config\nlogging.config.dictConfig({DICT})", "{line}"),
}
EMIT = """
from autobatch.events import SizeChanged, StepFailed, emit
emit(SizeChanged(step=4, old_size=86, new_size=43, reason="less is free"))
"""
LINE = "from step 4 on at most 43 samples in a micro-batch, before 86: less memory is free than that size needs"


@pytest.mark.parametrize("order", sample(["before the import", "after it"], 2))
@pytest.mark.parametrize("setup", SETUPS)
def test_a_warning_is_one_line_that_names_its_source_once(setup, order):
    """Without any set-up the name is in front, as Python's last resort would print the message alone."""
    code, expected = SETUPS[setup]
    parts = ["import logging", code, "import autobatch", EMIT]
    if order == "after it":
        parts = ["import autobatch", "import logging", code, EMIT]
    ran = subprocess.run([sys.executable, "-c", "\n".join(parts)], capture_output=True, text=True, check=True)
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("DEBUG:")]
    assert lines == ([expected.format(line=LINE)] if expected else [])
    assert ran.stdout == ""


def test_a_process_without_stderr_goes_on():
    """As one that pythonw has started."""
    code = f"import sys\nsys.stderr = None\nimport autobatch\n{EMIT}\nprint('done')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "done\n"


class Screen(io.StringIO):
    """A terminal, or a file, in place of stderr."""

    def __init__(self, is_terminal=True):
        super().__init__()
        self.isatty = lambda: is_terminal


def lines_of(call, monkeypatch, **screen):
    """The lines that the call has shown, without those of the bar."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Screen(**screen))
        call()
        lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", sys.stderr.getvalue()).splitlines()
        return [line for line in lines if line.startswith("autobatch: ") and "━" not in line]


def job():
    model = nn.Sequential(nn.Linear(8, 4))
    return model, torch.arange(64.0).reshape(8, 8), lambda model, batch: model(batch).square().mean()


def test_fit_shows_its_check_on_a_terminal(monkeypatch):
    """It takes as long as several trials; progress=False leaves that out too, and so does what is no terminal."""
    model, batch, step = job()

    def shown(is_terminal=True, **options):
        def call():
            autobatch.fit(model, 8, batch=batch, step=step, reuse=False, **options)

        return lines_of(call, monkeypatch, is_terminal=is_terminal)

    *trials, check = shown()
    assert trials
    assert all(line.startswith("autobatch: trial of ") for line in trials)
    assert check.startswith("autobatch: comparing")
    assert len(shown(check=None)) == len(trials)
    assert shown(progress=False) == []
    assert shown(is_terminal=False) == []


def test_a_narrow_terminal_breaks_lines_between_words(monkeypatch):
    """And the bar has room for its texts: a phone, or a pane beside an editor."""
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", screen)
    trial = Trial(micro_batch_size=1024, outcome="oom", peak_reserved=21 * 2**30, seconds=0.1, ended_in="backward")
    with showing_progress(progress=True) as hooks:
        emit(TrialFinished(trial=trial, limit_bytes=22 * 2**30), hooks)
    shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, shown)) <= 40
    assert "1024 samples: oom 21.0 GiB of 22.0 GiB" in shown
    assert "autobatch: trial of 1024 samples: oom " in shown


@pytest.mark.predicts
def test_predict_shows_each_trace_on_a_terminal(monkeypatch):
    """Also each other way to do the step, with how many there are; progress=False leaves that out."""
    model, batch, step = job()
    found = []

    def shown(**options):
        def call():
            found.append(autobatch.predict(model, batch, step, gpu="24GiB", target_batch=16, **options))

        return lines_of(call, monkeypatch)

    first, *others = shown(what_if=True)
    ways = [line for line in others if " what if: " in line]
    assert "trac" in first
    assert {change.name for change in found[0].changes} == {line.split(": ", 2)[2].rpartition(" (")[0] for line in ways}
    assert [line.rpartition("(")[2] for line in ways] == [f"{n} of {len(ways)})" for n in range(1, len(ways) + 1)]
    assert shown(progress=False) == []
