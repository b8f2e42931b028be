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
    "autobatch.prediction.timeline._begins_alike",
    "tests/prediction/test_timeline.py::test_blocks_that_are_made_once_and_in_the_second_step_do_not_follow",
)
def a_second_step_of_another_kind_is_taken(real, whole, beginning):
    """A prediction continues a step with one of another kind."""
    return True
