"""Refuses a wrong host or origin, floods, and bodies that are too large or too slow; adds headers to each answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autobatch.service.metrics import Metrics
from autobatch.service.records import LARGEST_BODY

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_MOST_ADDRESSES = 10_000
_BODY_WITHIN_S = 30.0
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer" a browser hides the origin of our own forms
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
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


class BoundedRequest(Request):
    """Reads a body of at most ``LARGEST_BODY`` bytes, for at most half a minute."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):  # where Starlette keeps it
            self._body = await read_body(self, LARGEST_BODY)
        return self._body


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request, unless it is larger than ``most`` bytes or comes too slowly."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise HTTPException(413, f"the body is larger than {most} bytes", _CLOSE)
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), _BODY_WITHIN_S)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body took longer than {_BODY_WITHIN_S:g} s", _CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(400, "the body was cut off", _CLOSE) from None


class Shield:
    """The outermost layer of the service."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], limit: RateLimit, metrics: Metrics) -> None:
        self._app, self._hosts, self._limit, self._metrics = app, frozenset(hosts), limit, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await (self._refuse(HTTPConnection(scope)) or self._app)(scope, receive, send_with_headers)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.count(scope["method"], path, status, time.perf_counter() - began)

    def _refuse(self, request: HTTPConnection) -> Response | None:
        if _host_of(request.headers.get("host", "")) not in self._hosts and "*" not in self._hosts:
            return problem(421, "the Host header names another server; --allow-host allows it")
        origin = request.headers.get("origin", "")
        is_other_site = origin and urlsplit(origin).netloc != request.headers.get("host")
        if is_other_site and request.scope["method"] not in {"GET", "HEAD"}:
            return problem(403, "the request comes from a page of another site")
        if self._limit.take(address_of(request)):
            return problem(429, "too many requests from this address", {"Retry-After": "1"})
        return None


def address_of(request: HTTPConnection) -> str:
    return request.client.host if request.client else ""


def _host_of(header: str) -> str:
    """Return a Host header without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
