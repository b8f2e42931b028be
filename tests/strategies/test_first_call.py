"""The first call in a process, which imports parts of torch while blocks are measured."""

import subprocess
import sys

PROGRAM = """
import torch
from text_blocks import make_model, make_texts, need_of, step
import autobatch

model = make_model()
plan = autobatch.fit(model, 4, batch=make_texts(), step=step, budget=int(0.6 * need_of(model)), headroom=0,
                     strategies="auto", check=None, reuse=False, progress=False)
print(len(plan.checkpointing.left_out))
"""


def test_no_block_is_left_out_because_torch_imports_modules_meanwhile(request):
    """Some of them draw from Python's generator when they are imported."""
    program = f"import sys; sys.path.insert(0, {str(request.config.rootpath / 'tests' / 'builders')!r})\n{PROGRAM}"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["0"]
