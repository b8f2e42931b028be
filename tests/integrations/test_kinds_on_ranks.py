"""Two ranks under torchrun whose batches are of different kinds, beside one process with the whole batches."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from kinds_on_ranks import CASES, whole_batches
from launches import ROOT, launch, torchrun
from trainers import apart, train

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """How all cases ended on both ranks, from one launch."""
    results = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "builders")))
    script = ROOT / "tests" / "builders" / "kinds_on_ranks.py"
    (ran,) = launch(torchrun(str(script), str(results)), PYTHONPATH=paths, HF_HUB_OFFLINE="1")
    assert ran.code == 0, ran.errors[-3000:]
    return json.loads((results / "found.json").read_text("utf-8")), results


@pytest.mark.parametrize("name", ["means of two tasks", "a sum on both ranks"])
def test_kinds_that_are_divided_alike_end_where_one_process_ends(name, found, tmp_path):
    """Each rank may be at another task in one step, where one rule is exact for both of them."""
    ended, folder = found
    assert ended[name] == ["", ""]
    whole = train(lambda: whole_batches(tmp_path, name))
    weights = torch.load(folder / f"{name}.pt")
    assert apart(whole, SimpleNamespace(model=SimpleNamespace(state_dict=lambda: weights))) < 1e-12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a mean and a sum in one step", "the ranks' batches have different losses (rank 0: micro-batches are rows"),
        ("one that compares samples", "no way was found to split this loss exactly"),
    ],
)
def test_kinds_that_cannot_be_divided_together_are_refused(name, words, found):
    """In the third step, when they come: both ranks end, and neither has divided such a batch in silence."""
    ended, _ = found
    assert all(ended[name])
    assert any(words in said for said in ended[name])


def test_the_cases_are_those_that_were_run(found):
    """None is left out."""
    assert set(found[0]) == set(CASES)
