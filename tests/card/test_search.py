"""The search on small cards: what ``benchmarks/card_search.py`` measures, within the promises of its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import sample

pytest.importorskip("transformers")
pytestmark = pytest.mark.card

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "card_search.py"
MODELS = (
    "mlp_sgd",
    "mlp_amp_adamw",
    "mlp_checkpointed",
    "transformer",
    "transformer_amp",
    "bert",
    "vit",
    "gpt2",
    "llama_bf16",
    "tied_decoder",
)


def search(model: str, gibibytes: int) -> dict[str, int]:
    """Trials, errors out of memory, and what the first steps had to repair, in a process of its own."""
    command = [sys.executable, str(BENCHMARK), "--search", model, str(gibibytes)]
    environment = os.environ | {"AUTOBATCH_LEDGER": "off"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    _, _, size, trials, out_of_memory, retries, _, shrunk, *_ = done.stdout.splitlines()[-1].split()
    assert int(size) > 1
    return {"trials": int(trials), "out of memory": int(out_of_memory), "repaired": int(retries) + int(shrunk)}


@pytest.mark.parametrize("model", sample(MODELS, 5))
def test_three_trials_are_enough_and_none_runs_out(model):
    """On cards of 2, 3, 5 and 8 GiB; two trials in the mean, and the first steps after it are undisturbed."""
    found = {gibibytes: search(model, gibibytes) for gibibytes in (2, 3, 5, 8)}
    assert {gibibytes: one for gibibytes, one in found.items() if one["trials"] > 3} == {}
    assert {gibibytes: one for gibibytes, one in found.items() if one["out of memory"] or one["repaired"]} == {}
    assert sum(one["trials"] for one in found.values()) <= 2 * len(found)
