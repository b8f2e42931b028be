"""What every test starts from and must leave as it was."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress

import hypothesis.core
import numpy as np
import pytest
import stand_in
import torch
from frozen_objects import remember_count
from hypothesis import settings
from process_state import read_process_state
from sampling import IN_PROOF

from autobatch.memory import cpu
from autobatch.memory.cpu import LiveStorage
from autobatch.prediction.child_process import run_apart
from autobatch.torch_internals import OLDEST_TO_PREDICT, format_release, read_release

# A deadline measures the machine, not the code. What is drawn depends on the seed alone, not on failures of earlier
# runs in .hypothesis/.
EXAMPLES = 200 if IN_PROOF else 20
settings.register_profile(
    "seeded", max_examples=EXAMPLES, deadline=None, derandomize=False, print_blob=True, database=None
)
settings.load_profile("seeded")

# Nor on the numbers that stand in the package's source: hypothesis draws from those of the modules that are imported.
with suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        _no_constants = providers._local_constants
        providers._get_local_constants = lambda: _no_constants

# No test may meet what another one, or the developer's own training, has left behind; those of the ledger turn it on.
os.environ["AUTOBATCH_LEDGER"] = "off"

remember_count()

# The models here are small: more threads only make sums of floats come out in another order.
torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw examples from the seed that orders the tests, so that one number repeats a run; let interrupts arrive."""
    seed = config.getoption("randomly_seed", default=None)
    if isinstance(seed, int) and hypothesis.core.global_force_seed is None:
        hypothesis.core.global_force_seed = seed
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs begin, and ranks after them
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = config.getoption("randomly_seed", default=None)
    if isinstance(seed, int):
        terminalreporter.write_line(f"the same order and examples again: make the same target with SEED={seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what `make proof` alone runs, and what needs a CUDA device, the stand-in card or a newer torch."""
    reasons = {} if IN_PROOF else {"slow": "make proof runs it"}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if not stand_in.is_loaded():
        reasons["card"] = "needs the stand-in card: make test-cuda"
    if read_release(torch.__version__) < OLDEST_TO_PREDICT:
        reasons["predicts"] = (
            f"needs torch {format_release(OLDEST_TO_PREDICT)}, which can register a device from Python"
        )
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _collects_only_what_is_new() -> None:
    """Keep what imports left behind out of the collections that each trial makes: 0.15 s each with them, measured.

    torch's compiler too, which comes with the first optimizer: otherwise in a test, or in each child of ``apart`` anew.
    What is frozen stays so: to look through everything once more for each file took 0.3 s each.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked ``apart`` in a child: what it registers with torch would stay for all tests after it."""
    if not pyfuncitem.get_closest_marker("apart"):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    run_apart(lambda: pyfuncitem.obj(**arguments) and None)
    return True


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Start each test from the same seeds and an empty count of memory, and fail one that leaves torch changed.

    The CPU's count is one for the process: batches that a test module holds for all of its tests are in it for good,
    and no budget in another test is for them.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = read_process_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_STORAGE", LiveStorage())
        yield
    assert read_process_state() == before, "this test changed something global and did not put it back"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """For tests that send SIGINT: whoever runs the tests in the background of a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def quiet_log():
    """For tests with hundreds of retries, which are a line each."""
    logger = logging.getLogger("autobatch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
