"""The prediction from which a search began is handed in to the team's server, beside what was then taken."""

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


def train_for_a_team():
    """Fit and take two steps with a server: its prediction, its plan and its summaries, as plain data."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
    batch = torch.zeros(30000, 512), torch.zeros(30000, dtype=torch.long)
    step = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters())
    with serving_team() as team:
        os.environ |= {"AUTOBATCH_SERVER": team.url, "AUTOBATCH_TOKEN": TOKEN}
        found = autobatch.fit(model, 30000, batch=batch, step=step, optimizer=optimizer, budget="512MiB")
        runner = autobatch.Runner(found, model, step, optimizer)
        runner.step(batch)
        runner.step(batch)
        del runner
        wait_for(lambda: team.predictions and team.plans and team.ends)
        [prediction], [plan] = team.predictions.values(), team.plans.values()
        summaries = [one.model_dump(mode="json") for one in team.summaries.values()]
        return prediction.model_dump(mode="json"), plan.model_dump(mode="json"), summaries


def test_the_prediction_of_a_search_is_beside_its_trials_and_steps(tmp_path):
    """Same step, same card; at each size that was both predicted and tried, within 5 %; steps take no more."""
    prediction, plan, summaries = call(
        train_for_a_team, mirror=False, AUTOBATCH_HOME=str(tmp_path), AUTOBATCH_LEDGER="on"
    )
    assert prediction["step"] == plan["step"] == plan["plan"]["fingerprint"][:16]
    assert prediction["card"] == plan["plan"]["device"]["name"]
    measured = {trial["micro_batch_size"]: trial["peak_reserved"] for trial in plan["plan"]["trials"]}
    both = [(one["reserved_bytes"], measured[one["size"]]) for one in prediction["points"] if one["size"] in measured]
    assert both
    assert all(predicted == pytest.approx(peak, rel=0.05) for predicted, peak in both)
    [summary] = summaries
    assert summary["peak_bytes"] < summary["held_bytes"] <= 2**29
    assert summary["held_bytes"] == pytest.approx(measured[summary["micro_batch_size"]], rel=0.05)
