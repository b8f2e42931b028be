"""The pages in a real browser: live, escaped, by keyboard, on a phone, in the dark, and without the network."""

from __future__ import annotations

import shutil
import time

import pytest
from services import GIB, make_plan_in, make_prediction, make_run_in, make_summary, run_in_thread

from autobatch.service.records import PlanIn, PredictionIn, RunIn, RunSummary

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra serve-tests")
CHROMIUM = shutil.which("chromium")
EVIL = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
    pytest.mark.parametrize("database", ["sqlite"], indirect=True),
]


@pytest.fixture(scope="module")
def chromium():
    """One browser for all tests."""
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def address(service):
    """A server with a run, a plan and a prediction."""
    service.store.add_plan(PlanIn.model_validate(make_plan_in(model=EVIL)))
    service.store.add_run(RunIn.model_validate(make_run_in(model=EVIL)))
    service.store.add_prediction(PredictionIn.model_validate(make_prediction(model=EVIL)))
    with run_in_thread(service) as url:
        yield url


@pytest.fixture
def page(chromium, service, address):
    """A phone in the dark, logged in by keyboard; whatever a script or the network complains about fails the test."""
    context = chromium.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = context.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(address) else None)
    page.goto(address)
    page.keyboard.type(service.tokens.create("a person", "reader"))
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text("Fleet")
    yield page
    assert faults == []
    context.close()


def summarise(service, number, **changes):
    """Hand in a summary."""
    service.store.add_summary("r1", RunSummary.model_validate(make_summary(number, **changes)))


def test_the_fleet_is_live_and_escaped(page, service):
    """A new summary is on the page without a reload; stored markup is text."""
    table = page.get_by_role("table", name="Runs now")
    playwright.expect(table).to_contain_text(EVIL)
    summarise(service, 0, held_bytes=19 * GIB)
    playwright.expect(table).to_contain_text("19.0 GiB of 20.0 GiB")
    summarise(service, 1, held_bytes=round(19.5 * GIB))
    playwright.expect(table).to_contain_text("19.5 GiB of 20.0 GiB")
    playwright.expect(page.locator("#connection")).to_have_text("live")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"


def test_every_page_fits_a_phone_and_is_reached_by_keyboard(page):
    """Nothing is wider than the screen; the first stop of the tab key skips to the content."""
    for name in ("Runs", "Plans", "Predictions", "Alerts", "Fleet"):
        link = page.get_by_role("navigation").get_by_role("link", name=name)
        link.focus()
        with page.expect_navigation():  # until its style is there, too
            page.keyboard.press("Enter")
        playwright.expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    page.get_by_role("navigation").get_by_role("link", name="Plans").click()
    with page.expect_navigation():
        page.get_by_role("link", name=EVIL).click()
    playwright.expect(page.get_by_text("samples in a micro-batch").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_a_hidden_page_has_no_stream(page, service):
    """A browser allows six streams an address: each page has one, and none in the background."""
    deadline = time.monotonic() + 60
    while service.streams.total() != 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.streams.total() == 1
    hide = "Object.defineProperty(document, 'hidden', {value: HIDDEN, configurable: true});"
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide.replace("HIDDEN", "true") + change)
    while service.streams and time.monotonic() < deadline + 10:
        time.sleep(0.05)
    assert not service.streams
    summarise(service, 0, held_bytes=19 * GIB)
    page.evaluate(hide.replace("HIDDEN", "false") + change)
    playwright.expect(page.get_by_role("table", name="Runs now")).to_contain_text("19.0 GiB of 20.0 GiB")


def test_the_server_ends_with_a_page_open(page, service, address):
    """Its stream is closed, and the page says so."""
    playwright.expect(page.locator("#connection")).to_have_text("live")
    service.closing.set()
    deadline = time.monotonic() + 60
    while service.streams and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not service.streams
    playwright.expect(page.locator("#connection")).to_have_text("not connected")
