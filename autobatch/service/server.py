"""Puts the service together, and runs it until Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import ClassVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError, SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from autobatch._formatting import is_one_line
from autobatch._version import __version__
from autobatch.errors import AutobatchError
from autobatch.service.api import This, metrics_router, router
from autobatch.service.database import Busy, Database, describe_fault
from autobatch.service.pages import public_router, show_error
from autobatch.service.pages import router as page_router
from autobatch.service.shield import Shield, problem
from autobatch.service.state import Service, Settings

_LONGEST_DETAIL = 300
_END_WITHIN_S = 1
_REQUEST_WITHIN_S = 10.0
_MOST_SILENT = 500  # connections without a request; a process may often open no more than 1024 files
_MOST_REQUESTS = 5000  # at once

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
    for one in (router, page_router, public_router, metrics_router):
        app.include_router(one)
    app.mount("/static", StaticFiles(packages=[("autobatch.service", "static")]))
    app.get("/healthz", include_in_schema=False)(_check_health)
    for error in (HTTPException, RequestValidationError, Busy, SQLAlchemyError, Exception):
        app.add_exception_handler(error, _answer_error)
    app.add_middleware(Shield, hosts=service.settings.allowed_hosts, limit=service.limit, metrics=service.metrics)
    return app


def _check_health(service: This) -> dict[str, str]:
    with service.database.read() as connection:
        connection.exec_driver_sql("SELECT 1")
    return {"status": "ok"}


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return an error: as JSON to a program, as a page to a browser."""
    headers: dict[str, str] = {}
    match error:
        case HTTPException():
            status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
        case RequestValidationError():
            first = error.errors()[0]
            text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            status, detail = 422, (text if is_one_line(text) else ascii(text))[:_LONGEST_DETAIL]
        case Busy():
            status, detail, headers = 503, "too many records wait to be written", {"Retry-After": "2"}
        case SQLAlchemyError() if not isinstance(error, (DataError, IntegrityError, ProgrammingError)):
            status, detail, headers = 503, f"the database cannot be used: {describe_fault(error)}", {"Retry-After": "5"}
            logger.error("%s", detail)
        case _:  # also a value that a bound should have kept from the database
            status, detail = 500, "the server has a fault; its log has more"
            logger.error("a request failed", exc_info=error)
    if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
        return problem(status, detail, headers)
    page = show_error(request, status, detail)
    page.headers.update(headers)
    return page


class _Protocol(H11Protocol):
    """Ends connections on which no request comes, or only a part of its headers: uvicorn waits for ever.

    If very many wait, a new one ends the one that has waited the longest, so that others are served meanwhile.
    """

    _silent: ClassVar[dict[_Protocol, asyncio.TimerHandle]] = {}  # of this process, the longest silence first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.end_silence()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next request is here already
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_silence()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body:  # uvicorn would wait for the rest of the body
            self.transport.close()
        super().shutdown()

    def _await_request(self) -> None:
        self.end_silence()
        self._silent[self] = self.loop.call_later(_REQUEST_WITHIN_S, self.transport.close)
        if len(self._silent) > _MOST_SILENT:
            longest = next(iter(self._silent))
            longest.end_silence()
            longest.transport.abort()

    def end_silence(self) -> None:
        if timer := self._silent.pop(self, None):
            timer.cancel()


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
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=_END_WITHIN_S,
    )
    return _Server(config, service)


def serve(database_url: str, settings: Settings, announce: Callable[[Service, str], None]) -> None:
    """Run the service until Ctrl-C; ``announce`` gets its address before the first request.

    Raises:
        AutobatchError: The database or the port cannot be used.
    """
    is_v6 = ":" in settings.host
    with closing(_listen(settings, is_v6=is_v6)) as listener, closing(Database.open(database_url)) as database:
        service = Service(settings, database)
        server = make_server(service)
        gc.freeze()  # else Python walks through all modules now and then, for 0.1 s in which nobody is answered
        host = f"[{settings.host}]" if is_v6 else settings.host
        announce(service, f"http://{host}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])
    gc.freeze()  # else the interpreter walks through all modules at its end: 0.2 s


def _listen(settings: Settings, *, is_v6: bool) -> socket.socket:
    # With the protocol named: else asyncio leaves out TCP_NODELAY, and each answer waits 40 ms.
    listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise AutobatchError(f"cannot listen on {settings.host} port {settings.port}: {error}") from error
    return listener
