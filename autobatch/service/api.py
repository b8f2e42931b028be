"""Answers requests under ``/api/v1``, as the docstring of ``autobatch.service.records`` lists them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool

from autobatch.report.difference import diff_plans_data
from autobatch.service.answers import (
    AlertTested,
    CardPage,
    Difference,
    ErrorPage,
    Forgotten,
    Me,
    PlanOut,
    PlanPage,
    PredictionPage,
    Problem,
    RunOut,
    RunPage,
)
from autobatch.service.auth import ANYONE, Role, Token
from autobatch.service.comparison import decide, summarise_groups
from autobatch.service.records import (
    GateAnswer,
    GateQuestion,
    Id,
    Name,
    OptionalId,
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
            given = request.headers.get("authorization", "").partition(" ")
            text = given[2].strip() if given[0].lower() == "bearer" else None
            token = await run_in_threadpool(find_token, request, request.app.state.service, text)
            if token is None:
                raise HTTPException(401, _NO_TOKEN, {"WWW-Authenticate": "Bearer"})
            request.state.token = token
            return await answer(request)

        return check_and_answer


router = APIRouter(prefix="/api/v1", responses=_problems, route_class=_TokenFirst)

PlanId = Annotated[Id, Path(description="Id of a plan.")]
PredictionId = Annotated[Id, Path(description="Id of a prediction.")]
RunId = Annotated[Id, Path(description="Id of a run.")]
Limit = Annotated[int, Query(ge=1, le=500, description="Most entries of the page.")]
After = Annotated[
    str | None,
    Query(pattern=r"^[0-9]{1,12}(\.[0-9]{1,20})?(e-[0-9]{1,3})?_[A-Za-z0-9_-]{1,64}$", description="``next`` before."),
]
NamePart = Annotated[Name, Query(description="A part of the name, in any case.")]
_bearer = HTTPBearer(auto_error=False, description="A token of ``autobatch serve token create``.")


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


def _require(role: Role) -> Callable[..., Coroutine[Any, Any, Token]]:
    async def check(
        request: Request, service: This, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Token:
        token: Token | None = getattr(request.state, "token", None)  # of a route of this module
        if token is None:
            token = await run_in_threadpool(find_token, request, service, given.credentials if given else None)
        if token is None:
            raise HTTPException(401, _NO_TOKEN, {"WWW-Authenticate": "Bearer"})
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


def read_cursor(after: str | None) -> tuple[float, str] | None:
    moment, _, key = (after or "").partition("_")
    return (float(moment), key) if after else None


@router.get("/me")
def who_am_i(token: Reader) -> Me:
    return Me(name=token.name, role=token.role)


@router.post("/plans", status_code=201)
def add_plan(plan: PlanIn, service: This, _: Writer) -> Stored:
    return Stored(id=plan.id, new=service.store.add_plan(plan))


@router.get("/plans")
def list_plans(
    *,
    service: This,
    _: Reader,
    after: After = None,
    limit: Limit = 50,
    model: NamePart = "",
    device: NamePart = "",
    host: Name = "",
) -> PlanPage:
    plans, following = service.store.list_plans(read_cursor(after), limit, model=model, device=device, host=host)
    return PlanPage(plans=tuple(plans), next=following)


@router.get("/plans/compare")
def compare_plans(first: Id, second: Id, service: This, _: Reader) -> Difference:
    return Difference.model_validate(
        diff_plans_data(service.store.find_plan(first)[1], service.store.find_plan(second)[1])
    )


@router.get("/plans/{plan_id}")
def show_plan(plan_id: PlanId, service: This, _: Reader) -> PlanOut:
    host, plan = service.store.find_plan(plan_id)
    return PlanOut(host=host, plan=plan, runs=tuple(service.store.list_runs(plan_id=plan_id)[0]))


@router.delete("/plans/{plan_id}")
def forget_plan(plan_id: PlanId, service: This, _: Admin) -> Forgotten:
    return Forgotten(runs=service.store.forget(plan_id))


@router.post("/recall")
def recall(question: RecallQuestion, service: This, _: Reader) -> RecallAnswer:
    return RecallAnswer(plans=tuple(service.store.recall(question.fingerprint, question.rank)))


@router.post("/runs", status_code=201)
def add_run(run: RunIn, service: This, token: Writer) -> Stored:
    return Stored(id=run.id, new=service.store.add_run(run, token.name))


@router.get("/runs")
def list_runs(
    *,
    service: This,
    _: Reader,
    after: After = None,
    limit: Limit = 50,
    model: NamePart = "",
    host: Name = "",
    plan_id: OptionalId = "",
    state: Literal["", "live", "ended"] = "",
) -> RunPage:
    cursor = read_cursor(after)
    runs, following = service.store.list_runs(cursor, limit, model=model, host=host, plan_id=plan_id, state=state)
    return RunPage(runs=tuple(runs), next=following)


@router.get("/runs/{run_id}")
def show_run(run_id: RunId, service: This, _: Reader) -> RunOut:
    run, summaries = service.store.find_run(run_id)
    return RunOut(run=run, summaries=tuple(summaries))


@router.post("/runs/{run_id}/summaries", status_code=201)
def add_summary(run_id: RunId, summary: RunSummary, service: This, token: Writer) -> Stored:
    return Stored(id=run_id, new=service.store.add_summary(run_id, summary, _owner(token)))


@router.post("/runs/{run_id}/end", status_code=201)
def end_run(run_id: RunId, end: RunEnd, service: This, token: Writer) -> Stored:
    return Stored(id=run_id, new=service.store.end_run(run_id, end, _owner(token)))


@router.delete("/runs/{run_id}", status_code=204)
def forget_run(run_id: RunId, service: This, _: Admin) -> None:
    service.store.forget_run(run_id)


@router.get("/cards")
def list_cards(service: This, _: Reader) -> CardPage:
    return CardPage(cards=tuple(service.store.cards()))


@router.post("/predictions", status_code=201)
def add_prediction(prediction: PredictionIn, service: This, _: Writer) -> Stored:
    return Stored(id=prediction.id, new=service.store.add_prediction(prediction))


@router.get("/predictions")
def list_predictions(
    service: This, _: Reader, after: After = None, limit: Limit = 50, model: NamePart = ""
) -> PredictionPage:
    predictions, following = service.store.list_predictions(read_cursor(after), limit, model=model)
    return PredictionPage(predictions=tuple(predictions), next=following)


@router.delete("/predictions/{prediction_id}", status_code=204)
def forget_prediction(prediction_id: PredictionId, service: This, _: Admin) -> None:
    service.store.forget_prediction(prediction_id)


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
