"""Trainers on two ranks under torchrun, also on batches of different kinds, beside one process with whole batches."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from launches import ROOT, launch, torchrun
from trainer_on_ranks import CASES, whole_batches
from trainers import apart, train

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # TRL's
]

TOLERANCES = {"SFT": 1e-6}
"""TRL's SFT computes logarithms in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all cases, from one launch."""
    results = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "builders")))
    script = ROOT / "tests" / "builders" / "trainer_on_ranks.py"
    (ran,) = launch(torchrun(str(script), str(results)), PYTHONPATH=paths, HF_HUB_OFFLINE="1")
    assert ran.code == 0, ran.errors[-3000:]
    assert ran.left_behind == []
    return results


def read(folder):
    """What both ranks ran, or how they ended, by case."""
    return json.loads((folder / "found.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_where_one_process_ends(name, folder, tmp_path):
    """Weights and logs, where one rank runs more micro-batches, and the other runs out of memory twice."""
    whole = train(lambda: CASES[name](tmp_path))
    found = read(folder)[name]
    weights = torch.load(folder / f"{name}.pt")
    model = SimpleNamespace(state_dict=lambda: weights)
    assert apart(whole, SimpleNamespace(model=model)) < TOLERANCES.get(name, 1e-12)
    for log, its in zip(whole.recorder.logs, found["logs"], strict=True):
        assert its == pytest.approx(log, rel=1e-4, abs=1e-6)
    (sizes, retries), (its_sizes, its_retries) = found["ran"]
    assert sizes[0] != its_sizes[0]
    assert (retries, its_retries) == (0, 2)


@pytest.mark.parametrize("name", ["means of two tasks", "a sum on both ranks"])
def test_kinds_that_are_divided_alike_end_where_one_process_ends(name, folder, tmp_path):
    """Each rank may be at another task in one step, where one rule is exact for both of them."""
    assert read(folder)[name] == ["", ""]
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
def test_kinds_that_cannot_be_divided_together_are_refused(name, words, folder):
    """In the third step, when they come: both ranks end, and neither has divided such a batch in silence."""
    ended = read(folder)[name]
    assert all(ended)
    assert any(words in said for said in ended)
