"""Refuses requests before any endpoint sees them: a wrong host or origin, a body too large, too many at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autobatch.service.metrics import Metrics
from autobatch.service.records import LARGEST_BODY

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_MOST_ADDRESSES = 10_000
_BODY_WITHIN_S = 30.0
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"same-origin",  # with "no-referrer" a browser hides the origin of our own forms
    b"cache-control": b"no-store",
    b"content-security-policy": (
        b"default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error as RFC 9457 has it, in one line."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return Response(json.dumps(content), status, headers, "application/problem+json")


class RateLimit:
    """Counts requests of each address: ``rate`` a second, and ``burst`` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and when that was

    def take(self, address: str) -> bool:
        """Count a request; return whether it is one too many."""
        now = time.monotonic()
        left, at = self._left.pop(address, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        self._left[address] = (max(left - 1, 0.0), now)
        if len(self._left) > _MOST_ADDRESSES:
            self._left.popitem(last=False)
        return left < 1


class Shield:
    """The outermost layer of the service."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], limit: RateLimit, metrics: Metrics) -> None:
        self._app, self._hosts, self._limit, self._metrics = app, frozenset(hosts), limit, metrics

    async def __call__(  # noqa: C901, PLR0915 - one request from its beginning to its end
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, received, is_refused = time.perf_counter(), 500, 0, False
        broken: Response | None = None  # answer to a body that is too large or too slow
        left_s: float | None = _BODY_WITHIN_S  # None once the body is whole

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name for name, _ in message["headers"]}
                added = [(name, value) for name, value in _HEADERS.items() if name not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        async def send_safely(message: Message) -> None:
            nonlocal is_refused
            if broken is None:
                await send_with_headers(message)
            elif not is_refused:  # FastAPI has taken it for a body that cannot be parsed
                is_refused = True
                await broken(scope, receive, send_with_headers)

        async def receive_within_limit() -> Message:
            nonlocal received, broken, left_s
            asked = time.perf_counter()
            try:
                message = await (receive() if left_s is None else asyncio.wait_for(receive(), max(left_s, 0)))
            except asyncio.TimeoutError:
                broken = problem(408, f"the body took longer than {_BODY_WITHIN_S:g} s", {"Connection": "close"})
                raise _BrokenError from None
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                broken = problem(413, _too_large(), {"Connection": "close"})
                raise _BrokenError
            if left_s is not None:
                left_s = left_s - (time.perf_counter() - asked) if message.get("more_body") else None
            return message

        try:
            refused = self._refuse(HTTPConnection(scope), scope["method"])
            await (refused or self._app)(scope, receive_within_limit, send_safely)
        except _BrokenError:
            if not is_refused and broken is not None:
                await broken(scope, receive, send_with_headers)
        finally:
            route = scope.get("route")
            self._metrics.count(scope["method"], getattr(route, "path", "other"), status, time.perf_counter() - began)

    def _refuse(self, request: HTTPConnection, method: str) -> Response | None:
        host = _host_of(request.headers.get("host", ""))
        if host not in self._hosts and "*" not in self._hosts:
            return problem(421, "the Host header names another server; --allow-host allows it")
        origin = request.headers.get("origin", "")
        if method not in {"GET", "HEAD"} and origin and urlsplit(origin).netloc != request.headers.get("host"):
            return problem(403, "the request comes from a page of another site")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > LARGEST_BODY:
            return problem(413, _too_large())
        if self._limit.take(request.client.host if request.client else ""):
            return problem(429, "too many requests from this address", {"Retry-After": "1"})
        return None


class _BrokenError(Exception):
    pass


def _too_large() -> str:
    return f"the body is larger than {LARGEST_BODY} bytes"


def _host_of(header: str) -> str:
    """Return a Host header without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
