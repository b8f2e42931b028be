"""Answers requests under ``/api/v1``, by the rules in the docstring of ``autobatch.service.records``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool

from autobatch.report.difference import diff_plans_data
from autobatch.service import answers, records
from autobatch.service.alerts import NEAR, WATCHED_S
from autobatch.service.auth import ANYONE, Role, Token
from autobatch.service.comparison import decide, summarise_groups
from autobatch.service.records import Id
from autobatch.service.shield import BoundedRequest, address_of
from autobatch.service.state import Service
from autobatch.service.store import Kind

COOKIE = "autobatch_token"
_MOST_STREAMS, _MOST_STREAMS_OF_ONE = 500, 20
_LOOK_EVERY_S = 1.0
_REFRESH_EVERY = 15  # looks
_NO_TOKEN = "pass a valid token: Authorization: Bearer abt_..."  # noqa: S105 - a message

_problems: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.Problem, "content": {"application/problem+json": {}}}
    for status in (400, 401, 403, 404, 405, 409, 413, 421, 422, 429, 503)
}


class GuardedRoute(APIRoute):
    """Asks for a valid token before the body is read, so that a stranger's body costs nothing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def check_and_answer(request: Request) -> Response:
            given = await _bearer(request)
            text = given.credentials.strip() if given else request.cookies.get(COOKIE, "")
            request.state.token = await run_in_threadpool(find_token, request, text)
            if request.state.token is None:
                raise HTTPException(401, _NO_TOKEN, {"WWW-Authenticate": "Bearer"})
            return await answer(BoundedRequest(request.scope, request.receive))

        return check_and_answer


def find_token(request: Request, text: str) -> Token | None:
    """Return the valid token with this text; with ``--open`` anyone on this machine may do all without one."""
    service: Service = request.app.state.service
    if not text:
        return ANYONE if service.settings.is_open else None
    token = service.tokens.find(text)
    if token is None and service.failures.take(address_of(request)):
        raise HTTPException(429, "too many wrong tokens from this address", {"Retry-After": "10"})
    return token


async def _service_of(request: Request) -> Service:  # async: it needs no thread
    service: Service = request.app.state.service
    return service


def _require(role: Role) -> Callable[[Request], Coroutine[Any, Any, Token]]:
    async def check(request: Request) -> Token:
        token: Token = request.state.token
        if token.level < role:
            raise HTTPException(403, f"this needs the role {role.name}, and the token {token.name} is a {token.role}")
        return token

    return check


This = Annotated[Service, Depends(_service_of)]
Reader = Annotated[Token, Depends(_require(Role.reader))]
Writer = Annotated[Token, Depends(_require(Role.writer))]
Admin = Annotated[Token, Depends(_require(Role.admin))]

_bearer = HTTPBearer(auto_error=False, description="A token of ``autobatch serve token create``.")
router = APIRouter(prefix="/api/v1", responses=_problems, route_class=GuardedRoute, dependencies=[Depends(_bearer)])
metrics_router = APIRouter(route_class=GuardedRoute, include_in_schema=False)


def _owner(token: Token) -> str | None:
    """Return whose runs a token may write to: those that it began; ``None`` for an admin's."""
    return None if token.level >= Role.admin else token.name


@router.get("/me")
def who_am_i(token: Reader) -> answers.Me:
    return answers.Me(name=token.name, role=token.role)


@router.post("/plans", status_code=201)
def add_plan(plan: records.PlanIn, service: This, _: Writer) -> records.Stored:
    return records.Stored(id=plan.id, new=service.store.add_plan(plan))


@router.get("/plans")
def list_plans(query: Annotated[answers.PlanQuery, Query()], service: This) -> answers.PlanPage:
    return service.store.list_plans(query)


@router.get("/plans/compare")
def compare_plans(first: Id, second: Id, service: This) -> answers.Difference:
    return answers.Difference.model_validate(
        diff_plans_data(service.store.find_plan(first)[1], service.store.find_plan(second)[1])
    )


@router.get("/plans/{plan_id}")
def show_plan(plan_id: Id, service: This) -> answers.PlanOut:
    host, plan = service.store.find_plan(plan_id)
    return answers.PlanOut(host=host, plan=plan, runs=service.store.list_runs(answers.RunQuery(plan_id=plan_id)).runs)


