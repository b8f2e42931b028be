"""Answers requests under ``/api/v1``, as the docstring of ``autobatch.service.records`` lists them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool

from autobatch.report.difference import diff_plans_data
from autobatch.service.alerts import NEAR, WATCHED_S
from autobatch.service.answers import (
    AlertTested,
    CardPage,
    Difference,
    ErrorPage,
    Forgotten,
    MachinePage,
    Me,
    PageQuery,
    PlanOut,
    PlanPage,
    PlanQuery,
    PredictionPage,
    Problem,
    RunOut,
    RunPage,
    RunQuery,
)
from autobatch.service.auth import ANYONE, Role, Token
from autobatch.service.comparison import decide, summarise_groups
from autobatch.service.records import (
    GateAnswer,
    GateQuestion,
    Id,
    PlanIn,
    PredictionIn,
    RecallAnswer,
    RecallQuestion,
    RunEnd,
    RunIn,
    RunSummary,
    Stored,
)
from autobatch.service.state import Service

COOKIE = "autobatch_token"
_MOST_STREAMS, _MOST_STREAMS_OF_ONE = 500, 20
_LOOK_EVERY_S = 1.0
_KEEP_ALIVE_EVERY = 15  # looks
_NO_TOKEN = "pass a valid token: Authorization: Bearer abt_..."  # noqa: S105 - a message

_problems: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "content": {"application/problem+json": {}}}
    for status in (400, 401, 403, 404, 405, 409, 413, 421, 422, 429, 503)
}


class _TokenFirst(APIRoute):
    """Checks the token before the body is read, so that a stranger's body costs nothing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def check_and_answer(request: Request) -> Response:
            given = await _bearer(request)
            text, service = given.credentials.strip() if given else None, request.app.state.service
            token = service.tokens.remembered(text or "") or await run_in_threadpool(find_token, request, service, text)
            if token is None:
                raise HTTPException(401, _NO_TOKEN, {"WWW-Authenticate": "Bearer"})
            request.state.token = token
            return await answer(request)

        return check_and_answer


_bearer = HTTPBearer(auto_error=False, description="A token of ``autobatch serve token create``.")
router = APIRouter(prefix="/api/v1", responses=_problems, route_class=_TokenFirst, dependencies=[Depends(_bearer)])
metrics_router = APIRouter(route_class=_TokenFirst, include_in_schema=False)

PlanId = Annotated[Id, Path(description="Id of a plan.")]
PredictionId = Annotated[Id, Path(description="Id of a prediction.")]
RunId = Annotated[Id, Path(description="Id of a run.")]


async def service_of(request: Request) -> Service:  # async: it needs no thread
    service: Service = request.app.state.service
    return service


This = Annotated[Service, Depends(service_of)]


def find_token(request: Request, service: Service, text: str | None) -> Token | None:
    """Return the token of a request; with ``--open`` anyone on this machine may do all."""
    address = request.client.host if request.client else ""
    text = text or request.cookies.get(COOKIE) or ""
    if not text and service.settings.is_open:
        return ANYONE
    token = service.tokens.find(text) if text else None
    if text and token is None and service.failures.take(address):
        raise HTTPException(429, "too many wrong tokens from this address", {"Retry-After": "10"})
    return token


def _require(role: Role) -> Callable[[Request], Coroutine[Any, Any, Token]]:
    async def check(request: Request) -> Token:
        token: Token = request.state.token
        if token.level < role:
            raise HTTPException(403, f"this needs the role {role.name}, and the token {token.name} is a {token.role}")
        return token

    return check


Reader = Annotated[Token, Depends(_require(Role.reader))]
Writer = Annotated[Token, Depends(_require(Role.writer))]
Admin = Annotated[Token, Depends(_require(Role.admin))]


def _owner(token: Token) -> str | None:
    """Return whose runs a token may write to: those that it began; ``None`` for an admin's."""
    return None if token.level >= Role.admin else token.name


@router.get("/me")
def who_am_i(token: Reader) -> Me:
    return Me(name=token.name, role=token.role)


@router.post("/plans", status_code=201)
def add_plan(plan: PlanIn, service: This, _: Writer) -> Stored:
    return Stored(id=plan.id, new=service.store.add_plan(plan))


@router.get("/plans")
def list_plans(query: Annotated[PlanQuery, Query()], service: This, _: Reader) -> PlanPage:
    plans, following = service.store.list_plans(query)
    return PlanPage(plans=tuple(plans), next=following)


@router.get("/plans/compare")
def compare_plans(first: Id, second: Id, service: This, _: Reader) -> Difference:
    return Difference.model_validate(
        diff_plans_data(service.store.find_plan(first)[1], service.store.find_plan(second)[1])
    )


