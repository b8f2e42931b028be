"""Names this package in front of its warnings if the application has set up no logging.

Python's own handler of last resort prints the message alone, without the name of the logger.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("autobatch")


class LastResort(logging.Handler):
    """Writes warnings to stderr, unless any other handler gets them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, if the process has a stderr."""
        others = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
        if sys.stderr is not None and not any(handler is not self for handler in others):
            sys.stderr.write(f"{self.format(record)}\n")
