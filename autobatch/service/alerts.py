"""Looks for runs that need somebody's eye, and sends one message for each of them to a webhook."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from autobatch._formatting import format_bytes, plural
from autobatch.service.answers import Alert, RunLine
from autobatch.service.database import Busy
from autobatch.service.store import Store

NEAR = 0.97  # of the limit
_SMALL_S = 600.0
_RATE_WINDOW_S = 600.0
_MOST_RETRIES = 5  # in a window, if that is also more than one step in twenty
_MOST_RETRIES_SHARE = 0.05
_LOOK_EVERY_S = 10.0
WATCHED_S = 3600.0  # a run that nobody heard of for so long is no news
_RESEND_S = 24 * 3600.0
_TIMEOUT_S = 5.0
_LATER = {408, 429}  # unlike other answers of 4xx, these do not refuse the message for good

logger = logging.getLogger("autobatch")


class Alerts:
    """Checks the live runs every ten seconds. Each run gives at most one alert of each kind."""

    def __init__(self, store: Store, webhook: str | None) -> None:
        self._store, self._webhook = store, webhook
        self._totals: dict[str, deque[tuple[float, int, int]]] = {}  # time, steps and retries of each run
        self.ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autobatch-alerts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.ending.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)

    def _watch(self) -> None:
        while not self.ending.wait(_LOOK_EVERY_S):
            try:
                self.check()
            except (SQLAlchemyError, Busy):  # the requests report it
                continue
            except Exception as error:  # noqa: BLE001 - without the watch nobody hears of any run
                logger.error("the runs cannot be watched: %s", type(error).__name__)  # noqa: TRY400 - one line

    def check(self) -> None:
        """Note what is new, and send what was not sent yet."""
        now = time.time()
        runs = self._store.live_runs(now - WATCHED_S)
        self._totals = {run.id: self._totals.get(run.id, deque()) for run in runs}
        for run in runs:
            for kind, text in self._find(run, now):
                self._store.add_alert(run.id, kind, f"{run.model or 'a run'} on {run.host} ({run.id}): {text}")
        for alert in self._store.claim_alerts(now - _RESEND_S) if self._webhook else ():
            failure, status = self._send(alert.text, alert)
            waits = max(_LOOK_EVERY_S, now - alert.made_at)  # each wait doubles the alert's age
            is_refused = 400 <= status < 500 and status not in _LATER
            if not failure:
                self._store.note_alert(alert, sent_at=now)
            elif is_refused or now - alert.made_at + waits > _RESEND_S:
                logger.warning("%s: the alert on the run %s is not sent again", failure, alert.run_id)
                self._store.note_alert(alert, failure=failure, next_at=now + _RESEND_S)
            else:
                logger.warning("%s: the alert on the run %s is sent again later", failure, alert.run_id)
                self._store.note_alert(alert, failure=failure, next_at=now + waits)
            if self.ending.is_set() or (failure and not status):  # the webhook is away: the next look tries others
                break

    def _find(self, run: RunLine, now: float) -> Iterator[tuple[str, str]]:
        if run.state == "silent":
            yield "silent", f"no summary for {round((now - run.seen_at) / 60)} minutes"
            return
        if run.fill >= NEAR:
            peak, limit = format_bytes(run.last_bytes), format_bytes(run.limit_bytes)
            yield "near limit", f"the last peak was {peak} of a limit of {limit}"
        if run.small_since and now - run.small_since >= _SMALL_S:
            sizes = f"{run.micro_batch_size} samples in a micro-batch instead of {run.first_size}"
            yield "small", f"{sizes} for {round((now - run.small_since) / 60)} minutes"
        window = self._totals[run.id]
        window.append((now, run.steps, run.retries))
        while now - window[0][0] > _RATE_WINDOW_S:
            window.popleft()
        _, steps, retries = window[0]
        more, steps = run.retries - retries, run.steps - steps
        if more >= _MOST_RETRIES and more > _MOST_RETRIES_SHARE * steps:
            yield "retries", f"{plural(more, 'retry', 'retries')} in {plural(steps, 'step')} within ten minutes"

    def test(self) -> str:
        """Send a test; return why it failed, or nothing."""
        if not self._webhook:
            return "the server has no webhook: start it with --webhook URL"
        failure, _ = self._send("autobatch: this is a test of the webhook", None)
        return failure

    def _send(self, text: str, alert: Alert | None) -> tuple[str, int]:
        """Send a message, and do not wait for it if the server ends; return why it failed, and the answer's status."""
        answers = queue.SimpleQueue[tuple[str, int]]()
        threading.Thread(target=lambda: answers.put(self._post(text, alert)), daemon=True).start()
        while not self.ending.is_set():
            with suppress(queue.Empty):
                return answers.get(timeout=0.1)
        return "the server ends", 0

    def _post(self, text: str, alert: Alert | None) -> tuple[str, int]:
        """Send a message to the webhook, whose JSON Slack and Mattermost also read."""
        content = {"text": text, "kind": alert.kind if alert else "test", "run": alert.run_id if alert else ""}
        request = urllib.request.Request(  # noqa: S310 - the command line takes http and https only
            self._webhook or "", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the same
                return "", answer.status
        except urllib.error.HTTPError as error:
            error.close()
            return f"the webhook answered {error.code}", error.code
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", None) or str(reason)
            return f"the webhook cannot be reached: {' '.join(text.split())[:100]}", 0
