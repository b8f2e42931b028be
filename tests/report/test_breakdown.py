"""The parts of the memory add up, whatever a trial measured."""

from __future__ import annotations

from hypothesis import given
from report_cases import GIB, card_plan, make_plan, make_trial, plans

from autobatch.report.breakdown import chosen_trial, held_bytes, memory_parts


@given(plans())
def test_parts_add_up_to_the_budget(plan):
    """To the budget, or to what was held where that is more or no budget is known."""
    parts = memory_parts(plan)
    held = held_bytes(chosen_trial(plan))
    assert sum(part.size_bytes for part in parts) == max(plan.budget_bytes, held)
    assert all(part.size_bytes > 0 for part in parts)
    assert sum(part.size_bytes for part in parts if part.key not in {"free", "headroom"}) == held


def test_parts_of_a_card():
    """Each part is what its words say, to the byte."""
    parts = {part.key: part.size_bytes for part in memory_parts(card_plan())}
    assert parts == {
        "resident": 2 * GIB,
        "passes": 16 * GIB,
        "unused": 187 * GIB // 10 - 18 * GIB,
        "free": 216 * GIB // 10 - GIB - 187 * GIB // 10,
        "headroom": GIB,
    }


def test_an_optimizers_step_counts_with_what_it_needs_beyond_the_backward():
    """Both peaks on top of each other would be a moment that never was."""
    trial = make_trial(4, 7 * GIB, backward_allocated=5 * GIB, optimizer_peak=7 * GIB, resident_bytes=2 * GIB)
    parts = {part.key: part.size_bytes for part in memory_parts(make_plan([trial], 4, 4, 8 * GIB))}
    assert parts == {"resident": 2 * GIB, "passes": 3 * GIB, "update": 2 * GIB, "free": GIB}
