"""What lasts and what goes: records that were forgotten, old ones, and those of machines that share a name."""

from __future__ import annotations

import time
import urllib.request

import pytest
from services import (
    FINGERPRINT,
    GIB,
    get,
    make_card,
    make_plan_in,
    make_prediction,
    make_run_in,
    make_summary,
    post,
    run_in_thread,
)
from sqlalchemy import func, select

from autobatch.ledger import store as ledger_store
from autobatch.service import store as store_module
from autobatch.service.records import PlanIn, RunIn, RunSummary
from autobatch.service.tables import PeakRow, ReadingRow, RunRow, SummaryRow

DAY = 86400.0


def count(database, table):
    """Return the number of rows."""
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar()


def delete(client, path, status=200):
    """Forget a record."""
    assert client.delete(f"/api/v1{path}").status_code == status


def test_what_was_forgotten_stays_away(client, database):
    """A client that hands it in again gets its answer, so that its outbox empties, and nothing comes back."""
    post(client, "/plans", make_plan_in())
    post(client, "/runs", make_run_in())
    post(client, "/predictions", make_prediction("a1"))
    delete(client, "/plans/a1")
    assert post(client, "/plans", make_plan_in()) == {"id": "a1", "new": False}
    assert post(client, "/runs", make_run_in()) == {"id": "r1", "new": False}
    for number in range(2):
        assert post(client, "/runs/r1/summaries", make_summary(number)) == {"id": "r1", "new": False}
    assert not post(client, "/runs/r1/end", {"at": time.time(), "outcome": "finished"})["new"]
    get(client, "/plans/a1", 404)
    get(client, "/runs/r1", 404)
    assert get(client, "/plans")["plans"] == get(client, "/runs")["runs"] == []
    assert [count(database, table) for table in (PeakRow, SummaryRow, ReadingRow)] == [0, 0, 0]
    # A prediction may have the id of a plan, and is forgotten alone.
    assert len(get(client, "/predictions")["predictions"]) == 1
    delete(client, "/predictions/a1", 200)
    assert not post(client, "/predictions", make_prediction("a1"))["new"]
    assert get(client, "/predictions")["predictions"] == []
    delete(client, "/plans/a1", 404)
    post(client, "/runs/unknown/summaries", make_summary(), 404)


def test_a_forgotten_run_stays_away(client):
    """Its plan and the other runs are there."""
    post(client, "/plans", make_plan_in())
    for name in ("r1", "r2"):
        post(client, "/runs", make_run_in(name))
    delete(client, "/runs/r1", 200)
    assert not post(client, "/runs", make_run_in("r1"))["new"]
    assert [run["id"] for run in get(client, "/plans/a1")["runs"]] == ["r2"]


@pytest.fixture
def at(monkeypatch):
    """Return a function that sets the clock, in days from now."""
    now = time.time()
    return lambda days: monkeypatch.setattr(time, "time", lambda: now + DAY * days)


def test_old_records_are_pruned(service, client, database, at):
    """Runs that nobody saw since, with their summaries, and predictions without a measured peak; live runs stay."""
    store = service.store
    at(-100)
    for name in ("silent", "ended", "live"):
        store.add_run(RunIn.model_validate(make_run_in(name, plan_id=name)))
        store.add_summary(name, RunSummary.model_validate(make_summary()))
    post(client, "/runs/ended/end", {"at": time.time(), "outcome": "finished"})
    for name, step in (("measured", make_run_in()["step"]), ("alone", "0" * 16), ("unknown", "")):
        post(client, "/predictions", make_prediction(name, step=step))
    at(0)
    post(client, "/predictions", make_prediction("new", step="1" * 16))
    store.add_summary("live", RunSummary.model_validate(make_summary(1)))
    before = get(client, "/predictions/errors")["total"]
    assert store.prune(time.time() - 90 * DAY) == {"runs": 2, "plans": 0, "predictions": 2}
    assert [run["id"] for run in get(client, "/runs")["runs"]] == ["live"]
    assert len(get(client, "/runs/live")["summaries"]) == 2
    assert [count(database, table) for table in (RunRow, SummaryRow, ReadingRow)] == [1, 2, 1]
    assert sorted(one["id"] for one in get(client, "/predictions")["predictions"]) == ["measured", "new"]
    assert get(client, "/predictions/errors")["total"] == before  # the gate forgets nothing
    assert before["compared"] == 3
    assert store.prune(time.time() - 90 * DAY) == {"runs": 0, "plans": 0, "predictions": 0}


