"""The example that torchrun starts: the same weights with any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "several_gpus.py"


def run_example(ranks):
    """What its first rank prints."""
    pytest.importorskip("sklearn")
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "AUTOBATCH_LEDGER": "off", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, *place, str(EXAMPLE)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_the_number_of_ranks_does_not_change_the_weights():
    """Each target batch is that of one process, shared."""
    one, two, three = (run_example(ranks) for ranks in (1, 2, 3))
    assert one.startswith("loss ")
    assert one == two == three
