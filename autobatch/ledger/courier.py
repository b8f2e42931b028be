"""Hands in to the team's server what it lacks, from the files of the ledger.

    outbox/plans.FINGERPRINT.ID.json    empty: the server lacks this plan.
    outbox/runs.PLAN.RUN.json           the run as it began, and the number of its next summary. Empty: none was sent.
    outbox/predictions.ID.json          a prediction, of which the ledger has no other copy.

The server takes each record once, by its id. A mark is deleted after the answer. So if a process is killed before that,
another process or ``autobatch push`` hands its records in again.

One daemon thread does all that. It starts when there is something to hand in. The end of the process waits for it up to
a second, if the server has answered before.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from autobatch.events.run_history import Run
from autobatch.ledger.server import NotTaken, Server, ServerAway
from autobatch.ledger.store import Store, runs_id, warn_once
from autobatch.ledger.wire import Summaries, describe_plan, describe_run, read_cards
from autobatch.plan import Plan
from autobatch.records import DeviceInfo, Record
from autobatch.service.records import PredictionIn, RunEnd, RunIn, Stored

_TICK_S = 10.0
_RETRY_S, _MOST_RETRY_S = 30.0, 300.0
_END_S = 1.0
_FOREIGN_S = 120.0  # a mark of this age was left by a process that is gone, or that cannot reach the server
_SILENT_S = 600.0  # a run that has written nothing for so long was killed


class _Mark(Record):
    """Content of a run's mark."""

    run: RunIn
    next: int = -1  # number of the next summary; -1 if the server lacks the run itself


class _Followed:
    """A run whose file is read as it grows."""

    def __init__(self, mark: _Mark) -> None:
        self.begun, self.next, self.offset = mark.run, mark.next, 0
        self.summaries = Summaries(mark.run)
        self.last: Run | None = None  # line of its file


class _Own(NamedTuple):
    """A run of this process."""

    plan: Plan
    begun: Run
    device: DeviceInfo


