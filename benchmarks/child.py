"""Runs a benchmark's own program again, in a process of its own, and reads what it prints.

Covers cells that need an allocator of their own, whose settings torch reads once. Does not cover what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

__all__ = ["end", "read_lines"]


def read_lines(program: str, *arguments: object, **environment: str) -> list[str]:
    """What the program prints, with these environment variables in addition.

    Raises:
        subprocess.CalledProcessError: The program failed.
    """
    command = [sys.executable, program, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout.splitlines()


def end() -> NoReturn:
    """Ends this process, with what it printed, and without the interpreter's own end.

    A process whose interpreter ends within milliseconds of a backward pass on a GPU can abort: autograd's thread wants
    the interpreter once more, to release the pass (torch 2.13: three lines of plain torch did in 18 of 36 runs, on a
    busy machine).
    """
    sys.stdout.flush()
    os._exit(0)