def test_plans_are_kept_by_count(service, client, monkeypatch):
    """The newest of each fingerprint, as in a local ledger, and those that a stored run used."""
    assert store_module._MOST_PLANS == ledger_store._MOST_PLANS
    monkeypatch.setattr(store_module, "_MOST_PLANS", 3)
    monkeypatch.setattr(store_module, "_DELETED_AT_ONCE", 2)
    for index in range(9):
        service.store.add_plan(PlanIn.model_validate(make_plan_in(f"a{index}", made_at=4e9 - index)))
    post(client, "/plans", make_plan_in("other", fingerprint="1" * 32))
    post(client, "/runs", make_run_in(plan_id="a2"))
    assert service.store.prune(time.time() - DAY)["plans"] == 5
    assert sorted(plan["id"] for plan in get(client, "/plans")["plans"]) == ["a2", "a6", "a7", "a8", "other"]


def test_the_beginning_of_an_id_and_a_part_of_a_name_find(client):
    """A name in any case, also beyond ASCII; the filters of both lists, by the page of results too."""
    names = {"model": "ÜbersetzerÄ", "host": "Köln-1"}
    post(client, "/plans", make_plan_in("abc_DEF-1", **names))
    post(client, "/plans", make_plan_in("ghi-2"))
    post(client, "/runs", make_run_in("run_XYZ", **names, cards=[make_card(name="NVIDIA Ångström")]))
    post(client, "/runs", make_run_in("other"))
    for path, key in (("/plans", "plans"), ("/runs", "runs")):
        for query in ({"model": "übersetzerä"}, {"model": "TZERÄ"}, {"host": "KÖLN"}):
            assert len(get(client, path, **query)[key]) == 1, (path, query)
        assert get(client, path, host="Koln")[key] == []
    for part in ("a", "abc_D", "abc_DEF-1"):
        assert [plan["id"] for plan in get(client, "/plans", id=part)["plans"]] == ["abc_DEF-1"]
    for part in ("abc%", "abcx", "abc_d", "bc_DEF-1", "abc_DEF-12", "é", "~"):
        assert get(client, "/plans", id=part)["plans"] == [], part
    assert [run["id"] for run in get(client, "/runs", id="run_X")["runs"]] == ["run_XYZ"]
    assert [run["id"] for run in get(client, "/runs", device="ÅNG", model="ü")["runs"]] == ["run_XYZ"]
    get(client, "/runs", 422, devise="x")


def test_the_beginning_of_very_many_ids_finds_the_newest(client, monkeypatch):
    """A list of what was found has a bound, and the page is right beyond it."""
    monkeypatch.setattr("autobatch.service.rows._MOST_FOUND", 3)
    for index in range(6):
        post(client, "/plans", make_plan_in(f"a{9 - index}", made_at=1.7e9 + index, model=f"Net{index}"))
    assert [plan["id"] for plan in get(client, "/plans", id="a", limit=2)["plans"]] == ["a4", "a5"]
    assert [plan["id"] for plan in get(client, "/plans", model="net", limit=2)["plans"]] == ["a4", "a5"]


def test_machines_have_cards_that_are_free_and_users(client):
    """From the runs' own reports; a card that has a new computer's name belongs to that alone."""
    free = {"free_bytes": 4 * GIB, "own_bytes": 20 * GIB}
    post(client, "/runs", make_run_in("r1", host="node1", cards=[make_card(uuid="GPU-1", **free)]))
    post(client, "/runs", make_run_in("r2", host="node1", user="bob", cards=[make_card(uuid="GPU-2")]))
    post(client, "/runs", make_run_in("r3", host="node2", user="eve", cards=[make_card(uuid="", kind="cpu")]))
    first, second = get(client, "/machines")["machines"]
    assert (first["host"], first["users"], first["runs"]) == ("node1", ["ada", "bob"], 2)
    assert (first["total_bytes"], first["free_bytes"]) == (48 * GIB, 16 * GIB)
    assert [card["reading"]["uuid"] for card in first["cards"]] == ["GPU-1", "GPU-2"]
    assert [run["run_id"] for run in first["cards"][1]["runs"]] == ["r2"]
    assert (second["host"], second["free_bytes"]) == ("node2", 12 * GIB)
    post(client, "/runs/r1/end", {"at": time.time(), "outcome": "finished"})
    assert get(client, "/machines")["machines"][0]["users"] == ["bob"]
    post(client, "/runs", make_run_in("r4", host="renamed", cards=[make_card(uuid="GPU-1")]))
    assert [one["host"] for one in get(client, "/machines")["machines"]] == ["node1", "node2", "renamed"]
    assert [len(one["cards"]) for one in get(client, "/machines")["machines"]] == [1, 1, 1]


def test_two_machines_with_one_name_recall_each_others_plans(client):
    """A plan answers for its fingerprint, which has the card, and not for a name: many starts of one hide no other."""
    sizes = {"micro_batch_size": 8, "micro_batch_sizes": [8] * 32, "accumulation_steps": 32}
    post(client, "/plans", make_plan_in("small", **sizes, host="localhost"))
    for index in range(12):
        post(client, "/plans", make_plan_in(f"a{index}", host="localhost"))
    post(client, "/plans", make_plan_in("card", fingerprint="1" * 32, host="localhost"))
    found = [plan["id"] for plan in post(client, "/recall", {"fingerprint": FINGERPRINT}, 200)["plans"]]
    assert found[:2] == ["a11", "small"]
    assert "card" not in found