class Courier:
    """Hands in the marks of one ledger. Plans and runs of this process at once, others when their marks are old."""

    def __init__(self, home: Path, server: Server) -> None:
        self.server = server
        self._home, self._outbox, self._pid = home, home / "outbox", os.getpid()
        self._own: dict[str, _Own | None] = {}  # marks of this process; None for plans and predictions
        self._followed: dict[str, _Followed] = {}
        self._turn = threading.Condition()
        self._asked = self._done = 0  # times that the thread was woken, and those that it has worked off
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self.paths = os.environ.get("AUTOBATCH_SHARE_PATHS", "").strip().lower() in {"1", "on", "true", "yes"}
        self.away_until = -float("inf")
        self.refused: list[str] = []  # records that the server will not take, and why

    @staticmethod
    def of(home: Path, server: Server) -> Courier:
        """Return this process's courier, which a forked child does not share."""
        key = os.getpid(), home, server
        if key not in _couriers:
            courier = _couriers.setdefault(key, Courier(home, server))
            # Before that of any recorder, and finalizers run newest first: each run has written its end by then.
            weakref.finalize(Courier, courier.end)
        return _couriers[key]

    def note_plan(self, plan: Plan) -> None:
        path = Store(self._home).path_of(plan)
        self._note(f"plans.{path.parent.name}.{path.name}", "")

    def note_prediction(self, prediction: PredictionIn) -> None:
        self._note(f"predictions.{prediction.id}.json", prediction.model_dump_json())

    def note_run(self, plan: Plan, run: Run, device: DeviceInfo) -> None:
        self._note(f"runs.{runs_id(plan)}.{run.id}.json", "", _Own(plan, run, device))

    def note_everything(self) -> None:
        """Note the whole ledger: the plans of rank 0 and their runs."""
        for path in sorted(self._home.glob("plans/*/*.json")):
            if path.stem.count(".") == 0:
                self._note(f"plans.{path.parent.name}.{path.name}", "")
        for path in sorted(self._home.glob("runs/*/*.jsonl")):
            if not (self._outbox / (name := f"runs.{path.parent.name}.{path.stem}.json")).exists():
                self._write(name, "")

    def wake(self) -> None:
        """Hand in soon what was noted."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="autobatch hands in", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, and starts no more
                return
            self._thread = thread
        with self._turn:
            self._asked += 1
            self._turn.notify_all()

    def note_failure(self, error: Exception) -> None:
        """Warn once in this process, and do not ask again at once."""
        self._failures += 1
        self.away_until = time.monotonic() + min(_RETRY_S * 2 ** (self._failures - 1), _MOST_RETRY_S)
        self._warn(error)

    def _warn(self, error: Exception) -> None:
        warn_once(
            f"server {self.server.url}",
            f"the server {self.server.url} cannot be used ({error}): plans and runs are kept in {self._home} and "
            f"handed in later; nothing else is affected; unset AUTOBATCH_SERVER to go without it",
        )

    def hand_in(self, *, everything: bool = False) -> int:
        """Hand in the marks of this process and old ones of others; return how many are done.

        Raises:
            ServerAway: The server cannot be reached; the rest stays in the outbox.
            NotTaken: Some records stay in the outbox; all others are done.
        """
        count, kept = 0, list[str]()
        for name, age_s in self._marks():
            if everything or name in self._own or age_s > _FOREIGN_S:
                try:
                    count += self._hand_in(name, age_s)
                except (NotTaken, OSError) as error:
                    self._followed.pop(name, None)  # summaries that were not sent are read again
                    kept.append(f"{name}: {error}")
                except ServerAway:
                    self._followed.clear()
                    raise
                except Exception as error:  # noqa: BLE001 - refused, or damaged: another attempt would end like this one
                    self._drop(name)
                    self.refused.append(f"{name}: {error}")
                    warn_once("refused", f"the server does not take a record of {name}: {error}; it is left out")
        if kept:
            raise NotTaken(kept[0] + (f", and {len(kept) - 1} more are kept" if kept[1:] else ""))
        return count

    def end(self) -> None:
        """Wait a moment at the end of the process, if what is left can probably be handed in."""
        if os.getpid() != self._pid or self._thread is None or self._failures or not self._own:
            return
        self._is_ending = True
        self.wake()
        with self._turn:
            self._turn.wait_for(lambda: self._done == self._asked, _END_S)

    def _work(self) -> None:
        pause: float | None = 0.0
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._done < self._asked, pause)
                asked = self._asked
            try:
                self.hand_in()
                self._failures, self.away_until = 0, -float("inf")
                pause = _TICK_S if self._own else _FOREIGN_S if any(self._marks()) else None
            except NotTaken as error:
                self._warn(error)
                self._failures, self.away_until, pause = 0, -float("inf"), _RETRY_S
            except Exception as error:  # noqa: BLE001 - no failure here is worth a training
                self.note_failure(error)
                pause = self.away_until - time.monotonic()
            with self._turn:
                self._done = asked
                self._turn.notify_all()

    def _note(self, name: str, content: str, own: _Own | None = None) -> None:
        self._outbox.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own[name] = own
        self._write(name, content)

    def _write(self, name: str, content: str) -> None:
        draft = self._outbox / f"{name}.{self._pid}.{threading.get_ident()}.draft"
        try:
            draft.write_text(content, encoding="utf-8")
            draft.replace(self._outbox / name)
        finally:
            draft.unlink(missing_ok=True)

    def _drop(self, name: str) -> None:
        (self._outbox / name).unlink(missing_ok=True)
        self._own.pop(name, None)
        self._followed.pop(name, None)

    def _marks(self) -> Iterator[tuple[str, float]]:
        """Yield the names of the marks with their age in seconds, plans before their runs."""
        names = sorted(path.name for path in self._outbox.iterdir()) if self._outbox.is_dir() else []
        for name in names:
            with suppress(FileNotFoundError):  # another process has just handed it in
                age_s = time.time() - (self._outbox / name).stat().st_mtime
                if name.endswith(".json"):
                    yield name, age_s
                elif age_s > _FOREIGN_S:  # a draft of a process that was killed
                    (self._outbox / name).unlink()

    def _hand_in(self, name: str, age_s: float) -> bool:
        kind, *rest = name.removesuffix(".json").split(".")
        try:
            if kind == "runs":
                return self._hand_in_run(name, *rest)
            if kind == "plans":
                plan = Plan.load(self._home / kind / rest[0] / f"{rest[1]}.json")
                body: Record = describe_plan(plan, paths=self.paths)
            else:
                body = PredictionIn.model_validate_json((self._outbox / name).read_bytes())
        except FileNotFoundError:  # it is not written yet, or the user has deleted it
            if age_s > _FOREIGN_S:
                self._drop(name)
            return False
        self._post(f"/{kind}", body)
        self._drop(name)
        return True

    def _post(self, path: str, body: Record) -> None:
        answer = self.server.ask("POST", path, body.model_dump_json().encode())
        try:
            Stored.model_validate(answer)
        except ValidationError:
            raise ServerAway("it is another server: its answer is not one of autobatch") from None

    def _hand_in_run(self, name: str, plan_id: str, run_id: str) -> bool:
        own, now = self._own.get(name), time.time()
        run = self._followed.get(name) or self._read_mark(name, plan_id, run_id)
        if run.next < 0:
            self._post("/runs", run.begun)
            self._save(name, run, 0)
        ready = [one for line in self._read_lines(run, plan_id) for one in run.summaries.add(line)]
        if run.last is None:
            return False
        is_silent = now - run.last.last_seen_at > _SILENT_S
        # A run that has failed ends with its process, since another step may follow.
        is_over = is_silent if own is None else self._is_ending
        has_ended = run.last.outcome == "finished" or (run.last.outcome != "running" and is_over)
        ready += run.summaries.finish() if has_ended or is_silent else run.summaries.close(now)
        for summary in ready:
            if summary.number >= run.next:
                is_now = own is not None and now - summary.at < _FOREIGN_S
                cards = read_cards(own.device) if own is not None and is_now else ()
                self._post(f"/runs/{run_id}/summaries", summary.model_copy(update={"cards": cards}))
                self._save(name, run, summary.number + 1)
        if has_ended:
            # The text of an error may quote data.
            reason = run.last.reason if self.paths else run.last.reason.partition(":")[0]
            end = RunEnd(at=run.last.last_seen_at, outcome=run.last.outcome, reason=reason)
            self._post(f"/runs/{run_id}/end", end)
        if has_ended or (is_silent and own is None):
            self._drop(name)
            return True
        if own is None:
            os.utime(self._outbox / name)
        else:
            self._followed[name] = run
        return False

    def _read_mark(self, name: str, plan_id: str, run_id: str) -> _Followed:
        content, own = (self._outbox / name).read_bytes(), self._own.get(name)
        if content:
            return _Followed(_Mark.model_validate_json(content))
        if own is not None:
            return _Followed(_Mark(run=describe_run(own.plan, own.begun, own.device)))
        with (self._home / "runs" / plan_id / f"{run_id}.jsonl").open("rb") as file:
            first = Run.model_validate_json(file.readline())
        return _Followed(_Mark(run=describe_run(Store(self._home).find_plan(plan_id), first)))

    def _save(self, name: str, run: _Followed, number: int) -> None:
        run.next = number
        self._write(name, _Mark(run=run.begun, next=number).model_dump_json())

    def _read_lines(self, run: _Followed, plan_id: str) -> Iterator[Run]:
        """Yield the lines that were added to the file; a damaged one is left out."""
        with (self._home / "runs" / plan_id / f"{run.begun.id}.jsonl").open("rb") as file:
            file.seek(run.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # another line may be on its way
        run.offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValidationError):
                run.last = Run.model_validate_json(line)
                yield run.last


_couriers: dict[tuple[int, Path, Server], Courier] = {}
