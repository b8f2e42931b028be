"""Stores and finds plans and runs for ``fit`` and ``Runner``: a failure costs one log line and raises nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from platformdirs import user_state_path

from autobatch.events.run_history import Run
from autobatch.ledger.store import Store, Written, warn_once
from autobatch.plan import Plan
from autobatch.records import DeviceInfo

_Answer = TypeVar("_Answer")


def is_enabled() -> bool:
    return os.environ.get("AUTOBATCH_LEDGER", "").strip().lower() not in {"off", "0", "false", "no"}


def find_home() -> Path:
    """Return ``AUTOBATCH_HOME``, or the user's state folder; it may not exist yet.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    named = os.environ.get("AUTOBATCH_HOME", "").strip()
    try:
        home = Path(named).expanduser() if named else user_state_path("autobatch", appauthor=False)
    except RuntimeError:
        home = Path("~")
    if str(home).startswith("~"):  # some versions of platformdirs return it unexpanded
        raise FileNotFoundError("this user has no home folder; set AUTOBATCH_HOME to a folder for the ledger")
    return home.absolute()


class Ledger:
    """The ledger of this user, or none, which stores nothing and logs nothing."""

    def __init__(self, home: Path | None) -> None:
        self._home = home

    @classmethod
    def open(cls, device: DeviceInfo | None = None) -> Ledger:
        """Return the ledger that the environment names, unless it is turned off; ``device`` is that of a run."""
        try:
            home = find_home() if is_enabled() else None
        except OSError as error:
            _warn(error, "nowhere")
            return cls(None)
        if home is None or not os.environ.get("AUTOBATCH_SERVER", "").strip():
            return cls(home)
        from autobatch.ledger.team import open_team_ledger  # noqa: PLC0415 - most users have no server

        return open_team_ledger(home, device)

    @property
    def is_enabled(self) -> bool:
        return self._home is not None

    def remember(self, plan: Plan, forecast: Iterable[tuple[int, int]] = ()) -> bool:
        """Store a plan; ``forecast`` has the bytes by size from which its search began, for a team's server."""
        return self._use(lambda store: store.add_plan(plan), otherwise=False)

    def recall(self, fingerprint: str, rank: int = 0) -> list[Plan]:
        return self._use(lambda store: store.plans_like(fingerprint, rank), otherwise=[])

    def recall_from_team(self, fingerprint: str) -> list[Plan]:
        """Return plans with the same measurements that other computers have made, the newest first."""
        return []

    def begin_run(self, plan: Plan) -> bool:
        """Store a plan again, which may come from a file, and make room for its runs; return whether that is done."""
        return self._use(lambda store: store.begin_run(plan), otherwise=False)

    def update_run(self, new: Run) -> Written:
        return self._use(lambda store: store.update_run(new), otherwise="not now")

    def _use(self, action: Callable[[Store], _Answer], *, otherwise: _Answer) -> _Answer:
        if self._home is None:
            return otherwise
        try:
            return action(Store(self._home))
        except Exception as error:  # noqa: BLE001 - no failure here is worth a training step
            _warn(error, str(self._home))
            return otherwise


def _warn(error: Exception, where: str) -> None:
    warn_once(
        f"ledger {where}",
        f"the ledger in {where} cannot be used ({type(error).__name__}: {error}): plans and runs may not be stored; "
        f"nothing else is affected; AUTOBATCH_HOME moves it, AUTOBATCH_LEDGER=off turns it off",
    )
