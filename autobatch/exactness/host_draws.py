"""Makes Python's and NumPy's global generators draw the same for each sample in the whole batch and in any part of it.

Speech models of transformers draw their masks from ``numpy.random``, in a loop over the samples. Functions that were
imported by their own name before, and generator objects, still draw as they do. So does a call whose array has another
shape in a part than in the whole batch. Its rows may be samples, but its values may depend on the number of samples
too, as a permutation's do. The diagnosis finds that those generators have moved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from autobatch._user_errors import contextmanager
from autobatch.exactness.per_sample_random import PerSampleRandom
from autobatch.exactness.sample_numbers import SampleNumbers

__all__ = ["hold_host_draws"]

_STATEFUL = frozenset(
    ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator")
)


@contextmanager
def hold_host_draws(numbers: SampleNumbers) -> Iterator[None]:
    """Replace the functions of ``random`` and ``numpy.random`` that draw, for this thread, until the block ends."""
    with ExitStack() as stack:
        _hold(stack, random, random.Random(0), numbers)
        if sys.modules.get("numpy") is not None:
            numpy = import_module("numpy.random")  # NumPy 2 loads it where a step first names it
            _hold(stack, numpy, numpy.RandomState(0), numbers)
        yield


def _hold(stack: ExitStack, module: ModuleType, own: Any, numbers: SampleNumbers) -> None:
    """Let a module's functions of its global generator draw from ``own``, which is seeded for each draw."""
    shared = module.random.__self__
    for name, function in list(vars(module).items()):
        if getattr(function, "__self__", None) is shared and name not in _STATEFUL:
            stack.callback(setattr, module, name, function)
            setattr(module, name, partial(_draw, function, getattr(own, name), own.seed, numbers))


def _draw(shared: Any, own: Any, reseed: Any, numbers: SampleNumbers, *args: Any, **kwargs: Any) -> Any:
    free = partial(shared, *args, **kwargs)
    if not PerSampleRandom.is_active():  # another thread's
        return free()

    def draw(seed: int) -> tuple[Any, tuple[int, ...]]:
        reseed(seed)
        drawn = own(*args, **kwargs)
        return drawn, (len(drawn),) if isinstance(drawn, (list, bytes)) else getattr(drawn, "shape", ())

    with _disable_current_modes():
        return numbers.hold(draw, free)
