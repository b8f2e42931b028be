"""The pages for people: each shows what was handed in, escaped, to whom it may."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient
from services import make_card, make_plan_in, make_prediction, make_run_in, make_summary

from autobatch.service.pages import draw_memory
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
        answer = stranger.get(path, follow_redirects=False)
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
    assert admin.post("/plans/a1/forget", headers=evil).status_code == 403
    assert admin.post("/plans/a1/forget", follow_redirects=False).status_code == 303
    assert admin.get("/plans/a1").status_code == 404


def test_a_picture_of_one_summary_is_none():
    """A line needs two points."""
    assert draw_memory([], 0) == ""
