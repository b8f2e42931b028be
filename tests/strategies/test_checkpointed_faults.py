"""The proof for strategies: memory may end at any operation, also in a recomputation or a chunk of the loss."""

import pytest
from faults import CHECKPOINTED_CASES, CHUNKED_CASES, prove
from sampling import IN_PROOF

pytestmark = pytest.mark.usefixtures("quiet_log")

STRIDE = 1 if IN_PROOF else 12


@pytest.mark.parametrize("case", [*CHECKPOINTED_CASES, *CHUNKED_CASES], ids=lambda case: case.name)
@pytest.mark.timeout(1800)
def test_an_oom_at_any_operation(case):
    """Every fault ends bit for bit as a step in its final micro-batches, or as nothing."""
    tally = prove(case, STRIDE, earlier_steps=1, earlier_gradients=True)
    print(f"\n{case.name}: {tally}")  # noqa: T201 - the numbers are the proof
    assert not tally.wrong, tally.wrong[:5]
    assert min(tally.places[place] for place in ("forward", "backward")) > 0
