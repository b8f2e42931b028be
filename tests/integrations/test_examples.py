"""The examples of Trainers, run as a stranger runs them: at most forty lines each, and they end well."""

from __future__ import annotations

import re
import sys

import pytest
from launches import ROOT, launch

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_an_example_is_read_at_one_glance(name):
    """At most forty lines, of which two are autobatch's beside the import."""
    lines = (EXAMPLES / f"with_{name}.py").read_text("utf-8").splitlines()
    assert len(lines) <= 40
    assert sum("attach(" in line for line in lines) == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "target"), [("transformers", 64), ("trl", 32)])
def test_an_example_learns_in_micro_batches(name, target):
    """The loss falls, the target batch does not fit at once, and the plan's line is printed."""
    script = str(EXAMPLES / f"with_{name}.py")
    (ran,) = launch([sys.executable, script], limit_seconds=240.0, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    first, last, sizes = re.findall(r"loss ([\d.]+) to ([\d.]+), micro-batches \((.+)\)", ran.line("loss "))[0]
    assert float(last) < float(first)
    run = [int(size) for size in sizes.split(",") if size]
    assert len(run) > 1
    assert sum(run) == target
    assert f"autobatch: {target} = {len(run)} x {max(run)}" in ran.errors
