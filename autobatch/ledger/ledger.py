"""Stores and finds plans and runs for ``fit`` and ``Runner``: a failure costs one log line and raises nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from platformdirs import user_state_path

from autobatch.events.run_history import Run
from autobatch.ledger.store import Store, Written, warn_once
from autobatch.plan import Plan

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
    def open(cls) -> Ledger:
        try:
            return cls(find_home() if is_enabled() else None)
        except OSError as error:
            _warn(error, "nowhere")
            return cls(None)

    @property
    def is_enabled(self) -> bool:
        return self._home is not None

    def remember(self, plan: Plan) -> bool:
        return self._use(lambda store: store.add_plan(plan), otherwise=False)

    def recall(self, fingerprint: str, rank: int = 0) -> list[Plan]:
        return self._use(lambda store: store.plans_like(fingerprint, rank), otherwise=[])

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
