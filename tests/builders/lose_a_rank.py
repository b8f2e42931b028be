"""Runs a training script that loses its last rank inside a step: ``torchrun lose_a_rank.py rank 12 script.py ...``.

With ``node`` the torchrun that started the rank is killed too, as when a machine goes. What is started again afterwards
runs the script as it is.
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
_step = autobatch.Runner.step


def _kill(*_, **__):
    if _lost == "node":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _step_until_killed(runner, batch):
    """In the backward pass: the others are waiting then."""
    if runner.steps == int(_steps):
        torch.Tensor.backward = _kill
    return _step(runner, batch)


_, _lost, _steps, *sys.argv = sys.argv
if _is_last and _is_first_start:
    autobatch.Runner.step = _step_until_killed
runpy.run_path(sys.argv[0], run_name="__main__")
