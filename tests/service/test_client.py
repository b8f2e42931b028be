"""A whole team: computers that fit and train, and the real service on a port."""

from __future__ import annotations

import logging
import os
import time

import pytest
import services
import torch
from ledgers import make_plan, start_process
from sqlalchemy import select
from team_server import wait_for
from torch import nn

import autobatch
from autobatch.cli.main import main
from autobatch.cli.team import judge, share_predictions
from autobatch.ledger import courier as courier_module
from autobatch.ledger import store as store_module
from autobatch.ledger import wire
from autobatch.ledger.courier import Courier
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.server import Server
from autobatch.ledger.store import Store
from autobatch.records import Trial
from autobatch.service.tables import PeakRow


@pytest.fixture
def server(service, tmp_path, monkeypatch, caplog):
    """The service on a port, known to this process; answers what it is asked with an admin's token."""
    caplog.set_level(logging.WARNING, "autobatch")
    monkeypatch.setattr(store_module, "_warned", set())
    monkeypatch.setattr(courier_module, "_couriers", {})
    monkeypatch.setattr(courier_module, "_TICK_S", 0.05)
    monkeypatch.setattr(wire, "SUMMARY_S", 0.3)
    with services.run_in_thread(service) as url:
        monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
        monkeypatch.setenv("AUTOBATCH_SERVER", url)
        monkeypatch.setenv("AUTOBATCH_TOKEN", service.tokens.create("a writer", "writer"))
        yield Server(url, service.tokens.create("an admin", "admin"))
        wait_for(lambda: not any((tmp_path / "home" / "outbox").glob("*.json")))


def make():
    """What ``fit`` takes, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    step = lambda model, batch: model(batch).square().mean()  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "step": step, "optimizer": optimizer}, torch.randn(1024, 64)


def test_a_team_fits_once_and_sees_its_runs(server, service, tmp_path, monkeypatch, caplog):
    """The second computer confirms the first one's plan; the run is there with its steps, its memory and its end."""
    caplog.set_level(logging.INFO, "autobatch")
    arguments, batch = make()
    first = autobatch.fit(**arguments, target_batch=1024, batch=batch, budget="6MiB")
    wait_for(lambda: server.ask("GET", "/plans")["plans"])
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "other"))
    arguments, batch = make()
    second = autobatch.fit(**arguments, target_batch=1024, batch=batch, budget="6MiB")
    assert (second.confirms, len(second.trials)) == (first.id, 1)
    runner = autobatch.Runner(second, **arguments)
    runner.step(batch)
    [live] = wait_for(lambda: server.ask("GET", "/runs?state=live")["runs"])
    assert (live["plan_id"], live["model"], live["target_batch"]) == (second.id, "Sequential", 1024)
    for _ in range(3):
        runner.step(batch)
    del runner
    [ended] = wait_for(lambda: server.ask("GET", "/runs?state=ended")["runs"])
    whole = server.ask("GET", f"/runs/{ended['id']}")
    assert (whole["summaries"][-1]["steps"], whole["run"]["state"]) == (4, "finished")
    assert 0 < whole["run"]["peak_bytes"] < 6 * 2**20
    # Its peak is there to be put beside a prediction. On a CPU, what is counted is what is held.
    held = max(one["held_bytes"] for one in whole["summaries"])
    assert held == max(one["peak_bytes"] for one in whole["summaries"]) == whole["run"]["peak_bytes"]
    with service.database.read() as connection:
        [peak] = connection.execute(select(PeakRow).where(PeakRow.source_id == ended["id"]))
    assert (peak.step, peak.size, peak.bytes) == (second.fingerprint[:16], second.micro_batch_size, held)
    [card] = [one["reading"] for one in server.ask("GET", "/cards")["cards"]]
    assert card["total_bytes"] > card["free_bytes"] > 0
    assert not [line for line in caplog.messages if "cannot be used" in line or "does not take" in line]


