"""What clients hand in and readers get, on both databases."""

from __future__ import annotations

import time

import pytest
from services import FINGERPRINT, GIB, get, make_card, make_plan_in, make_prediction, make_run_in, make_summary, post

from autobatch.plan import Plan


def test_a_plan_comes_back_as_it_was_and_once(client):
    """Handed in twice it is stored once; the plan is equal to the one that was handed in."""
    sent = make_plan_in()
    assert post(client, "/plans", sent) == {"id": "a1", "new": True}
    assert post(client, "/plans", sent | {"host": "other"}) == {"id": "a1", "new": False}
    found = get(client, "/plans/a1")
    assert Plan.model_validate(found["plan"]) == Plan.model_validate(sent["plan"])
    assert found["host"] == "node1"
    assert [line["id"] for line in get(client, "/plans")["plans"]] == ["a1"]


def test_lists_are_paged_and_filtered(client):
    """The newest first, each plan on one page; filters take a part of a name in any case."""
    for index in range(7):
        model = "Tiny_Net" if index % 2 else "Gpt%"
        post(client, "/plans", make_plan_in(f"a{index}", made_at=1.7e9 + index // 2, model=model, host=f"n{index}"))
    seen, after = [], None
    while True:
        page = get(client, "/plans", limit=3, **({"after": after} if after else {}))
        seen += [line["id"] for line in page["plans"]]
        if (after := page["next"]) is None:
            break
    assert seen == ["a6", "a5", "a4", "a3", "a2", "a1", "a0"]
    assert len(get(client, "/plans", model="tiny_")["plans"]) == 3
    assert len(get(client, "/plans", model="%")["plans"]) == 4
    assert len(get(client, "/plans", device="l4", model="gpt", host="n2")["plans"]) == 1
    assert get(client, "/plans", model="nothing")["plans"] == []


def test_recall_gives_the_newest_of_a_fingerprint_and_rank(client):
    """Only equal fingerprints, and at most ten."""
    for index in range(12):
        post(client, "/plans", make_plan_in(f"a{index:02}", made_at=1.7e9 + index))
    post(client, "/plans", make_plan_in("b", fingerprint="1" * 32))
    found = post(client, "/recall", {"fingerprint": FINGERPRINT}, 200)["plans"]
    assert [plan["id"] for plan in found] == [f"a{index:02}" for index in range(11, 1, -1)]
    assert post(client, "/recall", {"fingerprint": FINGERPRINT, "rank": 1}, 200)["plans"] == []


def test_one_host_does_not_hide_the_plans_of_others(client):
    """Each host's newest plan comes before a second one of any; a clock in the future changes nothing."""
    for name, host in (("a", "node1"), ("b", "node2"), *((f"c{index}", "node3") for index in range(12))):
        post(client, "/plans", make_plan_in(name, host=host, made_at=4e9 if host == "node3" else 1.7e9))
    found = post(client, "/recall", {"fingerprint": FINGERPRINT}, 200)["plans"]
    assert [plan["id"] for plan in found][:4] == ["c11", "b", "a", "c10"]


def test_a_run_from_its_beginning_to_its_end(client):
    """Totals are those of the last summary by number, peaks the highest; a late or second one changes nothing."""
    assert post(client, "/runs", make_run_in())["new"]
    assert not post(client, "/runs", make_run_in(host="other"))["new"]
    assert post(client, "/runs/r1/summaries", make_summary(0, held_bytes=19 * GIB))["new"]
    setback = {"step": 15, "kind": "retry", "old_size": 43, "new_size": 21, "reason": "OutOfMemoryError"}
    second = make_summary(2, retries=1, micro_batch_size=21, setbacks=[setback])
    assert post(client, "/runs/r1/summaries", second)["new"]
    assert post(client, "/runs/r1/summaries", make_summary(1))["new"]
    assert not post(client, "/runs/r1/summaries", make_summary(2, steps=1000))["new"]
    found = get(client, "/runs/r1")
    run = found["run"]
    assert (run["state"], run["steps"], run["retries"], run["micro_batch_size"]) == ("live", 30, 1, 21)
    assert (run["peak_bytes"], run["last_bytes"]) == (19 * GIB, 18 * GIB)
    assert [one["number"] for one in found["summaries"]] == [0, 1, 2]
    assert found["summaries"][2]["setbacks"] == [setback]
    assert [one["id"] for one in get(client, "/runs", state="live")["runs"]] == ["r1"]
    assert post(client, "/runs/r1/end", {"at": time.time(), "outcome": "failed", "reason": "killed"})["new"]
    assert not post(client, "/runs/r1/end", {"at": time.time(), "outcome": "finished"})["new"]
    assert get(client, "/runs", state="live")["runs"] == []
    assert get(client, "/runs", state="ended", model="net", host="node1", plan_id="a1")["runs"][0]["state"] == "failed"
    post(client, "/runs/nothing/summaries", make_summary(), 404)
    post(client, "/runs/nothing/end", {"at": time.time(), "outcome": "finished"}, 404)
    post(client, "/runs/r1/end", {"at": time.time(), "outcome": "running"}, 422)


def test_a_run_belongs_to_the_token_that_began_it(service, client, client_of):
    """Another writer neither ends it nor freezes its totals, an admin may, and numbers do not run ahead of time."""
    owner = client_of("writer")
    other = client_of("writer", "another")
    post(owner, "/runs", make_run_in())
    end = {"at": time.time(), "outcome": "finished"}
    assert "another token began" in post(other, "/runs/r1/summaries", make_summary(), 409)["detail"]
    post(other, "/runs/r1/end", end, 409)
    assert "too young" in post(owner, "/runs/r1/summaries", make_summary(2**53 - 1, steps=9, samples=9), 409)["detail"]
    post(owner, "/runs/r1/summaries", make_summary())
    post(client, "/runs/r1/summaries", make_summary(1))
    post(owner, "/runs", make_run_in("r2", started_at=time.time() - 9000))
    post(owner, "/runs/r2/summaries", make_summary(9000))
    post(client, "/runs/r2/end", end)
    assert post(owner, "/runs/r1/end", end)["new"]


def test_cards_and_who_is_on_them(client):
    """By the runs' own reports: the newest reading of a card, and the runs that live on it."""
    post(client, "/runs", make_run_in("r1"))
    post(client, "/runs", make_run_in("r2", user="bob", cards=[make_card(uuid="GPU-2"), make_card()]))
    post(client, "/runs/r2/summaries", make_summary(cards=[make_card(free_bytes=GIB)]))
    post(client, "/runs", make_run_in("old", started_at=time.time() - 7200, cards=[]))
    first, second = get(client, "/cards")["cards"]
    assert (first["reading"]["uuid"], first["reading"]["free_bytes"]) == ("GPU-1", GIB)
    assert {run["user"] for run in first["runs"]} == {"ada", "bob"}
    assert [run["run_id"] for run in second["runs"]] == ["r2"]


def test_forgetting_takes_the_runs_along(client):
    """And only those of the plan."""
    for name in ("a1", "a2"):
        post(client, "/plans", make_plan_in(name))
        post(client, "/runs", make_run_in(f"run-of-{name}", plan_id=name))
        post(client, f"/runs/run-of-{name}/summaries", make_summary())
    answer = client.delete("/api/v1/plans/a1")
    assert (answer.status_code, answer.json()) == (200, {"runs": 1})
    assert client.delete("/api/v1/plans/a1").status_code == 404
    get(client, "/runs/run-of-a1", 404)
    get(client, "/runs/run-of-a2")


def test_an_admin_forgets_a_run_and_a_prediction(client, client_of):
    """With what was measured in the run; others may not."""
    post(client, "/predictions", make_prediction())
    post(client, "/predictions", make_prediction("p2"))
    post(client, "/runs", make_run_in(plan_id="unknown"))
    post(client, "/runs/r1/summaries", make_summary())
    for path in ("/api/v1/predictions/p1", "/api/v1/runs/r1"):
        assert client_of("writer", path).delete(path).status_code == 403
    assert [client.delete("/api/v1/predictions/p1").status_code for _ in range(2)] == [200, 404]
    assert [one["prediction_id"] for one in get(client, "/predictions/errors")["comparisons"]] == ["p2"]
    assert [client.delete("/api/v1/runs/r1").status_code for _ in range(2)] == [200, 404]
    get(client, "/runs/r1", 404)
    assert get(client, "/cards")["cards"] == []
    assert get(client, "/predictions/errors")["comparisons"] == []


def test_a_wrong_clock_makes_no_live_run_silent(client):
    """A process that reads its cards is there now; a run that is handed in later has none."""
    for name, cards in (("r1", [make_card()]), ("late", [])):
        post(client, "/runs", make_run_in(name, started_at=time.time() - 8000, cards=cards))
        post(client, f"/runs/{name}/summaries", make_summary(at=time.time() - 7900, cards=cards))
    states = {one["id"]: one["state"] for one in get(client, "/runs")["runs"]}
    assert states == {"r1": "live", "late": "silent"}


def test_a_clock_that_is_ahead_puts_nothing_first(client):
    """The server takes its own time for a run, a plan or a prediction that comes from the future."""
    for name, ahead in (("future", 1e6), ("now", 0.0)):
        post(client, "/runs", make_run_in(name, started_at=time.time() + ahead))
        post(client, "/plans", make_plan_in(name, made_at=time.time() + ahead))
        post(client, "/predictions", make_prediction(name, made_at=time.time() + ahead))
        time.sleep(0.01)
    for path, key in (("/runs", "runs"), ("/runs?state=live", "runs"), ("/plans", "plans"), ("/predictions",) * 2):
        found = get(client, path)[key.removeprefix("/")]
        assert [one["id"] for one in found] == ["now", "future"], path


def test_two_plans_compared(client):
    """As autobatch diff has it."""
    post(client, "/plans", make_plan_in("a1"))
    post(client, "/plans", make_plan_in("a2", size=21))
    found = get(client, "/plans/compare", first="a1", second="a2")
    assert found["same_workload"] is True
    assert {"field": "micro_batch_size", "a": 43, "b": 20} in found["fields"]
    get(client, "/plans/compare", 404, first="a1", second="nothing")


def test_predicted_beside_measured(client):
    """Joined by step and card: each prediction beside a plan's trials and a run's peaks."""
    post(client, "/predictions", make_prediction("old", made_at=1.6e9, points=[{"size": 43, "reserved_bytes": GIB}]))
    post(client, "/predictions", make_prediction())
    post(client, "/predictions", make_prediction("elsewhere", card="A100-80GB", card_names=[]))
    post(client, "/predictions", make_prediction("other", step="0" * 16))
    post(client, "/plans", make_plan_in())  # its trials are what was predicted
    post(client, "/runs", make_run_in())
    post(client, "/runs/r1/summaries", make_summary(held_bytes=20 * GIB))
    found = get(client, "/predictions/errors")
    assert found["total"]["compared"] == 4
    assert found["total"]["under"] == 3
    of_newest = [one for one in found["comparisons"] if one["is_newest"]]
    assert [one["prediction_id"] for one in of_newest] == ["p1", "p1"]
    assert [one["source_id"] for one in of_newest] == ["r1", "a1"]
    worst = found["comparisons"][0]
    assert (worst["prediction_id"], worst["size"], worst["measured_bytes"]) == ("old", 43, 20 * GIB)
    assert found["total"]["worst_error"] == pytest.approx(worst["predicted_bytes"] / (20 * GIB) - 1)
    assert [(one["model"], one["card"]) for one in found["groups"]] == [("Net", "L4")]
    assert [one["id"] for one in get(client, "/predictions", limit=2, model="net")["predictions"]] == ["p1", "other"]


def test_after_a_retry_a_run_measures_nothing(client):
    """What the allocator held for the larger size is not what the smaller one needs."""
    post(client, "/predictions", make_prediction())
    post(client, "/runs", make_run_in())
    post(client, "/runs/r1/summaries", make_summary(retries=1, micro_batch_size=21, held_bytes=20 * GIB))
    assert get(client, "/predictions/errors")["total"]["compared"] == 0


def test_the_gate_uses_the_teams_own_errors(client):
    """Without comparisons the prediction's margin; with enough of them the worst that was under."""
    question = {"prediction": make_prediction(), "limit_bytes": 20 * GIB}
    answer = post(client, "/gate", question, 200)
    assert (answer["fits"], answer["margin"]) == (True, 0.1)
    largest = answer["micro_batch_size"]
    assert (GIB * 1.5 + largest * GIB * 0.4) * 1.1 <= 20 * GIB < (GIB * 1.5 + (largest + 1) * GIB * 0.4) * 1.1
    assert answer["accumulation_steps"] == -(-256 // largest)
    for index in range(5):
        step = f"{index:016}"
        post(client, "/predictions", make_prediction(f"p{index}", step=step))
        post(client, "/runs", make_run_in(f"r{index}", step=step))
        measured = round((GIB + 43 * GIB * 2 // 5) * (1.2 if index == 3 else 0.99))
        post(client, f"/runs/r{index}/summaries", make_summary(held_bytes=measured))
    stricter = post(client, "/gate", question, 200)
    assert stricter["margin"] == pytest.approx(0.21)
    assert stricter["errors"]["compared"] == 5
    assert stricter["errors"]["under"] == 1
    assert stricter["micro_batch_size"] < largest
    assert "Net on L4" in stricter["margin_reason"]


def compare_runs(client, count, factor, *, model="Net", start=0):
    """Hand in predictions, each of its own step, beside runs that took ``factor`` of what was predicted."""
    for index in range(start, start + count):
        step = f"{index:016}"
        post(client, "/predictions", make_prediction(f"p{index}", step=step, model=model))
        post(client, "/runs", make_run_in(f"r{index}", step=step, model=model))
        measured = round((GIB + 43 * GIB * 2 // 5) * factor)
        post(client, f"/runs/r{index}/summaries", make_summary(held_bytes=measured))


def test_one_bad_prediction_closes_the_gate_for_nobody(client):
    """Other models count for nothing, one in twenty is left out, and the margin has an upper bound."""
    question = {"prediction": make_prediction("asked", card="NVIDIA L4", card_names=[]), "limit_bytes": 20 * GIB}
    compare_runs(client, 6, 9.0, model="Other")
    assert post(client, "/gate", question, 200)["margin"] == 0.1
    compare_runs(client, 1, 9.0, start=10)
    compare_runs(client, 4, 1.05, start=11)
    capped = post(client, "/gate", question, 200)
    assert (capped["margin"], capped["margin_reason"].split("; ")[1]) == (1.0, "a margin is at most 100%")
    compare_runs(client, 15, 1.05, start=15)
    answer = post(client, "/gate", question, 200)
    assert answer["margin"] == pytest.approx(0.06)
    assert answer["margin_reason"].endswith("on NVIDIA L4, 5.0% more than predicted was measured at most in 19")


def test_sizes_of_one_plan_are_one_comparison(client):
    """Five sizes of one plan are not the experience that a margin may rest on."""
    points = [{"size": size, "reserved_bytes": size * GIB // 4} for size in range(1, 61)]
    post(client, "/predictions", make_prediction(points=points))
    post(client, "/plans", make_plan_in())
    found = get(client, "/predictions/errors")
    assert (found["total"]["compared"], found["total"]["under"]) == (1, 1)
    answer = post(client, "/gate", {"prediction": make_prediction()}, 200)
    assert (answer["margin"], answer["errors"]["compared"]) == (0.1, 1)


def test_a_trial_that_ran_out_of_memory_was_predicted_too_low(client):
    """It took at least the limit; where more than the limit was predicted there is nothing to compare."""
    plan = make_plan_in()
    failed = plan["plan"]["trials"][-1] | {"micro_batch_size": 60, "outcome": "oom"}
    plan["plan"]["trials"].append(failed)
    post(client, "/plans", plan)
    limit = get(client, "/plans")["plans"][0]["limit_bytes"]
    post(client, "/predictions", make_prediction("low", points=[{"size": 60, "reserved_bytes": limit // 2}]))
    post(client, "/predictions", make_prediction("high", points=[{"size": 60, "reserved_bytes": limit + GIB}]))
    [one] = get(client, "/predictions/errors")["comparisons"]
    assert (one["prediction_id"], one["measured_bytes"], one["is_newest"]) == ("low", limit, True)


def test_the_gate_knows_what_a_card_has(client):
    """A limit beyond the card's memory is none."""
    points = [{"size": 1, "reserved_bytes": 30 * GIB}]
    question = {"prediction": make_prediction(points=points), "limit_bytes": 400 * GIB}
    answer = post(client, "/gate", question, 200)
    assert (answer["fits"], answer["limit_bytes"]) == (False, 24 * GIB)


def test_only_as_many_ranks_are_compared_and_the_newest_came_last(client):
    """A rank of eight takes another peak; the client's clock does not say which prediction is the newest."""
    post(client, "/predictions", make_prediction("ranks", world_size=8))
    post(client, "/predictions", make_prediction("future", made_at=2.5e11))
    post(client, "/predictions", make_prediction("last", card="NVIDIA L4", card_names=[]))
    post(client, "/runs", make_run_in())
    post(client, "/runs/r1/summaries", make_summary())
    found = get(client, "/predictions/errors")["comparisons"]
    assert {one["prediction_id"]: one["is_newest"] for one in found} == {"future": False, "last": True}


def test_the_gate_says_what_would_help(client):
    """Where not even one sample fits: the remedies, the most saved first."""
    remedies = [
        {"name": "bf16", "effect": "lower precision", "saved_bytes": GIB, "micro_batch_size": 4},
        {"name": "checkpointing", "effect": "more time", "saved_bytes": 2 * GIB, "micro_batch_size": 9},
        {"name": "fused", "saved_bytes": -5},
    ]
    question = {"prediction": make_prediction(remedies=remedies), "limit_bytes": GIB}
    answer = post(client, "/gate", question, 200)
    assert (answer["fits"], answer["micro_batch_size"], answer["accumulation_steps"]) == (False, 0, 0)
    assert [text.split()[0] for text in answer["advice"]] == ["1", "checkpointing", "bf16"]
    assert (
        "a card with at least" in post(client, "/gate", question | {"prediction": make_prediction()}, 200)["advice"][1]
    )


def test_health_and_metrics(client, client_of):
    """The probe needs no token, the metrics do."""
    assert client_of().get("/healthz").json() == {"status": "ok"}
    assert client_of().get("/metrics").status_code == 401
    post(client, "/runs", make_run_in())
    post(client, "/runs/r1/summaries", make_summary(held_bytes=20 * GIB))
    text = client.get("/metrics").text
    assert 'autobatch_runs{state="live"} 1.0' in text
    assert "autobatch_runs_near_limit 1.0" in text
    assert 'path="/api/v1/runs/{run_id}/summaries",status="201"} 1.0' in text
