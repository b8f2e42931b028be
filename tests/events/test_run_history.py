"""What a run leaves behind adds up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autobatch.events.run_history import Run, StepRange


@st.composite
def ranges(draw):
    found, step = [], 0
    for length in draw(st.lists(st.integers(1, 50), max_size=8)):
        retries, peak = draw(st.integers(0, 3)), draw(st.integers(0, 10**9))
        last = step + length - 1
        found.append(StepRange(first_step=step, last_step=last, micro_batch_size=4, retries=retries, peak_bytes=peak))
        step = last + 1
    return tuple(found)


@given(ranges())
def test_a_run_sums_up_its_ranges(parts):
    """Steps are counted with both ends, retries added, and the peak is the highest."""
    run = Run(id="r", plan_id="p", pid=1, started_at=0.0, last_seen_at=1.0, ranges=parts)
    assert run.steps == (parts[-1].last_step + 1 if parts else 0)
    assert run.retries == sum(part.retries for part in parts)
    assert run.peak_bytes == max((part.peak_bytes for part in parts), default=0)
    assert Run.model_validate_json(run.model_dump_json()) == run