def test_a_plan_that_was_forgotten_is_not_pushed_back(server, tmp_path, capsys):
    """The push is answered, the outbox empties, and the server shows no plan."""
    assert Ledger.open().remember(make_plan("a1"))
    wait_for(lambda: server.ask("GET", "/plans")["plans"])
    server.ask("DELETE", "/plans/a1")
    assert main(["push"]) == 0
    assert "1 record handed in" in capsys.readouterr().out
    assert server.ask("GET", "/plans")["plans"] == []
    assert not any((tmp_path / "home" / "outbox").iterdir())


@pytest.mark.predicts
def test_the_gate_follows_from_what_the_team_measured(server):
    """A shared prediction meets the peaks of trials on that card, and the margin follows from how far it was off."""
    arguments, batch = make()
    prediction = autobatch.predict(**arguments, batch=batch, gpu="L4", target_batch=1024)
    assert share_predictions([prediction]) == f"shared with {server.url}"
    assert "fewer than 5 comparisons" in judge(prediction, None).margin_reason
    trials = [
        Trial(micro_batch_size=point.size, outcome="fits", peak_reserved=round(point.reserved * 1.02))
        for point in prediction.points[:5]
    ]  # no such card is here: 2 % more than was predicted
    for trial in trials:
        plan = make_plan(f"a{trial.micro_batch_size}", trials=[trial], fingerprint=f"{prediction.step}{'0' * 16}")
        assert Ledger.open().remember(plan)
    wait_for(lambda: len(server.ask("GET", "/plans")["plans"]) == len(trials))
    total = server.ask("GET", "/predictions/errors")["total"]
    assert total["under"] == total["compared"] == 5
    answer = judge(prediction, None)
    assert answer.margin == pytest.approx(0.03, abs=1e-4)
    assert (answer.fits, answer.micro_batch_size) == (True, 1024)


def test_the_doctor_asks_the_server(server, service, monkeypatch, capsys):
    """As whom it knows us, and what is wrong with that."""
    for token, text in [
        (os.environ["AUTOBATCH_TOKEN"], f"handed in to {server.url}, as a writer (writer)"),
        (service.tokens.create("a reader", "reader"), "the token may only read"),
        ("abt_wrong", "it does not take AUTOBATCH_TOKEN"),
    ]:
        monkeypatch.setenv("AUTOBATCH_TOKEN", token)
        main(["doctor"])
        assert text in " ".join(capsys.readouterr().out.split())


WRITER = """
import sys, time
from ledgers import finished, make_plan
from autobatch.ledger import courier, run_recorder, wire
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
courier._TICK_S = courier._RETRY_S = 0.02
wire.SUMMARY_S = run_recorder._LEAST_WAIT_S = 0.05
run_recorder._MOST_OF_TIME = 1.0
recorder = RunRecorder(make_plan(sys.argv[1]), Ledger.open())
for step in range(10**6):
    recorder(finished(step))
    time.sleep(0.005)
"""


def test_a_kill_of_the_trainings_loses_no_steps(server, tmp_path, monkeypatch):
    """Four are killed in the middle of their reports; the next push has each step of their files, once."""
    trainings = [start_process(WRITER, f"a{number}") for number in range(4)]
    wait_for(lambda: len(server.ask("GET", "/runs", seconds=20)["runs"]) == 4)
    time.sleep(1)
    for training in trainings:
        training.kill()
        training.communicate()
    monkeypatch.setattr(wire, "SUMMARY_S", 0.05)
    monkeypatch.setattr(courier_module, "_SILENT_S", -1.0)
    Courier(tmp_path / "home", Server.named()).hand_in(everything=True)
    for run in server.ask("GET", "/runs", seconds=20)["runs"]:
        [stored] = Store(tmp_path / "home").runs_of(run["plan_id"])
        whole = server.ask("GET", f"/runs/{run['id']}")
        assert whole["summaries"][-1]["steps"] == stored.steps > 0
        assert [one["number"] for one in whole["summaries"]] == [*range(len(whole["summaries"]))]
