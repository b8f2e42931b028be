"""The order in which strategies are named has no meaning."""

from __future__ import annotations

from autobatch.fitting.options import read_strategies


def test_the_order_of_a_list_of_strategies_does_not_matter():
    """A remembered plan is found again if the same strategies are named in another order."""
    assert read_strategies(["selective", "checkpoint"]) == read_strategies(["checkpoint", "selective"])
