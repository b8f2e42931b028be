"""What every test starts from and must leave as it was.

Covers seeds, threads, hypothesis profiles, the skip of GPU tests and a check that nothing global is left changed. Does
not cover models, steps or devices: those are made where they are used.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autobatch.prediction.isolation import run_apart

# A deadline measures the machine, not the code. In CI the same examples run each time, so that a change is judged by
# what it changed; at a desk new ones are drawn.
settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# No test may meet what another one, or the developer's own training, has left behind; those of the ledger turn it on.
os.environ["AUTOBATCH_LEDGER"] = "off"

# The models here are small: more threads only make sums of floats come out in another order.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _collects_only_what_is_new() -> Iterator[None]:
    """Keep what imports left behind out of the collections that each trial makes: 0.15 s each with them, measured."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked ``apart`` in a child: what it registers with torch would stay for all tests after it."""
    if not pyfuncitem.get_closest_marker("apart"):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    run_apart(lambda: pyfuncitem.obj(**arguments) and None)
    return True


def _global_state() -> dict[str, object]:
    """What one test could change under the feet of the next."""
    logger = logging.getLogger("autobatch")
    return {
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "logger": (logger.level, logger.propagate, logger.disabled, list(logger.handlers)),
    }


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Start each test from the same seeds, and fail one that leaves torch or the logger changed."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = _global_state()
    yield
    assert _global_state() == before, "this test changed something global and did not put it back"
