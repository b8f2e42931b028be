"""Calls a function in a process of its own on the stand-in card: card and allocator are chosen before torch starts.

``call`` is for tests; run as a program, this file is the other end of it. Does not cover functions that need pytest's
fixtures. What goes in and out is JSON.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_MOST_SECONDS = 850


def call(function: Callable[..., Any], *arguments: Any, mirror: bool = True, **environment: str) -> Any:
    """What the function returns in a process with these environment variables."""
    path, name = function.__code__.co_filename, function.__name__
    paths = os.pathsep.join(filter(None, sys.path))  # as pytest has set it
    ran = subprocess.run(
        [sys.executable, __file__, path, name, json.dumps([mirror, arguments])],
        env={**os.environ, "AUTOBATCH_LEDGER": "off", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=_MOST_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, f"{name}{arguments} with {environment} ended in {ran.stderr[-3000:]}"
    return json.loads(ran.stdout.splitlines()[-1])


def _load(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def _answer(path: str, name: str, given: str) -> None:
    import torch
    from mirror import Mirror

    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.backends.cudnn.enabled = False
    has_values, arguments = json.loads(given)
    function = _load(path, name)
    with Mirror() if has_values else nullcontext():  # type: ignore[no-untyped-call]
        result = function(*arguments)
    assert not Mirror.missing, f"no values from {Mirror.missing}"
    print(json.dumps(result), flush=True)  # noqa: T201 - the other end reads it
    os._exit(0)  # autograd's device threads may want the interpreter while it ends, which aborts: benchmarks/child.py


if __name__ == "__main__":
    _answer(*sys.argv[1:])
