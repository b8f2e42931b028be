"""Opens the ledger for a command, and finds a plan by id or by file; what is wrong with it is an error.

Does not cover what is in it (``ledger``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.database import LedgerUnavailable, find_home, find_ledger, is_damaged, is_enabled, next_file
from autobatch.ledger.store import Store, plan_id
from autobatch.plan import Plan

__all__ = ["find_fault", "find_plan", "open_store"]


@contextmanager
def open_store() -> Iterator[Store]:
    """The ledger's file, open.

    Raises:
        InvalidArgument: It is turned off.
        LedgerUnavailable: It cannot be opened or read; the text says where it is and why.
    """
    if not is_enabled():
        raise InvalidArgument("plans are not stored: AUTOBATCH_LEDGER turns the ledger off; unset it")
    try:
        home = find_home()
    except OSError as error:
        raise LedgerUnavailable(str(error)) from error
    try:
        with Store(find_ledger(home)) as store:
            yield store
    except (sqlite3.Error, OSError) as error:
        if is_damaged(error):
            raise LedgerUnavailable(_explain_damage(find_ledger(home), error)) from error
        raise LedgerUnavailable(
            f"the ledger in {home} cannot be used ({type(error).__name__}: {error}); AUTOBATCH_HOME moves it"
        ) from error


def _explain_damage(path: Path, error: Exception) -> str:
    successor = next_file(path)
    after = f"the next fit() begins {successor.name} beside it" if successor else "move it and those before it away"
    return f"the ledger {path} is damaged ({error}); what was in it cannot be shown; {after}"


def find_plan(name: str) -> tuple[Plan, list[Run]]:
    """A plan and its stored runs, oldest first, by the beginning of its id or by a file that ``Plan.save`` wrote.

    Raises:
        InvalidArgument: No plan is meant, or several could be; or the file holds none.
    """
    if not name.strip():
        raise InvalidArgument(
            f"{name!r} names no plan: give the beginning of a plan's id, or a file that Plan.save wrote"
        )
    if Path(name).is_file():
        plan = Plan.load(name)
        try:
            with open_store() as store:
                return plan, _runs_of(store, plan)
        except (InvalidArgument, LedgerUnavailable):  # the file itself is whole, and it is what was asked for
            return plan, []
    if name.endswith(".json"):
        raise InvalidArgument(f"no file {name}")
    if Path(name).is_dir():
        raise InvalidArgument(f"{name} is a folder: name a file that Plan.save wrote, or the beginning of a plan's id")
    with open_store() as store:
        plan = store.find_plan(name)
        return plan, _runs_of(store, plan)


def _runs_of(store: Store, plan: Plan) -> list[Run]:
    return store.runs_of(plan_id(plan))[::-1]


def find_fault() -> tuple[str, str]:
    """Where plans are stored, empty where they are not; and why they cannot be, empty where they can."""
    if not is_enabled():
        return "", ""
    try:
        home = str(find_home())
    except OSError as error:
        return "no folder", str(error)
    try:
        with open_store() as store:
            store.check_writable()
            return home, ""
    except LedgerUnavailable as error:
        return home, str(error)
