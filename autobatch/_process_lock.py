"""Runs one ``fit`` or ``verify`` at a time in a process; a second one waits in its thread.

Both change settings of the whole process and restore them: default random generators, precision, a device's peak.
Runners need no lock.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_LOCK = threading.RLock()  # fit() checks its split as verify() does, in the same thread

if hasattr(os, "register_at_fork"):  # in a forked child the thread that held it is not there to release it
    os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001 - as concurrent.futures does


def one_at_a_time() -> AbstractContextManager[object]:
    """A block that only one thread is in; the thread that is in it may enter it again."""
    return _LOCK
