"""Shows the fleet, runs, plans, predictions and alerts to people: HTML that needs nothing from elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from autobatch._formatting import format_bytes, plural
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.difference import diff_plans
from autobatch.report.html import make_environment, render_fragment
from autobatch.report.pictures import PALETTE
from autobatch.service.alerts import NEAR, WATCHED_S
from autobatch.service.answers import PageQuery, PlanPage, PlanQuery, PredictionPage, RunPage, RunQuery, SummaryLine
from autobatch.service.api import COOKIE, This, find_token
from autobatch.service.auth import Role, Token
from autobatch.service.comparison import summarise_groups
from autobatch.service.records import Id, Name, OptionalId
from autobatch.service.store import Kind

_COOKIE_S = 30 * 24 * 3600
_FOUND = 20  # by a part of an id or of one kind of name
_LARGEST_LOGIN = 4096  # bytes
_MOST_LIVE = 200
_MOST_SETBACKS = 200
_COLUMNS = 110  # of a comparison
_MOST_TRIALS = 200  # of a report
_drawing = threading.Lock()  # matplotlib has one style for all threads
_turns = threading.BoundedSemaphore(4)  # others would take all threads of the service
_PATIENCE_S = 3.0

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class LoginNeeded(Exception):
    """The browser has no valid cookie."""


class _Page(NamedTuple):
    """Renders a template for whoever asks; ``token`` is ``None`` before the login."""

    request: Request
    token: Token | None

    def __call__(self, template: str, *, status: int = 200, **values: Any) -> Response:
        is_open = self.token is not None and not self.token.hash
        shared = {"path": self.request.url.path, "token": self.token, "is_open": is_open, "near": NEAR}
        text = _environment().get_template(template).render(shared | values | {"status": status})
        return HTMLResponse(text.encode("utf-8", "replace"), status)


def _visitor(request: Request, service: This) -> _Page:
    token = find_token(request, service, None)
    if token is None:
        raise LoginNeeded
    return _Page(request, token)


Page = Annotated[_Page, Depends(_visitor)]


def _admin(page: Page) -> _Page:
    if page.token is None or page.token.level < Role.admin:
        raise HTTPException(403, "only an admin may do this")
    return page


AdminPage = Annotated[_Page, Depends(_admin)]


@router.get("/")
def show_fleet(service: This, page: Page) -> Response:
    runs = service.store.live_runs(time.time() - WATCHED_S)
    return page("fleet.html", machines=service.store.machines(), runs=runs)


@router.get("/runs")
def show_runs(query: Annotated[RunQuery, Query()], service: This, page: Page) -> Response:
    live = [] if query.after or query.filters else service.store.live_runs()[:_MOST_LIVE]
    return page("runs.html", live=live, **_listed(service.store.list_runs(query), query))


@router.get("/runs/{run_id}")
def show_run(run_id: Id, service: This, page: Page) -> Response:
    found = service.store.find_run(run_id)
    setbacks = [setback for line in found.summaries for setback in line.setbacks][-_MOST_SETBACKS:]
    chart = chart_memory(found.summaries, found.run.limit_bytes)
    return page("run.html", **dict(found), chart=chart, setbacks=setbacks)


@router.get("/plans")
def show_plans(query: Annotated[PlanQuery, Query()], service: This, page: Page) -> Response:
    return page("plans.html", **_listed(service.store.list_plans(query), query))


@router.get("/plans/{plan_id}")
def show_plan(plan_id: Id, service: This, page: Page) -> Response:
    host, plan = service.store.find_plan(plan_id)
    runs = service.store.list_runs(RunQuery(plan_id=plan_id)).runs
    report = Markup(_report(plan_id, plan.model_dump_json()))  # noqa: S704 - the report has escaped it
    known: dict[str, Any] = {"host": host, "plan_id": plan_id, "plan": plan, "runs": runs}
    return page("plan.html", **known, report=report, most_trials=_MOST_TRIALS)


@router.get("/compare")
def show_comparison(service: This, page: Page, first: OptionalId = "", second: OptionalId = "") -> Response:
    lines: list[str] = []
    if first and second:
        (_, one), (_, other) = service.store.find_plan(first), service.store.find_plan(second)
        lines = diff_plans(one, other, _COLUMNS).splitlines()
    return page("compare.html", first=first, second=second, lines=lines)


@router.get("/predictions")
def show_predictions(query: Annotated[PageQuery, Query()], service: This, page: Page) -> Response:
    errors = summarise_groups(service.store.comparisons())
    return page("predictions.html", errors=errors, **_listed(service.store.list_predictions(query), query))


@router.get("/search")
def search(service: This, page: Page, q: Annotated[Name, Query()] = "") -> Response:
    """Look for a part of an id, or of a model's, a device's or a computer's name."""
    queries = [{"limit": _FOUND, column: q} for column in ("id", "model", "device", "host")] if q else []
    found_plans = (service.store.list_plans(PlanQuery.model_validate(query)).plans for query in queries)
    found_runs = (service.store.list_runs(RunQuery.model_validate(query)).runs for query in queries)
    plans = {plan.id: plan for found in found_plans for plan in found}
    runs = {run.id: run for found in found_runs for run in found}
    return page("search.html", q=q, plans=list(plans.values()), runs=list(runs.values()))


