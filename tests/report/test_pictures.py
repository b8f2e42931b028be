"""The pictures of a plan: any plan can be drawn, on axes of the user's too."""

from __future__ import annotations

import pytest
from report_cases import CASES, card_plan

from autobatch import InvalidArgument

figures = pytest.importorskip("matplotlib.figure")


@pytest.mark.parametrize("kind", ["peak", "memory"])
@pytest.mark.parametrize("name", CASES)
def test_any_plan_can_be_drawn(name, kind):
    """Whatever is missing in it."""
    ax = figures.Figure().add_subplot()
    assert CASES[name].plot(kind, ax) is ax
    ax.figure.canvas.draw_idle()


def test_the_picture_shows_trials_curve_limit_and_plan():
    """Each outcome has a mark of its own."""
    ax = card_plan().plot(ax=figures.Figure().add_subplot())
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"curve", "fits", "thrash", "oom", "budget 21.6 GiB", "limit 20.6 GiB"} <= set(names)
    assert "the plan: 43 samples, 18.7 GiB" in names


def test_an_unknown_picture_is_refused():
    """With those that there are."""
    with pytest.raises(InvalidArgument, match="'peak' or 'memory'"):
        card_plan().plot("speed")
