"""Frees memory that is no longer used but still referenced.

Covers reference cycles, and the graph of a backward pass that failed. Does not cover frames of an exception that is
still being handled: nothing can free those from here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["collecting_new_objects", "drop_stale_references"]


def drop_stale_references() -> None:
    """Break cycles that hold tensors, and free the graph of a failed backward pass.

    After an error torch's engine leaves the nodes that were ready to run, and with them the rest of the graph and what
    it has saved, in this thread's queue until the thread's next backward pass (``Engine::thread_main`` in
    torch/csrc/autograd/engine.cpp). So there is one, of a single number, which no dispatch mode sees.
    """
    with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()
    gc.collect()


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """While this lasts, garbage collections look only at objects made inside it.

    A full collection takes 0.1 to 0.2 s in a process that has imported torch and SciPy, several times as long as a
    trial of a small model. Objects that were there before are in the permanent generation meanwhile, and in the oldest
    one afterwards, where any collection would have put them. Where the user has frozen objects nothing is changed: to
    unfreeze ours would be to unfreeze theirs.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
