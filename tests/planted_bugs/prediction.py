"""A prediction must not promise what a card cannot hold."""

from __future__ import annotations

from planted_bugs import bug


@bug(
    "autobatch.prediction.sizing.find_limit",
    "tests/prediction/test_sizing.py::test_a_limit_is_what_is_left_of_the_card",
)
def the_margin_is_forgotten(real, gpu, margin):
    """A predicted plan fills a card to the last byte."""
    return real(gpu, 0.0)


@bug(
    "autobatch.prediction.allocator.CachingAllocator.free",
    "tests/prediction/test_allocator.py::test_more_memory_can_be_worse",
)
def freed_memory_is_not_used_again(real, self, block, stream=0):
    """A prediction counts all that a step has ever allocated."""


@bug(
    "autobatch.prediction.timeline.Timeline.begins_with",
    "tests/prediction/test_trace.py::test_what_looks_like_a_line_at_two_sizes_is_seen_at_a_third",
)
def a_line_is_not_put_to_the_test(real, self, traced):
    """A prediction follows a line that the step leaves."""
    return True
