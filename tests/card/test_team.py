"""The prediction from which a search began is handed in to the team's server, beside what its trials then took."""

from __future__ import annotations

import os

import pytest
import torch
from own_process import call
from team_server import TOKEN, serving_team, wait_for
from torch import nn
from torch.nn import functional as F

import autobatch

pytestmark = pytest.mark.card


def fit_for_a_team():
    """Fit with a server: its prediction and its plan, as plain data."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
    with serving_team() as team:
        os.environ |= {"AUTOBATCH_SERVER": team.url, "AUTOBATCH_TOKEN": TOKEN}
        autobatch.fit(
            model,
            30000,
            batch=(torch.zeros(8, 512), torch.zeros(8, dtype=torch.long)),
            step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=torch.optim.AdamW(model.parameters()),
            budget="512MiB",
        )
        wait_for(lambda: team.predictions and team.plans)
        [prediction], [plan] = team.predictions.values(), team.plans.values()
        return prediction.model_dump(mode="json"), plan.model_dump(mode="json")


def test_the_prediction_of_a_search_is_beside_its_trials(tmp_path):
    """Same step, same card; at each size that was both predicted and tried, within 5 %."""
    prediction, plan = call(fit_for_a_team, mirror=False, AUTOBATCH_HOME=str(tmp_path), AUTOBATCH_LEDGER="on")
    assert prediction["step"] == plan["step"] == plan["plan"]["fingerprint"][:16]
    assert prediction["card"] == plan["plan"]["device"]["name"]
    measured = {trial["micro_batch_size"]: trial["peak_reserved"] for trial in plan["plan"]["trials"]}
    both = [(one["reserved_bytes"], measured[one["size"]]) for one in prediction["points"] if one["size"] in measured]
    assert both
    assert all(predicted == pytest.approx(peak, rel=0.05) for predicted, peak in both)
