"""Runs a training script that loses its last rank inside a step: ``torchrun lose_a_rank.py rank 12 script.py ...``.

With ``node`` the torchrun that started the rank is killed too, as when a machine goes. A rank that is started again
runs the unchanged script.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import torch

import autobatch

_is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
_is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
_step, _run = autobatch.Runner.step, autobatch.Runner.run


def _kill(*_, **__):
    if _lost == "node":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_in_next_step(runner):
    """In the backward pass: the others are waiting then."""
    if runner.steps == int(_steps):
        torch.Tensor.backward = _kill


def _step_until_killed(runner, batch):
    _kill_in_next_step(runner)
    return _step(runner, batch)


def _run_until_killed(runner, loader, **options):
    for result in _run(runner, loader, **options):
        yield result
        _kill_in_next_step(runner)


_, _lost, _steps, *sys.argv = sys.argv
if _is_last and _is_first_start:
    autobatch.Runner.step, autobatch.Runner.run = _step_until_killed, _run_until_killed
runpy.run_path(sys.argv[0], run_name="__main__")
