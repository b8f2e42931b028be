"""Sends requests to the team's server, whose name and token come from the environment.

Nothing that a server does may hurt a training: an answer has a deadline and a largest size, and a redirect is an error.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - a look-up of a name imports it, and a child forked meanwhile would have half of it
import json
import os
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # not Python's own one before 3.11
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from autobatch.errors import InvalidArgument

TIMEOUT_S = 2.0
_LARGEST_ANSWER = 16 * 2**20  # bytes: ten plans are far less
_PROBLEM = "application/problem+json"
_OF_ALL = {421, 429}  # another record would be answered the same


class ServerAway(Exception):
    """The server did not answer, or its answer cannot be used; a later attempt may succeed."""


class NotTaken(ServerAway):
    """The server did not take this record now, and may take others."""


class Refused(Exception):
    """The server will not take this record at any time."""


@dataclass(frozen=True)
class Server:
    """Address of a server, and the token that it knows us by."""

    url: str
    token: str = field(repr=False)

    @classmethod
    def named(cls) -> Server | None:
        """Return the server that ``AUTOBATCH_SERVER`` and ``AUTOBATCH_TOKEN`` name, if there is one."""
        url = os.environ.get("AUTOBATCH_SERVER", "").strip().rstrip("/")
        return cls(url, os.environ.get("AUTOBATCH_TOKEN", "").strip()) if url else None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:  # a port that is not a number
            is_address = False
        if not is_address or "@" in parts.netloc or parts.query or parts.fragment:
            raise InvalidArgument("AUTOBATCH_SERVER must be an address such as http://autobatch.example:8765")
        if not (self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("AUTOBATCH_TOKEN has letters that no token has")

    def ask(self, method: str, path: str, body: bytes | None = None, *, seconds: float = TIMEOUT_S) -> Any:
        """Return the answer, read from JSON.

        Raises:
            ServerAway: The server did not answer, or its answer cannot be used; ``NotTaken`` if others may be taken.
            Refused: The server refuses this body for good.
        """
        try:
            status, kind, content = self._send(method, path, body, seconds)
            answer = json.loads(content) if 200 <= status < 300 else None
        except Exception as error:  # noqa: BLE001 - on this side or on the way, so nothing is wrong with the record
            raise ServerAway(f"{type(error).__name__}: {error}") from None
        if answer is not None:
            return answer
        if status in {401, 403}:
            raise ServerAway("it does not take AUTOBATCH_TOKEN for this")
        detail = _read_detail(content) if kind == _PROBLEM else ""
        if status in (409, 422) and detail:  # only our service answers so, and only about the record itself
            raise Refused(detail)
        why = f"it answered {status}: {detail}" if detail else f"it answered {status}"
        raise (ServerAway if status in _OF_ALL else NotTaken)(why)

    def ask_in_time(self, method: str, path: str, body: bytes | None = None, *, seconds: float = TIMEOUT_S) -> Any:
        """Ask in a thread, and leave it alone after so many seconds: a look-up of a name has no timeout."""
        answer = Future[Any]()

        def ask() -> None:
            try:
                answer.set_result(self.ask(method, path, body, seconds=seconds))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                answer.set_exception(error)

        Thread(target=ask, name="autobatch asks the server", daemon=True).start()
        try:
            return answer.result(seconds)
        except Late:
            raise ServerAway(f"no answer in {seconds:g} s") from None

    def _send(self, method: str, path: str, body: bytes | None, seconds: float) -> tuple[int, str, bytes]:
        parts, deadline = urlsplit(self.url), time.monotonic() + seconds
        scheme = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = scheme(parts.hostname or "", parts.port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"{parts.path}/api/v1{path}", body, headers)
            with connection.getresponse() as response:
                kind = response.headers.get_content_type()
                return response.status, kind, _read_within(response, deadline)
        finally:
            connection.close()


def _read_within(response: HTTPResponse, deadline: float) -> bytes:
    parts, length = [], 0
    while part := response.read1(2**16):
        parts.append(part)
        length += len(part)
        if length > _LARGEST_ANSWER:
            raise ValueError("the answer does not end")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer came too slowly")
    return b"".join(parts)


def _read_detail(content: bytes) -> str:
    """Return the reason in an error's answer; empty for an answer of another kind."""
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return ascii(detail)[1:-1][:200] if isinstance(detail, str) else ""
