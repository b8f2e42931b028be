"""A prediction in a notebook: the numbers of its text, in one element that reaches nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import autobatch
from autobatch._formatting import format_bytes
from autobatch.prediction.prediction import Change

pytestmark = pytest.mark.predicts

HOSTILE = '<script>alert(\'1\')</script>"><b onclick="x">'


@pytest.fixture(scope="module")
def prediction():
    """Of a small model, with what would help."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    return autobatch.predict(
        model, torch.randn(8, 64), lambda m, b: m(b).square().mean(), optimizer, gpu="H100", what_if=True
    )


class Tags(HTMLParser):
    """Which elements are open, and what was in them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.texts = [], set(), []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.names.add(tag)
        assert not any(name.startswith("on") or name in ("id", "href", "src") for name, _ in attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts += [data] if data.strip() else []


def test_it_is_one_closed_element(prediction):
    """In the look of a plan's report, without scripts."""
    text = prediction._repr_html_()
    tags = Tags(text)
    assert tags.open == []
    assert text.startswith('<div class="autobatch-report">')
    assert "script" not in tags.names
    assert "html" not in tags.names


def test_it_shows_the_numbers_of_the_text(prediction):
    """Peaks, parts, modules, sizes, changes and all cards; warnings first."""
    texts = Tags(prediction._repr_html_()).texts
    for part in (*prediction.breakdown, *prediction.modules):
        assert format_bytes(part.byte_count) in texts
    for card in prediction.cards:
        assert any(text.startswith(card.gpu) for text in texts)
    for change in prediction.changes:
        assert any(change.name in text for text in texts)
    assert any("H100-80GB; also H100-94GB" in text for text in texts)
    assert any(re.fullmatch(r"[\d.]+ ([KMG]iB )?of [\d.]+ GiB", text) for text in texts)


@pytest.mark.parametrize("kind", ["peak", "memory"])
def test_it_can_be_drawn(prediction, kind):
    """On the user's Axes; the bar is as long as the card's memory, and what is held is in it."""
    ax = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    assert prediction.plot(kind, ax) is ax
    if kind == "memory":
        lengths = [bar.get_width() for bar in ax.patches]
        assert sum(lengths) == prediction.gpu.total_bytes
        assert [part.byte_count for part in prediction.breakdown] == lengths[: len(prediction.breakdown)]
        colors = [bar.get_facecolor() for bar in ax.patches]
        assert len(set(colors)) == len(colors) > 7
    else:
        peak = format_bytes(prediction.peak_bytes)
        assert ax.get_title("right") == f"{prediction.micro_batch_size} samples: {peak}"
        assert peak in str(prediction)


@pytest.mark.slow
def test_whatever_comes_from_a_prediction_is_text(prediction):
    """Warnings, names and reasons cannot leave their place."""
    changes = (Change(name=HOSTILE, failed=HOSTILE), *prediction.changes)
    text = prediction.model_copy(update={"warnings": (HOSTILE,), "changes": changes})._repr_html_()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 3


def test_one_that_fits_nowhere_is_shown_too():
    """With none as its size."""
    model = nn.Linear(8, 8)
    step = lambda m, b: m(b.expand(-1, 2**31, 8)).mean()  # noqa: E731 - 64 GiB a sample
    prediction = autobatch.predict(model, torch.zeros(2, 1, 8), step, gpu="T4", target_batch=4)
    assert prediction.plan is None
    assert "none" in Tags(prediction._repr_html_()).texts
