"""Plans are remembered."""

from __future__ import annotations

from contextlib import suppress

from autobatch.ledger.server import ServerAway
from planted_bugs import bug


@bug("autobatch.ledger.ledger.Ledger.recall", "tests/fitting/test_reuse.py::test_the_second_fit_costs_one_trial")
def no_plan_is_remembered(real, self, *arguments):
    """Each start of a script searches again."""
    return []


@bug(
    "autobatch.ledger.courier.Courier._post",
    "tests/ledger/test_team.py::test_what_was_not_handed_in_is_handed_in_later_once",
)
def a_record_is_done_without_an_answer(real, self, *arguments):
    """What the server did not take while it was away is lost."""
    with suppress(ServerAway):
        real(self, *arguments)
