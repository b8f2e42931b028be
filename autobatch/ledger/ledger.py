"""Stores and finds plans and runs for ``fit`` and ``Runner``: a failure costs one log line and raises nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from autobatch.events.run_history import RunUpdate
from autobatch.ledger.home import find_home, is_enabled, warn_once
from autobatch.ledger.store import Store, Written
from autobatch.plan import Plan

_Answer = TypeVar("_Answer")


class Ledger:
    """The ledger of this user, or none, which stores nothing and logs nothing."""

    def __init__(self, home: Path | None) -> None:
        """Use the files in this folder, which need not exist."""
        self._home = home

    @classmethod
    def open(cls) -> Ledger:
        """Return the ledger that the environment names, unless it is turned off."""
        try:
            return cls(find_home() if is_enabled() else None)
        except OSError as error:
            _warn(error, "nowhere")
            return cls(None)

    @property
    def is_enabled(self) -> bool:
        """Whether there is one; writing to it may still fail."""
        return self._home is not None

    def remember(self, plan: Plan) -> bool:
        """Store a plan; return whether it is stored."""
        return self._use(lambda store: store.add_plan(plan), otherwise=False)

    def recall(self, fingerprint: str, rank: int = 0) -> list[Plan]:
        """Return this rank's plans with the same measurements, the newest first."""
        return self._use(lambda store: store.plans_like(fingerprint, rank), otherwise=[])

    def begin_run(self, plan: Plan) -> bool:
        """Store a plan again, which may come from a file, and make room for its runs; return whether that is done."""
        return self._use(lambda store: store.begin_run(plan), otherwise=False)

    def update_run(self, update: RunUpdate) -> Written:
        """Append what is new of a run."""
        return self._use(lambda store: store.update_run(update), otherwise="not now")

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
