"""Stores and finds plans and runs for ``fit`` and a running ``Runner``; nothing here ever raises or waits for long.

Covers opening the file for each use, the log line when that fails, and going on in another file when one is damaged. A
connection is closed after each use: one that is open during a fork may damage the file (sqlite.org/howtocorrupt.html,
2.6). Does not cover the command line, which should say what is wrong and so uses ``store``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from autobatch.events.run_history import Run
from autobatch.ledger import database
from autobatch.ledger.run_summary import RunUpdate
from autobatch.ledger.store import Store
from autobatch.plan import Plan

__all__ = ["TRAINING_WAITS_S", "Ledger", "Written"]

Written = Literal["written", "not now", "forgotten"]
"""``"forgotten"`` where the run is not stored any more, ``"not now"`` where it may be worth another try."""

_Answer = TypeVar("_Answer")

_FIT_WAITS_S = 5.0
"""For other writers, beside trials that take seconds; a write of theirs takes milliseconds."""

TRAINING_WAITS_S = 0.1
"""Between two steps; what could not be written then is written later."""


class Ledger:
    """The ledger of this user, or none: then it stores nothing and logs nothing."""

    def __init__(self, home: Path | None) -> None:
        """Use the ledger in this folder, which need not exist; with ``None``, none."""
        self._home = home

    @classmethod
    def open(cls) -> Ledger:
        """The ledger that the environment names, unless it is turned off."""
        if not database.is_enabled():
            return cls(None)
        try:
            return cls(database.find_home())
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, training goes on
            _warn(error, "nowhere")
            return cls(None)

    @property
    def is_enabled(self) -> bool:
        """Whether there is one; writing to it may still fail."""
        return self._home is not None

    @property
    def file(self) -> Path | None:
        """The file that is written to now; another one after it was damaged."""
        return None if self._home is None else database.find_ledger(self._home)

    def remember(self, plan: Plan) -> bool:
        """Store a plan; whether it is now safe, whatever happens to this process."""
        return self._use(lambda store: _add(store, plan), False, _FIT_WAITS_S)

    def recall(self, fingerprint: str, rank: int = 0) -> list[Plan]:
        """Plans of this rank that were measured on the same, the newest first; none where they cannot be read."""
        return self._use(lambda store: store.plans_like(fingerprint, rank), [], _FIT_WAITS_S)

    def begin_run(self, plan: Plan, run: Run, patience_s: float = TRAINING_WAITS_S) -> bool:
        """Store a run, and its plan, which may come from a file; whether both are now safe."""
        return self._use(lambda store: _add(store, plan, run), False, patience_s)

    def update_run(self, update: RunUpdate, patience_s: float = TRAINING_WAITS_S) -> Written:
        """Store what is new of a run."""

        def write(store: Store) -> Written:
            return "written" if store.update_run(update) else "forgotten"

        return self._use(write, "not now", patience_s)

    def _use(self, action: Callable[[Store], _Answer], otherwise: _Answer, patience_s: float) -> _Answer:
        if self._home is None:
            return otherwise
        try:
            return _use_newest_file(self._home, action, patience_s)
        except Exception as error:  # noqa: BLE001 - no failure here is worth a training step
            _warn(error, str(self._home))
            return otherwise


def _use_newest_file(home: Path, action: Callable[[Store], _Answer], patience_s: float) -> _Answer:
    path = database.find_ledger(home)
    try:
        return _use_file(path, action, patience_s)
    except Exception as error:
        if not database.is_damaged(error):
            raise
        successor = database.next_file(path)
        if successor is None:
            raise database.LedgerUnavailable(
                f"{path} is damaged, as were all before it: look at that disk, and move them away"
            ) from error
        database.warn_once(
            f"damaged {path}",
            f"the ledger {path} is damaged ({error}); it is left as it is, and from now on {successor.name} is used",
        )
    return _use_file(successor, action, patience_s)  # once: a disk that damages this one too is not filled with more


def _use_file(path: Path, action: Callable[[Store], _Answer], patience_s: float) -> _Answer:
    with Store(path, patience_s=patience_s) as store:
        return action(store)


def _add(store: Store, plan: Plan, run: Run | None = None) -> bool:
    store.add_plan(plan)
    if run is not None:
        store.add_run(run)
    return True


def _warn(error: Exception, where: str) -> None:
    database.warn_once(
        database.cause_of(error),
        f"the ledger in {where} cannot be used ({type(error).__name__}: {error}): plans and runs may not be stored; "
        f"nothing else is affected; AUTOBATCH_HOME moves it, AUTOBATCH_LEDGER=off turns it off",
    )
