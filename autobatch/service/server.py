"""Puts the service together, and runs it until Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError, SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from autobatch._formatting import is_one_line
from autobatch._version import __version__
from autobatch.errors import AutobatchError
from autobatch.service.api import This, metrics_router, router
from autobatch.service.database import Busy, Database, describe_fault
from autobatch.service.pages import LoginNeeded, show_error
from autobatch.service.pages import router as page_router
from autobatch.service.rows import Conflict, NotFound
from autobatch.service.shield import Shield, problem
from autobatch.service.state import Service, Settings

_LONGEST_DETAIL = 300
_END_WITHIN_S = 1
_HEADERS_WITHIN_S = 10.0
_MOST_CONNECTIONS = 5000

logger = logging.getLogger("autobatch")


def make_app(service: Service) -> FastAPI:
    """Return the application of a service."""

    @asynccontextmanager
    async def live(_app: FastAPI) -> AsyncIterator[None]:
        service.alerts.start()
        yield
        service.alerts.stop()

    app = FastAPI(
        title="autobatch", version=__version__, lifespan=live, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(page_router)
    app.mount("/static", StaticFiles(packages=[("autobatch.service", "static")]))
    app.get("/healthz", include_in_schema=False)(_check_health)
    app.include_router(metrics_router)
    known = (HTTPException, RequestValidationError, LoginNeeded, NotFound, Conflict, Busy, SQLAlchemyError)
    for error in (*known, Exception):
        app.add_exception_handler(error, _answer_error)
    app.add_middleware(Shield, hosts=service.settings.allowed_hosts, limit=service.limit, metrics=service.metrics)
    return app


def _check_health(service: This) -> dict[str, str]:
    with service.database.read() as connection:
        connection.exec_driver_sql("SELECT 1")
    return {"status": "ok"}


def _answer(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error: as JSON to a program, as a page to a browser."""
    if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
        return problem(status, detail, headers)
    page = show_error(request, status, detail)
    page.headers.update(headers or {})
    return page


async def _answer_error(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    match error:
        case LoginNeeded():
            return RedirectResponse("/login", 303)
        case HTTPException():
            status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
        case RequestValidationError():
            first = error.errors()[0]
            text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            status, detail = 422, (text if is_one_line(text) else ascii(text))[:_LONGEST_DETAIL]
        case NotFound() | Conflict():
            status, detail = error.status, str(error)
        case Busy():
            status, detail, headers = 503, "too many records wait to be written", {"Retry-After": "2"}
        case SQLAlchemyError() if not isinstance(error, (DataError, IntegrityError, ProgrammingError)):
            status, detail, headers = 503, f"the database cannot be used: {describe_fault(error)}", {"Retry-After": "5"}
            logger.error("%s", detail)
        case _:  # also a value that a bound should have kept from the database
            status, detail = 500, "the server has a fault; its log has more"
            logger.error("a request failed", exc_info=error)
    return _answer(request, status, detail, headers)


class _Protocol(H11Protocol):
    """Ends connections on which no request comes, or only a part of its headers: uvicorn waits for ever."""

    _last: object = None  # the answer that was over at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_HEADERS_WITHIN_S, self._look)

    def _look(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.cycle is self._last:
            self.transport.close()
        elif not self.transport.is_closing():
            self._last = self.cycle if is_waiting else self
            self.loop.call_later(_HEADERS_WITHIN_S, self._look)

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body:  # uvicorn would wait for the rest of the body
            self.transport.close()
        super().shutdown()


class _Server(uvicorn.Server):
    """Ends open streams, and messages to the webhook, before uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.closing.set()
        self._service.alerts.ending.set()
        await super().shutdown(sockets)


def make_server(service: Service) -> uvicorn.Server:
    """Return a server that is ready to run."""
    settings = service.settings
    config = uvicorn.Config(
        make_app(service),
        host=settings.host,
        port=settings.port,
        http=_Protocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_END_WITHIN_S,
    )
    return _Server(config, service)


def serve(database_url: str, settings: Settings, announce: Callable[[Service, str], None]) -> None:
    """Run the service until Ctrl-C; ``announce`` gets its address before the first request.

    Raises:
        AutobatchError: The database or the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named: else asyncio leaves out TCP_NODELAY, and each answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise AutobatchError(f"cannot listen on {settings.host} port {settings.port}: {error}") from error
    database = None
    try:
        database = Database.open(database_url)
        service = Service(settings, database)
        host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
        server = make_server(service)
        gc.freeze()  # else Python walks through all modules now and then, for 0.1 s in which nobody is answered
        announce(service, f"http://{host}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])
    finally:
        listener.close()
        if database is not None:
            database.close()
        gc.freeze()  # else the interpreter walks through all modules at its end: 0.2 s