def test_silent_runs_are_not_live(service, client, at):
    """Five minutes without a report: the API, the list of cards, the machines and the fleet's page agree."""
    post(client, "/runs", make_run_in("old", model="OldNet"))
    at(301 / DAY)
    post(client, "/runs", make_run_in("new", cards=[make_card(uuid="GPU-2")]))
    ended = make_run_in("over", cards=[])
    post(client, "/runs", ended)
    post(client, "/runs/over/end", {"at": time.time(), "outcome": "failed"})
    found = {state: [run["id"] for run in get(client, "/runs", state=state)["runs"]] for state in ("live", "silent")}
    assert found == {"live": ["new"], "silent": ["old"]}
    assert [run["id"] for run in get(client, "/runs", state="ended")["runs"]] == ["over"]
    assert [run.id for run in service.store.live_runs()] == ["new"]
    assert [machine["runs"] for machine in get(client, "/machines")["machines"]] == [1]
    cookie = {"Cookie": f"autobatch_token={service.tokens.create('one', 'reader')}"}
    now, _, silent = client.get("/", headers=cookie).text.partition('aria-label="Silent for five minutes"')
    assert ("OldNet" in silent, "OldNet" in now[now.index('aria-label="Runs now"') :]) == (True, False)
    assert "/runs/old" in client.get("/runs?state=silent", headers=cookie).text
    assert "/runs/old" not in client.get("/runs?state=live", headers=cookie).text


def test_pages_ask_again_though_nothing_was_written(service, monkeypatch):
    """A run falls silent without a word, and another server may write to the same database."""
    monkeypatch.setattr("autobatch.service.api._LOOK_EVERY_S", 0.01)
    token = service.tokens.create("one", "reader")
    with run_in_thread(service) as address:
        request = urllib.request.Request(f"{address}/api/v1/events", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as stream:
            lines = [stream.readline() for _ in range(12)]
    assert lines[::3] == [b"event: runs\n"] * 4
    assert len(set(lines[1::3])) < 4  # at most the use of the token was written


def test_a_long_run_is_shown_from_its_beginning(service, client, monkeypatch):
    """Lines join summaries that follow each other, with their highest peak; the page says so."""
    monkeypatch.setattr("autobatch.service.run_rows._MOST_LINES", 4)
    post(client, "/runs", make_run_in(started_at=time.time() - 3600))
    setback = {"step": 15, "kind": "retry", "old_size": 43, "new_size": 21}
    for number in range(10):
        peak = 19 if number == 4 else 17
        changes = {"held_bytes": peak * GIB, "retries": int(number > 3), "setbacks": [setback] if number == 4 else []}
        post(client, "/runs/r1/summaries", make_summary(number, at=1.7e9 + number, **changes))
    found = get(client, "/runs/r1")
    assert (found["joined"], [line["number"] for line in found["summaries"]]) == (3, [2, 5, 8, 9])
    assert [line["held_bytes"] // GIB for line in found["summaries"]] == [17, 19, 17, 17]
    assert [line["steps"] for line in found["summaries"]] == [30, 60, 90, 100]
    assert [len(line["setbacks"]) for line in found["summaries"]] == [0, 1, 0, 0]
    cookie = {"Cookie": f"autobatch_token={service.tokens.create('one', 'reader')}"}
    page = client.get("/runs/r1", headers=cookie).text
    assert "Each line joins 3 summaries" in page
    assert "The highest peak of each 3 summaries" in page


def test_a_run_of_several_ranks_shows_each(service, client):
    """Computer, device and the peak in the last summary."""
    ranks = [{"host": f"node{rank // 2}", "device": "NVIDIA L4"} for rank in range(4)]
    post(client, "/runs", make_run_in(world_size=4, ranks=ranks))
    assert [rank["last_bytes"] for rank in get(client, "/runs/r1")["ranks"]] == [0] * 4
    for number in range(2):
        post(
            client, "/runs/r1/summaries", make_summary(number, rank_peaks=[GIB * (rank + number) for rank in range(4)])
        )
    found = get(client, "/runs/r1")["ranks"]
    assert [(rank["host"], rank["last_bytes"] // GIB) for rank in found] == [
        ("node0", 1),
        ("node0", 2),
        ("node1", 3),
        ("node1", 4),
    ]
    cookie = {"Cookie": f"autobatch_token={service.tokens.create('one', 'reader')}"}
    assert 'aria-label="Ranks"' in client.get("/runs/r1", headers=cookie).text
