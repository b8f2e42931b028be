"""The example of accelerate's decorator, run as a stranger runs it, and once more with accelerate's own."""

from __future__ import annotations

import re
import sys

from launches import ROOT, launch

SCRIPT = ROOT / "examples" / "accelerate_batch_size.py"


def test_the_script_trains_with_either_decorator(tmp_path):
    """Two of its lines are autobatch's; without them it is accelerate's, which trains with the size asked for."""
    source = SCRIPT.read_text("utf-8")
    assert len(source.splitlines()) <= 40
    own = source.replace("from autobatch.integrations.accelerate import", "from accelerate.utils import")
    own = re.sub(r", budget=.*", ")", own)
    assert sum(one != other for one, other in zip(source.splitlines(), own.splitlines(), strict=True)) == 2
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    ours, its = launch(
        *([sys.executable, str(path)] for path in (SCRIPT, tmp_path / "own.py")), CUDA_VISIBLE_DEVICES=""
    )
    sizes = []
    for ran in (ours, its):
        first, last, size = re.findall(r"loss ([\d.]+) to ([\d.]+) with a batch size of (\d+)", ran.line("loss "))[0]
        assert float(last) < float(first)
        sizes.append(int(size))
    assert 100 < sizes[0] < sizes[1] == 1024
    assert ours.errors.count(": fits, peak") <= 4
    assert "oom" not in ours.errors