@router.get("/plans/{plan_id}")
def show_plan(plan_id: PlanId, service: This, _: Reader) -> PlanOut:
    host, plan = service.store.find_plan(plan_id)
    return PlanOut(host=host, plan=plan, runs=tuple(service.store.list_runs(RunQuery(plan_id=plan_id))[0]))


@router.delete("/plans/{plan_id}")
def forget_plan(plan_id: PlanId, service: This, _: Admin) -> Forgotten:
    return Forgotten(runs=service.store.forget("plans", plan_id))


@router.post("/recall")
def recall(question: RecallQuestion, service: This, _: Reader) -> RecallAnswer:
    return RecallAnswer(plans=tuple(service.store.recall(question.fingerprint, question.rank)))


@router.post("/runs", status_code=201)
def add_run(run: RunIn, service: This, token: Writer) -> Stored:
    return Stored(id=run.id, new=service.store.add_run(run, token.name))


@router.get("/runs")
def list_runs(query: Annotated[RunQuery, Query()], service: This, _: Reader) -> RunPage:
    runs, following = service.store.list_runs(query)
    return RunPage(runs=tuple(runs), next=following)


@router.get("/runs/{run_id}")
def show_run(run_id: RunId, service: This, _: Reader) -> RunOut:
    return service.store.find_run(run_id)


@router.post("/runs/{run_id}/summaries", status_code=201)
def add_summary(run_id: RunId, summary: RunSummary, service: This, token: Writer) -> Stored:
    return Stored(id=run_id, new=service.store.add_summary(run_id, summary, _owner(token)))


@router.post("/runs/{run_id}/end", status_code=201)
def end_run(run_id: RunId, end: RunEnd, service: This, token: Writer) -> Stored:
    return Stored(id=run_id, new=service.store.end_run(run_id, end, _owner(token)))


@router.delete("/runs/{run_id}", status_code=204)
def forget_run(run_id: RunId, service: This, _: Admin) -> None:
    service.store.forget("runs", run_id)


@router.get("/cards")
def list_cards(service: This, _: Reader) -> CardPage:
    return CardPage(cards=tuple(service.store.cards()))


@router.get("/machines")
def list_machines(service: This, _: Reader) -> MachinePage:
    return MachinePage(machines=tuple(service.store.machines()))


@router.post("/predictions", status_code=201)
def add_prediction(prediction: PredictionIn, service: This, _: Writer) -> Stored:
    return Stored(id=prediction.id, new=service.store.add_prediction(prediction))


@router.get("/predictions")
def list_predictions(query: Annotated[PageQuery, Query()], service: This, _: Reader) -> PredictionPage:
    predictions, following = service.store.list_predictions(query)
    return PredictionPage(predictions=tuple(predictions), next=following)


@router.delete("/predictions/{prediction_id}", status_code=204)
def forget_prediction(prediction_id: PredictionId, service: This, _: Admin) -> None:
    service.store.forget("predictions", prediction_id)


@router.get("/predictions/errors")
def show_errors(service: This, _: Reader) -> ErrorPage:
    return summarise_groups(service.store.comparisons())


@router.post("/gate")
def ask_gate(question: GateQuestion, service: This, _: Reader) -> GateAnswer:
    return decide(question, service.store.comparisons())


@router.post("/alerts/test")
def send_test(service: This, _: Admin) -> AlertTested:
    failed = service.alerts.test()
    return AlertTested(sent=not failed, detail=failed)


@router.get("/events", response_class=StreamingResponse)
async def stream_events(service: This, token: Reader) -> StreamingResponse:
    """Send an event whenever something was written; a page then asks for what it shows."""
    if sum(service.streams.values()) >= _MOST_STREAMS or service.streams[token.hash] >= _MOST_STREAMS_OF_ONE:
        raise HTTPException(503, "too many pages are open", {"Retry-After": "30"})
    return StreamingResponse(_watch(service, token.hash), media_type="text/event-stream")


async def _watch(service: Service, whose: str) -> AsyncIterator[str]:
    service.streams[whose] += 1
    try:
        seen, quiet = -1, 0
        while not service.closing.is_set():
            changes = service.database.changes
            if changes != seen:
                yield f"event: runs\ndata: {changes}\n\n"
                seen, quiet = changes, 0
            elif (quiet := quiet + 1) % _KEEP_ALIVE_EVERY == 0:
                yield ": nothing new\n\n"
            try:
                await asyncio.wait_for(service.closing.wait(), _LOOK_EVERY_S)
            except asyncio.TimeoutError:
                continue
    finally:
        service.streams -= Counter([whose])


@router.get("/openapi.json", include_in_schema=False)
def show_openapi(request: Request, _: Reader) -> dict[str, Any]:
    schema: dict[str, Any] = request.app.openapi()
    return schema


@metrics_router.get("/metrics")
def show_metrics(service: This, _: Reader) -> Response:
    return Response(service.metrics.render(service.store, time.time() - WATCHED_S, NEAR), media_type="text/plain")
