"""Finds the folder of the ledger, and logs each cause of trouble once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from platformdirs import user_state_path

logger = logging.getLogger("autobatch")
_warned: set[str] = set()


def is_enabled() -> bool:
    """Return whether plans are stored: yes, unless ``AUTOBATCH_LEDGER`` is off, 0, false or no."""
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


def warn_once(cause: str, message: str) -> None:
    """Log a warning, unless this process has already warned of this cause."""
    if cause not in _warned:
        _warned.add(cause)
        logger.warning("%s", message)
