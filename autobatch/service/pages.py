"""Shows the fleet, runs, plans, predictions and alerts to people: HTML that needs nothing from elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.templating import Jinja2Templates
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from autobatch._formatting import format_bytes, plural
from autobatch.report.difference import diff_plans
from autobatch.report.html import make_environment, render_fragment
from autobatch.report.pictures import PALETTE
from autobatch.service.alerts import NEAR, WATCHED_S
from autobatch.service.answers import PageQuery, PlanQuery, RunQuery
from autobatch.service.api import COOKIE, Admin, GuardedRoute, This, find_token
from autobatch.service.auth import ANYONE
from autobatch.service.comparison import summarise_groups
from autobatch.service.records import Id, Name, OptionalId, SummaryLine
from autobatch.service.shield import read_body
from autobatch.service.state import Service
from autobatch.service.store import Kind, Store

_COOKIE_S = 30 * 24 * 3600
_FOUND = 20  # by the beginning of an id or a part of one kind of name
_LARGEST_LOGIN = 4096  # bytes
_MOST_LIVE = 200
_MOST_SETBACKS = 200
_COLUMNS = 110  # of a comparison
_MOST_TRIALS = 200  # of a report
_drawing = threading.Lock()  # matplotlib has one style for all threads
_turns = threading.BoundedSemaphore(4)  # more would take all threads of the service

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, route_class=GuardedRoute)
public_router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


def _describe_visitor(request: Request) -> dict[str, Any]:
    token = getattr(request.state, "token", None)  # none before the login
    return {"path": request.url.path, "token": token, "is_open": token is ANYONE}


def _ago(moment: float) -> str:
    """Return how long ago a moment was, in one unit."""
    seconds = time.time() - moment
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "now"


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


_environment = make_environment("autobatch.service")
_environment.filters |= {"gib": format_bytes, "ago": _ago, "date": _date, "percent": "{:+.1%}".format}
_environment.globals |= {"plural": plural, "palette": PALETTE, "near": NEAR}
_templates = Jinja2Templates(env=_environment, context_processors=[_describe_visitor])


def _show(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    return _templates.TemplateResponse(request, template, values | {"status": status}, status)


@router.get("/")
def show_fleet(request: Request, service: This) -> Response:
    runs = service.store.live_runs(time.time() - WATCHED_S)
    return _show(request, "fleet.html", machines=service.store.machines(), runs=runs)


@router.get("/runs")
def show_runs(request: Request, query: Annotated[RunQuery, Query()], service: This) -> Response:
    live = [] if query.after or query.filters else service.store.live_runs()[:_MOST_LIVE]
    return _show(request, "runs.html", live=live, query=query, **dict(service.store.list_runs(query)))


@router.get("/runs/{run_id}")
def show_run(request: Request, run_id: Id, service: This) -> Response:
    found = service.store.find_run(run_id)
    setbacks = [setback for line in found.summaries for setback in line.setbacks][-_MOST_SETBACKS:]
    chart = chart_memory(found.summaries, found.run.limit_bytes)
    return _show(request, "run.html", **dict(found), chart=chart, setbacks=setbacks)


@router.get("/plans")
def show_plans(request: Request, query: Annotated[PlanQuery, Query()], service: This) -> Response:
    return _show(request, "plans.html", query=query, **dict(service.store.list_plans(query)))


@router.get("/plans/{plan_id}")
def show_plan(request: Request, plan_id: Id, service: This) -> Response:
    host, plan = service.store.find_plan(plan_id)
    known: dict[str, Any] = {"host": host, "plan_id": plan_id, "plan": plan, "most_trials": _MOST_TRIALS}
    runs = service.store.list_runs(RunQuery(plan_id=plan_id)).runs
    if not _turns.acquire(blocking=False):
        raise HTTPException(503, "too many reports are being drawn", {"Retry-After": "5"})
    try:
        report = _draw_report(service.store, plan_id)
    finally:
        _turns.release()
    return _show(request, "plan.html", **known, runs=runs, report=report)


@lru_cache(64)
def _draw_report(store: Store, plan_id: str) -> Markup:
    _, plan = store.find_plan(plan_id)
    if (count := len(plan.trials)) > _MOST_TRIALS:
        shown = tuple(plan.trials[index * count // _MOST_TRIALS] for index in range(_MOST_TRIALS))
        plan = plan.model_copy(update={"trials": shown})
    with _drawing:
        return Markup(render_fragment(plan))  # noqa: S704 - the report has escaped it


@router.get("/compare")
def show_comparison(request: Request, service: This, first: OptionalId = "", second: OptionalId = "") -> Response:
    lines: list[str] = []
    if first and second:
        (_, one), (_, other) = service.store.find_plan(first), service.store.find_plan(second)
        lines = diff_plans(one, other, _COLUMNS).splitlines()
    return _show(request, "compare.html", first=first, second=second, lines=lines)


@router.get("/predictions")
def show_predictions(request: Request, query: Annotated[PageQuery, Query()], service: This) -> Response:
    errors = summarise_groups(service.store.comparisons())
    found = service.store.list_predictions(query)
    return _show(request, "predictions.html", errors=errors, query=query, **dict(found))


@router.get("/search")
def search(request: Request, service: This, q: Annotated[Name, Query()] = "") -> Response:
    """Look for the beginning of an id, or a part of a model's, a device's or a computer's name."""
    queries = [{"limit": _FOUND, column: q} for column in ("id", "model", "device", "host")] if q else []
    found_plans = (service.store.list_plans(PlanQuery.model_validate(query)).plans for query in queries)
    found_runs = (service.store.list_runs(RunQuery.model_validate(query)).runs for query in queries)
    plans = {plan.id: plan for found in found_plans for plan in found}
    runs = {run.id: run for found in found_runs for run in found}
    return _show(request, "search.html", q=q, plans=list(plans.values()), runs=list(runs.values()))


