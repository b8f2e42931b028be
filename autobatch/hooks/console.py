"""Lines for a person who watches, which leave a progress bar whole.

Covers tqdm's bars, where tqdm is in use. Does not cover rich's: its ``Console.print`` can be given as ``write``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import Event, Hook

__all__ = ["console"]


def console(level: int = logging.INFO, write: Callable[[str], object] | None = None) -> Hook:
    """A line on stderr for each event of at least this level, above a bar of tqdm if there is one.

    Args:
        level: As in ``logging``: steps that went well are ``DEBUG``, retries ``WARNING``.
        write: What prints a line instead.

    Raises:
        InvalidArgument: The level is no number, or nothing can be written with ``write``.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        raise InvalidArgument(f"console(level={show_value(level)}): pass a level of logging, such as logging.INFO")
    if write is not None and not callable(write):
        raise InvalidArgument(f"console(write={show_value(write)}) cannot be called: pass write(line)")

    def tell(event: Event, /) -> None:
        if event.level >= level:
            (write or _write_beside_bars)(str(event))

    return tell


def _write_beside_bars(line: str) -> None:
    # Who has a bar has imported tqdm; nobody else needs it.
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and hasattr(tqdm, "tqdm"):
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")
