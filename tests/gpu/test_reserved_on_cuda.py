"""What training reserves on the card beside what is predicted for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "card_memory.py"


@pytest.mark.parametrize("segments", ["fixed", "expandable"])
def test_reserved_memory_is_predicted(segments):
    """Within 3 % for a perceptron with large sums, attention, autocast and checkpointing, in a process of its own."""
    models = ["mlp_sgd", "mlp_amp_adamw", "mlp_checkpointed", "transformer", "llama_bf16"]
    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments == 'expandable'}"}
    command = [sys.executable, str(BENCHMARK), "--cells", "--models", *models, "--sizes", "32", "100"]
    done = subprocess.run(command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True)
    cells = [line.split() for line in done.stdout.splitlines()]
    errors = {(cell[0], int(cell[1])): int(cell[-1]) / int(cell[-2]) - 1 for cell in cells}
    assert len(errors) == 10
    assert {cell: error for cell, error in errors.items() if abs(error) > 0.03} == {}
