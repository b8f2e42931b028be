"""What a fit and an import cost, in counts that a busy machine cannot change."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch

TARGET = 64


def make():
    """What ``fit`` takes: layers whose every guarantee costs something, as BatchNorm and dropout."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10)]
    model = nn.Sequential(*layers)
    return {
        "model": model,
        "target_batch": TARGET,
        "batch": (torch.randn(TARGET, 1, 8, 8), torch.randint(10, (TARGET,))),
        "step": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "reuse": False,
    }


@contextmanager
def thawed():
    """As in a user's process: in tests all imports are frozen. Only explicit collections run."""
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def test_what_the_user_has_frozen_stays_frozen():
    """Objects in the permanent generation, as before a fork, are still there after a fit."""
    with thawed():
        gc.freeze()
        frozen = gc.get_freeze_count()
        autobatch.fit(**make())
        assert gc.get_freeze_count() > 0.9 * frozen


def test_a_fit_that_raises_leaves_nothing_frozen():
    """Whatever the step raises."""
    given = make() | {"step": lambda model, batch: model(batch[0]).missing}
    with thawed():
        with pytest.raises(AttributeError, match="missing"):
            autobatch.fit(**given)
        assert gc.get_freeze_count() == 0


def test_import_takes_little_time_and_no_library():
    """No torch, NumPy or pydantic before the first use, and few modules of ours."""
    program = "import sys; import autobatch; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=200).split()
    assert not {"torch", "numpy", "pydantic", "scipy"} & {*imported}
    assert len([name for name in imported if name.startswith("autobatch")]) <= 5