@router.post("/recall")
def recall(question: records.RecallQuestion, service: This) -> records.RecallAnswer:
    return records.RecallAnswer(plans=tuple(service.store.recall(question.fingerprint, question.rank)))


@router.post("/runs", status_code=201)
def add_run(run: records.RunIn, service: This, token: Writer) -> records.Stored:
    return records.Stored(id=run.id, new=service.store.add_run(run, token.name))


@router.get("/runs")
def list_runs(query: Annotated[answers.RunQuery, Query()], service: This) -> answers.RunPage:
    return service.store.list_runs(query)


@router.get("/runs/{run_id}")
def show_run(run_id: Id, service: This) -> answers.RunOut:
    return service.store.find_run(run_id)


@router.post("/runs/{run_id}/summaries", status_code=201)
def add_summary(run_id: Id, summary: records.RunSummary, service: This, token: Writer) -> records.Stored:
    return records.Stored(id=run_id, new=service.store.add_summary(run_id, summary, _owner(token)))


@router.post("/runs/{run_id}/end", status_code=201)
def end_run(run_id: Id, end: records.RunEnd, service: This, token: Writer) -> records.Stored:
    return records.Stored(id=run_id, new=service.store.end_run(run_id, end, _owner(token)))


@router.get("/cards")
def list_cards(service: This) -> answers.CardPage:
    return answers.CardPage(cards=tuple(service.store.cards()))


@router.get("/machines")
def list_machines(service: This) -> answers.MachinePage:
    return answers.MachinePage(machines=tuple(service.store.machines()))


@router.post("/predictions", status_code=201)
def add_prediction(prediction: records.PredictionIn, service: This, _: Writer) -> records.Stored:
    return records.Stored(id=prediction.id, new=service.store.add_prediction(prediction))


@router.get("/predictions")
def list_predictions(query: Annotated[answers.PageQuery, Query()], service: This) -> answers.PredictionPage:
    return service.store.list_predictions(query)


@router.get("/predictions/errors")
def show_errors(service: This) -> answers.ErrorPage:
    return summarise_groups(service.store.comparisons())


@router.delete("/{kind}/{record_id}")
def forget(kind: Kind, record_id: Id, service: This, _: Admin) -> answers.Forgotten:
    return answers.Forgotten(runs=service.store.forget(kind, record_id))


@router.post("/gate")
def ask_gate(question: records.GateQuestion, service: This) -> records.GateAnswer:
    return decide(question, service.store.comparisons())


@router.post("/alerts/test")
def send_test(service: This, _: Admin) -> answers.AlertTested:
    failed = service.alerts.test()
    return answers.AlertTested(sent=not failed, detail=failed)


@router.get("/events", response_class=StreamingResponse)
async def stream_events(service: This, token: Reader) -> StreamingResponse:
    """Send an event when something was written, and now and then; a page then asks for what it shows."""
    if sum(service.streams.values()) >= _MOST_STREAMS or service.streams[token.hash] >= _MOST_STREAMS_OF_ONE:
        raise HTTPException(503, "too many pages are open", {"Retry-After": "30"})
    return StreamingResponse(_watch(service, token.hash), media_type="text/event-stream")


async def _watch(service: Service, whose: str) -> AsyncIterator[str]:
    service.streams[whose] += 1
    try:
        seen, quiet = -1, 0
        while not service.closing.is_set():
            # Also when nothing was written here: runs fall silent, and another server may write to this database.
            quiet = 0 if service.database.changes != seen else quiet + 1
            if quiet % _REFRESH_EVERY == 0:
                seen = service.database.changes
                yield f"event: runs\ndata: {seen}\n\n"
            try:
                await asyncio.wait_for(service.closing.wait(), _LOOK_EVERY_S)
            except asyncio.TimeoutError:
                continue
    finally:
        service.streams -= Counter([whose])


@router.get("/openapi.json", include_in_schema=False)
def show_openapi(request: Request) -> dict[str, Any]:
    schema: dict[str, Any] = request.app.openapi()
    return schema


@metrics_router.get("/metrics")
def show_metrics(service: This) -> Response:
    return Response(service.metrics.render(service.store, time.time() - WATCHED_S, NEAR), media_type="text/plain")