@router.get("/alerts")
def show_alerts(request: Request, service: This) -> Response:
    return _show_alerts(request, service, "")


@router.post("/alerts/test")
def send_test(request: Request, service: This, _: Admin) -> Response:
    return _show_alerts(request, service, service.alerts.test() or "the webhook took the test")


def _show_alerts(request: Request, service: Service, tested: str) -> Response:
    has_webhook = bool(service.settings.webhook)
    return _show(request, "alerts.html", alerts=service.store.alerts(), has_webhook=has_webhook, tested=tested)


@router.post("/{kind}/{record_id}/forget")
def forget(kind: Kind, record_id: Id, service: This, _: Admin) -> Response:
    service.store.forget(kind, record_id)
    return RedirectResponse(f"/{kind}", 303)


@router.get("/api")
def show_api(request: Request) -> Response:
    return _show(request, "api.html", schema=request.app.openapi())


@public_router.get("/login")
def show_login(request: Request) -> Response:
    return _show(request, "login.html", wrong=False)


@public_router.post("/login")
async def log_in(request: Request) -> Response:
    form = parse_qs((await read_body(request, _LARGEST_LOGIN)).decode("utf-8", "replace"))
    text = form.get("token", [""])[0].strip()
    if not text or await run_in_threadpool(find_token, request, text) is None:
        return _show(request, "login.html", status=401, wrong=True)
    answer = RedirectResponse("/", 303)
    is_secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    answer.set_cookie(COOKIE, text, _COOKIE_S, httponly=True, samesite="strict", secure=is_secure)
    return answer


@public_router.post("/logout")
def log_out() -> Response:
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@public_router.get("/style.css")
def show_style() -> Response:
    return Response(_environment.get_template("style.css").render(), media_type="text/css")


def show_error(request: Request, status: int, detail: str) -> Response:
    """Return an error as a page; to a browser without a valid token, the login."""
    if status == 401:
        return RedirectResponse("/login", 303)
    return _show(request, "error.html", status=status, detail=detail)


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
