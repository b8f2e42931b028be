"""Runs a program as ``python -u program.py`` does, in a process that was forked with torch and autobatch imported."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from builders.ranks import make_context


class Ran(NamedTuple):
    """How a program ended, and what it printed, stderr between stdout's lines."""

    returncode: int
    stdout: str


def run_program(program: Path, environment: Mapping[str, str], limit_seconds: float = 200.0) -> Ran:
    """Run it in its own folder, until it has ended or the limit is reached."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        process = make_context().Process(target=_run, args=(program, dict(environment), output))
        process.start()
        process.join(limit_seconds)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"{program} took over {limit_seconds} s\n{_read(output)}")
        return Ran(process.exitcode, _read(output))


def _read(output: Path) -> str:
    return output.read_text(encoding="utf-8") if output.exists() else ""


def _run(program: Path, environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ |= environment
    os.chdir(program.parent)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout, sys.stderr = (os.fdopen(standard, "w", buffering=1, encoding="utf-8") for standard in (1, 2))
    sys.argv, sys.path[:0] = [program.name], [str(program.parent)]

    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    try:
        runpy.run_path(str(program), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
