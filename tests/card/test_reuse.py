"""A plan from an earlier run that its trial refutes: what comes after it is a search like any other."""

from __future__ import annotations

import pytest
import torch
from own_process import call
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.fitting import search
from autobatch.prediction import prior

pytestmark = pytest.mark.card


def refute_a_remembered_plan():
    """Fit twice; the second time the trial of the remembered size is said to refute it. What was found."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(8, 512), torch.zeros(8, dtype=torch.long)
    expected, expect = [], prior.expect_largest

    def observe(*arguments):
        expected.append(expect(*arguments))
        return expected[-1]

    def fit():
        plan = autobatch.fit(
            model,
            30000,
            batch=batch,
            step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=optimizer,
            budget="512MiB",
        )
        return plan.micro_batch_size, [trial.micro_batch_size for trial in plan.trials]

    prior.expect_largest = observe
    first = fit()
    search.why_not_confirmed = lambda *_: "it was said to be wrong"
    second = fit()
    return [expectation.largest for expectation in expected], first, second


def test_a_search_after_a_refuted_plan_has_an_expectation(tmp_path):
    """The refuting trial has run backward passes on the card; the trace after it runs all the same."""
    expected, first, second = call(
        refute_a_remembered_plan, mirror=False, AUTOBATCH_HOME=str(tmp_path), AUTOBATCH_LEDGER="on"
    )
    assert second[1][0] == first[0]
    assert len(expected) == 2
    assert expected[1] == expected[0] > 2
