"""A process without NumPy: everything works, and nothing is warned of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Not an import hook that raises: a package that is not installed is one that nobody finds.
WITHOUT_NUMPY = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] == "numpy" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_others)  # dill calls it on an instance
"""

TRAINING = """
import autobatch
from autobatch.testing import FakeDevice
import torch
from torch import nn
from torch.utils.data import TensorDataset
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
batch = (torch.randn(8, 4), torch.randint(2, (8,)))
def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
plan = autobatch.fit(model, 8, batch=batch, step=step, optimizer=optimizer, max_micro_batch=4)
autobatch.fit(model, 8, batch=TensorDataset(*batch), step=step, optimizer=optimizer)
autobatch.fit(model, 8, batch=batch, step=step, device=FakeDevice(lambda n: n, 100))
runner = autobatch.Runner(plan, model, step, optimizer, max_grad_norm=1.0, hooks=[autobatch.hooks.console()])
runner.step(batch)
runner.step_over([batch, batch])
runner.accumulate(batch)
assert autobatch.verify(model, batch, step).exact
prediction = autobatch.predict(model, batch, step, optimizer, gpu="L4", target_batch=8, what_if=True)
for shown in (plan, prediction):
    assert shown.explain() and shown._repr_html_()
plan.save("plan.json")
assert autobatch.Plan.load("plan.json") == plan
"""

MODULE = """
import torch
from torch import nn

def make():
    model = nn.Linear(4, 2)
    step = lambda model, batch: model(batch).square().mean()
    return {"model": model, "batch": torch.randn(8, 4), "step": step, "target_batch": 8}
"""

COMMANDS = [["doctor"], ["devices"], ["plans"], ["fit", "mine:make"], ["verify", "mine:make"]]
COMMANDS += [["predict", "mine:make", "--gpu", "L4"]]


def run(program, folder):
    """In a fresh process without NumPy, in which each warning is an error; all that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOBATCH_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_NUMPY + program],
        cwd=folder,
        env={**environment, "AUTOBATCH_LEDGER": "on"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_torch_itself_warns(tmp_path):
    """So that the test below would fail if it were not silenced."""
    found = run("import warnings; warnings.simplefilter('always'); import torch, torch._dynamo", tmp_path)
    assert "Failed to initialize NumPy" in found


@pytest.mark.predicts
def test_everything_works_and_is_silent(tmp_path):
    """From the first import through fit, Runner, verify and predict, and each command."""
    (tmp_path / "mine.py").write_text(MODULE)
    commands = f"from autobatch.cli.main import main\nfor command in {COMMANDS!r}:\n    assert main(command) == 0"
    assert "NumPy" not in run(TRAINING + commands, tmp_path)
