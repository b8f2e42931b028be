"""The pages for people: each shows what was handed in, escaped, to whom it may."""

from __future__ import annotations

import re
import time

import pytest
from fastapi.testclient import TestClient
from services import GIB, make_card, make_plan_in, make_prediction, make_run_in, make_summary

from autobatch.service import pages
from autobatch.service.pages import chart_memory
from autobatch.service.records import RunEnd, RunIn, RunSummary
from autobatch.service.server import make_app

EVIL = "<script>alert(1)</script>"
PAGES = ["/", "/runs", "/runs?model=scr", "/runs/r1", "/plans", "/plans?device=l4", "/plans/a1", "/predictions"]
PAGES += ["/compare", "/compare?first=a1&second=a2", "/search", "/search?q=script", "/alerts", "/api"]


@pytest.fixture
def browser(service, client):
    """A client that has logged in as a person does, on a server with records of each kind."""
    names = {"model": EVIL, "host": EVIL}
    for name in ("a1", "a2"):
        client.post("/api/v1/plans", json=make_plan_in(name, **names)).raise_for_status()
    client.post("/api/v1/runs", json=make_run_in(user=EVIL, cards=[make_card(name=EVIL)], **names)).raise_for_status()
    setback = {"step": 1, "kind": "size", "old_size": 43, "new_size": 21, "reason": EVIL}
    for number in range(3):
        summary = make_summary(number, micro_batch_size=21, setbacks=[setback])
        client.post("/api/v1/runs/r1/summaries", json=summary).raise_for_status()
    client.post("/api/v1/predictions", json=make_prediction(**names, card=EVIL, card_names=["L4"])).raise_for_status()
    service.store.add_alert("r1", "small", EVIL)
    new = TestClient(make_app(service), headers={"Accept": "text/html"}, raise_server_exceptions=False)
    answer = new.post("/login", data={"token": service.tokens.create("a person", "reader")}, follow_redirects=False)
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    return new


def test_every_page_shows_markup_as_text(browser):
    """Whatever a client has stored in a name."""
    for path in PAGES:
        answer = browser.get(path)
        assert answer.status_code == 200, path
        assert EVIL not in answer.text, path
        assert not re.search("undefined|Traceback|None<", answer.text), path
    assert "&lt;script&gt;" in browser.get("/").text
    assert "18.0 GiB" in browser.get("/runs/r1").text


def test_pages_need_a_login(browser, client_of):
    """Without a cookie every page leads to the login; a wrong token does not get in; logging out ends it."""
    stranger = client_of()
    for path in PAGES:
        assert stranger.get(path).status_code == 401
        answer = stranger.get(path, headers={"Accept": "text/html"}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert stranger.post("/login", data={"token": "abt_wrong"}).status_code == 401
    assert stranger.post("/login", content=b"\xff&&=%zz").status_code == 401
    browser.post("/logout")
    assert browser.get("/", follow_redirects=False).status_code == 303


def test_errors_are_pages_to_a_browser(browser):
    """And JSON to a program."""
    for path, status in (("/nothing", 404), ("/runs/none", 404), ("/plans/a%20b", 422), ("/runs?after=x", 422)):
        answer = browser.get(path)
        assert answer.status_code == status
        assert answer.headers["content-type"].startswith("text/html")
    assert browser.get("/api/v1/runs/none").headers["content-type"] == "application/problem+json"


def test_only_an_admin_forgets_and_tests(browser, service, client_of):
    """A reader sees no button, and is refused."""
    assert "Forget this plan" not in browser.get("/plans/a1").text
    assert browser.post("/plans/a1/forget").status_code == 403
    assert browser.post("/alerts/test").status_code == 403
    admin = client_of()
    admin.post("/login", data={"token": service.tokens.create("chief", "admin")})
    assert "Forget this plan" in admin.get("/plans/a1").text
    assert "has no webhook" in admin.post("/alerts/test").text
    evil = {"Origin": "http://evil.example"}
    for path in ("/runs/r1/forget", "/predictions/p1/forget"):
        assert browser.post(path).status_code == 403
        assert f'action="{path}"' in admin.get("/runs/r1").text + admin.get("/predictions").text
        assert [admin.post(path, follow_redirects=False).status_code for _ in range(2)] == [303, 404]
    assert admin.post("/plans/a1/forget", headers=evil).status_code == 403
    assert admin.post("/plans/a1/forget", follow_redirects=False).status_code == 303
    assert admin.get("/plans/a1").status_code == 404


def test_memory_over_time_is_labelled(service, client):
    """With 0, the limit, the highest peak, and when it began and ended; one summary is no line."""
    assert chart_memory([], 0) is None
    service.store.add_run(RunIn.model_validate(make_run_in()))
    for number, held in enumerate((17 * GIB, 18 * GIB)):
        summary = make_summary(number, held_bytes=held, at=1e9 + 3600 * number)
        service.store.add_summary("r1", RunSummary.model_validate(summary))
    text = client.get("/runs/r1", headers={"Cookie": f"autobatch_token={service.tokens.create('one', 'reader')}"}).text
    plot = text[text.index('<div class="plot">') : text.index("<figcaption>")]
    labels = re.findall(r">([^<>\n]+)<", plot)
    assert labels == ["0", "20.0 GiB", "18.0 GiB", "2001-09-09 01:46 UTC", "2001-09-09 02:46 UTC"]


def test_a_run_without_a_summary_reads_well(service, client):
    """It says that none came yet, and shows no peak, no bar and no chart."""
    cookie = {"Cookie": f"autobatch_token={service.tokens.create('one', 'reader')}"}
    for changes in ({}, {"limit_bytes": 0, "cards": [], "model": "", "user": "", "plan_id": ""}):
        service.store.add_run(RunIn.model_validate(make_run_in(f"r{len(changes)}", **changes)))
        page = client.get(f"/runs/r{len(changes)}", headers=cookie).text
        page = page[page.index("<h1>") :]
        assert "No summary yet" in page
        assert not re.search('0 bytes|None|svg|class="bar|Memory over time|last peak', page)
    assert '<span class="bar' not in client.get("/runs", headers=cookie).text
    service.store.end_run("r0", RunEnd(at=time.time(), outcome="failed"))
    assert "It sent no summary" in client.get("/runs/r0", headers=cookie).text


def test_a_plan_with_many_trials_is_drawn_in_part(browser, client):
    """An even choice of them, and the page says so; few wait for a report at a time."""
    plan = make_plan_in("many")
    [trial, *_] = plan["plan"]["trials"]
    plan["plan"]["trials"] = [{**trial, "micro_batch_size": size + 1} for size in range(9000)]
    client.post("/api/v1/plans", json=plan).raise_for_status()
    page = browser.get("/plans/many").text
    assert "200 of 9000 trials" in page
    assert len(page) < 1_000_000
    for _ in range(4):
        pages._turns.acquire()
    try:
        answer = browser.get("/plans/many")
    finally:
        pages._turns.release(4)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert browser.get("/plans/many").status_code == 200