@router.get("/alerts")
def show_alerts(service: This, page: Page) -> Response:
    return page("alerts.html", alerts=service.store.alerts(), has_webhook=bool(service.settings.webhook), tested=None)


@router.post("/alerts/test")
def send_test(service: This, page: AdminPage) -> Response:
    tested, alerts = service.alerts.test() or "the webhook took the test", service.store.alerts()
    return page("alerts.html", alerts=alerts, has_webhook=bool(service.settings.webhook), tested=tested)


@router.post("/{kind}/{record_id}/forget")
def forget(kind: Kind, record_id: Id, service: This, _: AdminPage) -> Response:
    service.store.forget(kind, record_id)
    return RedirectResponse(f"/{kind}", 303)


@router.get("/api")
def show_api(page: Page) -> Response:
    return page("api.html", schema=page.request.app.openapi())


@router.get("/login")
def show_login(request: Request) -> Response:
    return _Page(request, None)("login.html", wrong=False)


@router.post("/login")
async def log_in(request: Request, service: This) -> Response:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_LOGIN:
            raise HTTPException(413, "this is no token")
    form = parse_qs(body.decode("utf-8", "replace"))
    text = form.get("token", [""])[0].strip()
    token = await run_in_threadpool(find_token, request, service, text) if text else None
    if token is None:
        return _Page(request, None)("login.html", wrong=True, status=401)
    answer = RedirectResponse("/", 303)
    is_secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    answer.set_cookie(COOKIE, text, _COOKIE_S, httponly=True, samesite="strict", secure=is_secure)
    return answer


@router.post("/logout")
def log_out() -> Response:
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@router.get("/style.css")
def show_style() -> Response:
    return Response(_environment().get_template("style.css").render(), media_type="text/css")


def show_error(request: Request, status: int, detail: str) -> Response:
    """Return an error as a page."""
    return _Page(request, None)("error.html", status=status, detail=detail)


class MemoryChart(NamedTuple):
    """Memory over time, as what is drawn: lengths are in per cent of the picture."""

    points: str
    limit: float
    highest: float
    highest_bytes: int
    begin: float
    end: float


def chart_memory(summaries: Sequence[SummaryLine], limit_bytes: int) -> MemoryChart | None:
    """Return the chart of a run; the table beside it has the same numbers."""
    if len(summaries) < 2:
        return None
    peaks = [one.held_bytes or one.peak_bytes for one in summaries]
    begin, end, highest = summaries[0].at, summaries[-1].at, max(peaks)
    whole = max(highest, limit_bytes, 1) * 1.05
    points = " ".join(
        f"{100 * (one.at - begin) / ((end - begin) or 1):.2f},{100 - 100 * peak / whole:.2f}"
        for one, peak in zip(summaries, peaks, strict=True)
    )
    return MemoryChart(points, 100 * limit_bytes / whole, 100 * highest / whole, highest, begin, end)


def _report(plan_id: str, content: str) -> str:
    """Return a report, one at a time; whoever would wait long for it is sent away."""
    busy = HTTPException(503, "too many reports are being drawn", {"Retry-After": "5"})
    if not _turns.acquire(blocking=False):
        raise busy
    try:
        if not _drawing.acquire(timeout=_PATIENCE_S):
            raise busy
        try:
            return _draw_report(plan_id, content)
        finally:
            _drawing.release()
    finally:
        _turns.release()


@lru_cache(64)
def _draw_report(_plan_id: str, content: str) -> str:
    plan = PlanRecord.model_validate_json(content)
    if (count := len(plan.trials)) > _MOST_TRIALS:
        shown = tuple(plan.trials[index * count // _MOST_TRIALS] for index in range(_MOST_TRIALS))
        plan = plan.model_copy(update={"trials": shown})
    return render_fragment(plan)


def _listed(found: PlanPage | RunPage | PredictionPage, query: PageQuery) -> dict[str, Any]:
    """Return a list, what was asked for, and the query of the next page; that is empty if there is none."""
    more = f"?{urlencode(query.filters | {'after': found.next})}" if found.next else ""
    return {**dict(found), "query": query, "more": more}


@cache
def _environment() -> Environment:
    environment = make_environment("autobatch.service")
    environment.filters |= {"gib": format_bytes, "ago": _ago, "date": _date, "percent": "{:+.1%}".format}
    environment.globals |= {"plural": plural, "palette": PALETTE}
    return environment


def _ago(moment: float) -> str:
    """Return how long ago a moment was, in one unit."""
    seconds = time.time() - moment
    if seconds < 60:
        return "now"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return ""


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))
