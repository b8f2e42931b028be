"""The proof on torch's own allocator: memory may end at each allocation and each launch, and no step is a wrong one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from fault_sweep import LARGE, SMALL, sweep_case
from faults import OUTCOMES
from own_process import call
from sampling import sample

pytestmark = [pytest.mark.card, pytest.mark.timeout(900)]

UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Sweep(NamedTuple):
    """What fails, in which steps of which case, under which allocator; how often at least, and what comes of it."""

    kind: str
    case: str
    steps: tuple[int, ...]
    environment: dict[str, str]
    positions: int
    outcomes: frozenset[str]

    def __str__(self) -> str:
        return "-".join([self.kind, self.case, *map(str, self.steps), *self.environment]).replace(" ", "_")


ANY = frozenset({"restarted", "undone", "reported"})
RETRIED = frozenset({"restarted"})
COMMITTED = frozenset({"committed"})
FIRST, THIRD = (0,), (2,)
BOTH = FIRST + THIRD
SWEEPS = [
    Sweep("refused once", "batch norm", BOTH, UNCACHED, 128, ANY),
    Sweep("refused once", "dropout", FIRST, UNCACHED, 215, ANY),
    Sweep("refused once", "dropout", THIRD, UNCACHED, 215, ANY),
    Sweep("refused once", "scaler", FIRST, UNCACHED, 155, ANY),
    Sweep("refused once", "scaler", THIRD, UNCACHED, 155, ANY - {"reported"}),  # its update allocates nothing then
    Sweep("refused", "large batch norm", BOTH, {}, 5, RETRIED),
    Sweep("refused", "large dropout", BOTH, {}, 10, RETRIED),
    Sweep("refused", "large attention", BOTH, {}, 14, RETRIED),
    Sweep("refused once", "large batch norm", BOTH, {}, 5, COMMITTED),  # the allocator's second attempt succeeds
    Sweep("refused once", "large dropout", BOTH, {}, 10, COMMITTED),
    Sweep("refused once", "large attention", BOTH, {}, 14, COMMITTED),
    Sweep("refused", "large batch norm", BOTH, EXPANDABLE, 4, RETRIED),
    Sweep("refused", "large dropout", BOTH, EXPANDABLE, 8, RETRIED),
    Sweep("refused", "large attention", BOTH, EXPANDABLE, 12, RETRIED),
    Sweep("launch", "batch norm", BOTH, {}, 135, ANY),
    Sweep("launch", "scaler", BOTH, {}, 225, ANY),
]
"""Nine tenths of the places that were counted, so that a step may come to allocate a little less."""


def test_the_sweeps_cover_every_way_in_which_memory_ends():
    """Each case with each way, and no fewer places than were measured before."""
    assert sum(sweep.positions for sweep in SWEEPS) >= 1278
    assert {sweep.case for sweep in SWEEPS} == {*SMALL, *LARGE}


@pytest.mark.parametrize("sweep", sample(SWEEPS, 7), ids=str)
def test_memory_that_ends_anywhere_leaves_no_wrong_step(sweep):
    """Bit for bit the step of the committed micro-batches, or undone, or said; never wrong, and never without end."""
    found = call(sweep_case, sweep.kind, sweep.case, sweep.steps, **sweep.environment)
    print(sweep, found["outcomes"])  # noqa: T201 - the numbers are the proof
    assert not found["wrong"]
    assert set(found["outcomes"]) <= set(OUTCOMES)
    assert sum(found["outcomes"].values()) >= sweep.positions
    assert sweep.outcomes <= set(found["outcomes"])
