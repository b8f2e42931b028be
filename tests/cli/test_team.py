"""What the command line says to a team's server: predictions, the gate's question and a whole ledger."""

from __future__ import annotations

import json

import pytest
from ledgers import add_run, make_plan, make_update
from team_server import TOKEN, serving_team

from autobatch.cli.main import main
from autobatch.ledger import store as store_module
from autobatch.ledger.store import Store
from autobatch.service.comparison import decide
from autobatch.service.records import GateQuestion

SOURCE = """
import torch
from torch import nn

def large():
    return make(20_000)

def make(width=512):
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
    step = lambda model, batch: model(batch).square().mean()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "batch": torch.zeros(64, 64), "step": step, "optimizer": optimizer, "target_batch": 64}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a function, and a ledger without a server."""
    (tmp_path / "train_us.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store_module, "_warned", set())
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    return tmp_path


@pytest.fixture
def team(here, monkeypatch):
    with serving_team() as server:
        monkeypatch.setenv("AUTOBATCH_SERVER", server.url)
        monkeypatch.setenv("AUTOBATCH_TOKEN", TOKEN)
        yield server


GATE = ["gate", "train_us.py:large", "--gpu", "L4"]


@pytest.mark.predicts
def test_a_prediction_is_shared(team, capsys):
    """With its step, so that it can be joined with what runs measure; the same one has the same id."""
    for _ in range(2):
        assert main(["predict", "train_us.py:make", "--gpu", "L4", "--share"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"shared with {team.url}"
    [shared] = team.predictions.values()
    assert (shared.model, shared.card, shared.target_batch, len(shared.step)) == ("Sequential", "L4", 64, 16)
    assert shared.micro_batch_size == shared.points[-1].size == 64
    assert main(["fit", "train_us.py:make"]) == 0
    [plan] = Store(team_home()).plans()
    assert plan.fingerprint.startswith(shared.step)


def team_home():
    from autobatch.ledger.ledger import find_home

    return find_home()


@pytest.mark.predicts
def test_a_prediction_is_kept_while_the_server_is_away(team, capsys):
    """The next command hands it in."""
    team.trouble = lambda handler: handler.reply(503, b"")
    assert main(["predict", "train_us.py:make", "--gpu", "L4", "--share"]) == 0
    assert "the prediction is kept" in capsys.readouterr().out.splitlines()[-1]
    team.trouble = None
    assert main(["push"]) == 0
    assert len(team.predictions) == 1


@pytest.mark.predicts
def test_the_gate_opens_and_closes(team, capsys):
    """By the server's answer: 0 where it fits, 3 where it does not, with what would help."""
    asked = []

    def answer(path, body):
        question = GateQuestion.model_validate_json(body)
        asked.append(question)
        return 200, decide(question, []).model_dump(mode="json")

    team.take = answer
    assert main(GATE) == 0
    assert "fits: 1 micro-batch of at most 64 samples; peak" in capsys.readouterr().out
    assert main([*GATE, "--limit", "100MiB"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("autobatch: does not fit: peak")
    assert any("saves" in line for line in lines[1:])
    assert not any("fits" in line for line in lines[1:])  # that was judged by the whole card
    assert [(one.limit_bytes, bool(one.prediction.remedies)) for one in asked] == [
        (None, False),
        (100 * 2**20, False),
        (100 * 2**20, True),
    ]
    assert main([*GATE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.predicts
def test_the_gate_works_without_its_server(here, monkeypatch, capsys):
    """By the prediction's own margin. A server that was named and cannot be asked is an error."""
    assert main(GATE) == 0
    assert "own margin" in capsys.readouterr().out
    monkeypatch.setenv("AUTOBATCH_SERVER", "http://127.0.0.1:9")
    assert main(GATE) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert "http://127.0.0.1:9 cannot be used" in line


@pytest.mark.predicts
def test_the_gate_is_closed_to_a_wrong_token(team, monkeypatch, capsys):
    """With what is wrong in one line."""
    monkeypatch.setenv("AUTOBATCH_TOKEN", "abt_wrong")
    assert main(GATE) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "does not take AUTOBATCH_TOKEN" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["push"], "set AUTOBATCH_SERVER"),
        (["predict", "train_us.py:make", "--gpu", "L4", "--share"], "set AUTOBATCH_SERVER"),
        (["gate", "train_us.py:make"], "--gpu"),
        ([*GATE, "--limit", "much"], "--limit='much' is not a size"),
        ([*GATE[:3], "L5"], "L5"),
    ],
)
def test_a_command_that_means_nothing_is_refused_in_one_line(here, capsys, arguments, text):
    """With exit code 2, before any long work."""
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_whole_ledger_is_pushed_once(team, here, capsys):
    """Plans, their runs, and the steps of these; a second time nothing is new."""
    store = Store(team_home())
    for name in ("a1", "a2"):
        add_run(store, make_plan(name), make_update(0, f"r-{name}", 3, plan_id=name, outcome="finished"))
    for _ in range(2):
        assert main(["push"]) == 0
        assert capsys.readouterr().out == f"4 records handed in to {team.url}\n"
    assert (sorted(team.plans), sorted(team.runs), sorted(team.ends)) == (
        ["a1", "a2"],
        ["r-a1", "r-a2"],
        ["r-a1", "r-a2"],
    )
    assert [one.steps for one in team.summaries.values()] == [3, 3]


def test_a_push_that_leaves_something_behind_is_an_error(team, here, capsys):
    """It names what the server refuses, and hands in the rest."""
    taken = team.take
    team.take = lambda path, body: (422, {"detail": "no"}) if b'"a1"' in body else taken(path, body)
    for name in ("a1", "a2"):
        Store(team_home()).add_plan(make_plan(name))
    assert main(["push"]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if "does not take plans" in line]
    assert "a1.json: no" in line
    assert list(team.plans) == ["a2"]


def test_a_push_without_an_answer_is_an_error(here, monkeypatch, capsys):
    """Nothing is lost: the next push goes on."""
    Store(team_home()).add_plan(make_plan())
    monkeypatch.setenv("AUTOBATCH_SERVER", "http://127.0.0.1:9")
    assert main(["push"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "push again later" in line
