"""Names this package in front of its warnings where the application has set up no logging.

Python's own handler of last resort prints the message alone, and nobody could tell whose it is. Where logging is set
up, the name is the logger's, so that no message repeats it.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["LOGGER", "LastResort"]

LOGGER = logging.getLogger("autobatch")


class LastResort(logging.Handler):
    """Writes warnings to stderr, unless any other handler gets them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; a process without a stderr has none."""
        others = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
        if sys.stderr is not None and not any(handler is not self for handler in others):
            sys.stderr.write(f"{self.format(record)}\n")
