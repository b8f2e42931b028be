"""Finds cuDNN and asks it in a process of its own: it may abort, and loads half a gigabyte of libraries.

The library is the one that torch's CUDA builds bring along, or one on ``sys.path``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from autobatch.prediction.cudnn.plans import DEVICES, Convolution

_MOST_SECONDS = 60.0  # for all questions of one call: a question takes 13 ms
_MOST_PROCESSES = 3  # after as many aborts the other questions have no answer


class Answers(NamedTuple):
    """What cuDNN answered."""

    version: int  # 92000 for 9.20.0; 0 without cuDNN
    workspaces: dict[Convolution, int]  # bytes of each convolution that it can plan


def ask_cudnn(convolutions: Iterable[Convolution], architecture: str, multiprocessors: int) -> Answers:
    """Ask this machine's cuDNN for the workspaces of convolutions on a card.

    After an abort it is asked again, without the convolution that it aborted at.
    """
    files, left = find_libraries(), [*dict.fromkeys(convolutions)]
    version, found = 0, dict[Convolution, int]()
    if files is None or architecture not in DEVICES:
        return Answers(version, found)
    for _ in range(_MOST_PROCESSES):
        said = _run([*map(str, files), architecture, str(multiprocessors)], left)
        if not said:
            break
        version, answers = said[0] or 0, said[1:]
        found |= {convolution: size for convolution, size in zip(left, answers, strict=False) if size is not None}
        if len(answers) == len(left):
            break
        left = left[len(answers) + 1 :]
    return Answers(version, found)


def _run(arguments: Sequence[str], convolutions: Sequence[Convolution]) -> list[int | None]:
    """Read the version and the answers of one process; an answer is ``None`` if cuDNN has no plan."""
    questions = "".join(f"{json.dumps(convolution)}\n" for convolution in convolutions)
    command = [sys.executable, "-m", "autobatch.prediction.cudnn.plans", *arguments]
    said: list[int | None] = []
    with subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        stop = threading.Timer(_MOST_SECONDS, process.kill)
        stop.start()
        try:
            output, _ = process.communicate(questions)
        finally:
            stop.cancel()
    for line in output.splitlines():
        try:
            said.append(json.loads(line))
        except ValueError:  # half a line, of a process that was killed
            break
    return said


_CUDNN = ("nvidia/cudnn/lib/libcudnn.so.9", "torch/lib/libcudnn.so.9")
_CUBLAS = (
    "nvidia/cu13/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.12",
    "torch/lib/libcublasLt.so.13",
    "torch/lib/libcublasLt.so.12",
)


def find_libraries() -> tuple[Path, Path] | None:
    """Find the files of cuDNN 9 and cuBLASLt; ``None`` if one is missing, since cuDNN aborts without cuBLASLt."""
    cudnn, cublas = _find_first(_CUDNN), _find_first(_CUBLAS)
    return None if cudnn is None or cublas is None else (cudnn, cublas)


def _find_first(names: tuple[str, ...]) -> Path | None:
    places = (Path(folder, name) for name in names for folder in sys.path if folder)
    return next((place for place in places if place.exists()), None)
