"""``Ledger``: what ``fit`` and a running ``Runner`` know of the ledger; nothing in it ever raises or waits for long.

Covers opening for each use, what is told when that fails, and going on in another file when one is damaged. A
connection is never kept: one that is open during a fork may damage the file (sqlite.org/howtocorrupt.html, 2.6). Does
not cover what people look at: they should see what is wrong, so they use ``store``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from autobatch.events.run_history import Run
from autobatch.ledger.path import find_home, find_ledger, is_on, name_successor
from autobatch.ledger.run_summary import RunNotes
from autobatch.ledger.schema import LedgerUnavailable, is_damaged
from autobatch.ledger.store import Store
from autobatch.ledger.warnings import spell_cause, warn_once
from autobatch.plan import Plan

__all__ = ["Ledger", "Written"]

Written = Literal["written", "not now", "forgotten"]
_Answer = TypeVar("_Answer")

_FIT_WAITS_S = 5.0
"""For other writers, beside trials that take seconds; a write of theirs takes milliseconds."""

TRAINING_WAITS_S = 0.1
"""Between two steps; what could not be written then is written later."""


class Ledger:
    """The ledger of this user, or none: then it remembers nothing and says nothing."""

    def __init__(self, home: Path | None) -> None:
        """Use the ledger in this folder, which need not be there; with ``None``, none."""
        self._home = home

    @classmethod
    def open(cls) -> Ledger:
        """The ledger where the environment says it is, if it is to be kept."""
        if not is_on():
            return cls(None)
        try:
            return cls(find_home())
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, training goes on
            _warn(error, "nowhere")
            return cls(None)

    @property
    def is_kept(self) -> bool:
        """Whether there is one; writing to it may still fail."""
        return self._home is not None

    @property
    def file(self) -> Path | None:
        """The file that is written to now: after one that was damaged, another."""
        return None if self._home is None else find_ledger(self._home)

    def remember(self, plan: Plan) -> bool:
        """Keep a plan.

        Returns:
            Whether it is kept, whatever happens to this process from here on.
        """
        return self._use(lambda store: _keep(store, plan), False, _FIT_WAITS_S)

    def recall(self, fingerprint: str) -> list[Plan]:
        """Plans that were measured on the same, the newest first; none where they cannot be read."""
        return self._use(lambda store: store.plans_like(fingerprint), [], _FIT_WAITS_S)

    def begin(self, plan: Plan, run: Run, patience_s: float = TRAINING_WAITS_S) -> bool:
        """Keep that a run has begun, and its plan with it, which may come from a file.

        Returns:
            Whether both are kept.
        """
        return self._use(lambda store: _keep(store, plan, run), False, patience_s)

    def note(self, notes: RunNotes, patience_s: float = TRAINING_WAITS_S) -> Written:
        """Keep what is new of a run.

        Returns:
            ``"forgotten"`` where the run is not there any more, ``"not now"`` where it may be worth another try.
        """

        def write(store: Store) -> Written:
            return "written" if store.update_run(notes) else "forgotten"

        return self._use(write, "not now", patience_s)

    def _use(self, action: Callable[[Store], _Answer], otherwise: _Answer, patience_s: float) -> _Answer:
        if self._home is None:
            return otherwise
        try:
            return _use_newest(self._home, action, patience_s)
        except Exception as error:  # noqa: BLE001 - no failure here is worth a training step
            _warn(error, str(self._home))
            return otherwise


def _use_newest(home: Path, action: Callable[[Store], _Answer], patience_s: float) -> _Answer:
    path = find_ledger(home)
    try:
        with Store(path, patience_s=patience_s) as store:
            return action(store)
    except Exception as error:
        if not is_damaged(error):
            raise
        successor = _give_up(path, error)
    with Store(successor, patience_s=patience_s) as store:
        return action(store)


def _give_up(path: Path, error: Exception) -> Path:
    successor = name_successor(path)
    if successor is None:
        raise LedgerUnavailable(f"{path} is damaged, as were all before it: look at that disk, and move them away")
    warn_once(
        f"damaged {path}",
        f"the ledger {path} is damaged ({error}); it is left as it is, and from now on {successor.name} is used",
    )
    return successor


def _keep(store: Store, plan: Plan, run: Run | None = None) -> bool:
    store.add_plan(plan)
    if run is not None:
        store.add_run(run)
    return True


def _warn(error: Exception, place: str) -> None:
    warn_once(
        spell_cause(error),
        f"the ledger in {place} cannot be used ({type(error).__name__}: {error}): plans and runs may not be kept; "
        f"nothing else is touched by that; AUTOBATCH_HOME moves it, AUTOBATCH_LEDGER=off turns it off",
    )
