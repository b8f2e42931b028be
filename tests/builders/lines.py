"""``AtLine``: does something at the n-th line that this thread runs in some modules.

So a test can put an interrupt, or all that another thread does, at every place where they could come.
"""

from __future__ import annotations

import sys
import threading


class AtLine:
    """Calls ``action`` once, before the line; what it raises, the line raises.

    Attributes:
        lines: How many lines were run in these modules.
        where: The line in which ``action`` was called; empty while it was not.
    """

    def __init__(self, position, action, modules):
        self.position, self.action, self.modules = position, action, modules
        self.lines, self.where = 0, ""

    def __enter__(self):
        self.outer = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *error):
        sys.settrace(self.outer)

    def call(self, frame, event, argument):
        # By module: a checkout may be called autobatch itself, and then every path in it has that name.
        return self.line if frame.f_globals.get("__name__", "").startswith(self.modules) else None

    def line(self, frame, event, argument):
        self.lines += event == "line"
        if event == "line" and self.lines == self.position:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            sys.settrace(self.outer)
            self.action()
        return self.line


def interrupt():
    raise KeyboardInterrupt


def in_another_thread(action):
    """An action that is done in another thread, to its end, while this one waits."""

    def run():
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()

    return run
