"""What people read of a prediction: numbers add up, nothing is said that is not so, and lines fit a window."""

from __future__ import annotations

import re

import pytest
import torch
from nets import GPT, step, tokens
from torch import nn

import autobatch
from autobatch._formatting import format_bytes
from autobatch.prediction.cards import GPUS
from autobatch.prediction.prediction import Change, Reach

pytestmark = pytest.mark.predicts

NOMINAL = next(gpu.name for gpu in GPUS if not gpu.measured and gpu.total_bytes > 2**35)
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BYTES = re.compile(r"(\d+(?:\.\d)?) (bytes|KiB|MiB|GiB)")


def predict(**options):
    """Of a small transformer on a card that has just a size."""
    model = GPT()
    arguments = {"gpu": "2GiB", "target_batch": 2000, **options}
    return autobatch.predict(model, tokens(), step, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


@pytest.fixture(scope="module")
def split():
    """A target of which only a part fits at once."""
    prediction = predict(gpu="1.25GiB", target_batch=4001)
    assert prediction.plan.accumulation_steps > 1
    return prediction


@pytest.fixture(scope="module")
def whole():
    """A target that fits at once, on a card that stands in the table with a nominal total."""
    return predict(gpu=NOMINAL)


@pytest.fixture(scope="module")
def nothing():
    """A card on which not even one sample fits."""
    with torch.device("meta"):
        model = nn.Linear(20_000, 20_000)
    return autobatch.predict(model, torch.zeros(2, 20_000), lambda m, b: m(b).mean(), gpu=2**30, target_batch=7)


@pytest.fixture(params=["split", "whole", "nothing"])
def any_prediction(request):
    return request.getfixturevalue(request.param)


def section(prediction, title):
    _, _, rest = prediction.explain().partition(f"\n{title}")
    assert rest, f"there is no section {title!r}"
    return rest.partition("\n\n")[0].splitlines()[1:]


def read(text):
    """``(bytes, by how much they may be rounded)`` of the first size in a text."""
    number, unit = BYTES.search(text).groups()
    return float(number) * UNITS[unit], 0.05 * UNITS[unit]


def test_where_the_memory_goes_sums_to_the_peak_of_the_first_line(any_prediction):
    """As it is printed, within what was rounded; in the record to the byte."""
    *parts, total = section(any_prediction, "Where the memory goes")
    sizes = [read(line) for line in parts]
    whole, rounding = read(total)
    assert "in all" in total
    assert abs(sum(size for size, _ in sizes) - whole) <= rounding + sum(rounded for _, rounded in sizes)
    assert f"{format_bytes(any_prediction.peak_bytes)} of " in str(any_prediction)
    assert read(total) == read(format_bytes(any_prediction.peak_bytes))
    held = sum(part.byte_count for part in any_prediction.breakdown)
    assert held + any_prediction.context_bytes == any_prediction.peak_bytes


def test_lines_fit_a_window(any_prediction):
    """Of 100 columns; the first line is one for a log."""
    first, *others = any_prediction.explain().splitlines()
    assert first == str(any_prediction)
    assert len(first) <= 120
    assert max(map(len, others)) <= 100
    assert not any(line != line.rstrip() for line in others)


def test_every_card_has_its_line(any_prediction):
    """In the table of cards alone: with what stands in the record; a nominal total is marked and explained."""
    header, *lines = any_prediction.explain_cards().splitlines()[1:]
    shown = {re.split(r"  +", line.strip())[0]: line for line in lines}
    assert "* its memory is a nominal figure" in any_prediction.explain_cards()
    for card in any_prediction.cards:
        line = shown[card.gpu if card.measured else f"{card.gpu} *"]
        fit = f"{card.micro_batch_size} {card.accumulation_steps} {format_bytes(card.peak_bytes)}"
        assert " ".join(line.split()).endswith(
            f"{format_bytes(card.total_bytes)} {fit if card.micro_batch_size else 'none - -'}"
        )
        assert len(line) == len(header)


def test_more_is_impossible_only_where_the_card_is_the_bound(split, whole, nothing):
    """Where all of the target fits, nobody asked for more."""
    assert "impossible" in split.explain()
    assert "impossible" not in whole.explain()
    assert "one sample is predicted to be impossible" in nothing.explain()
    tight = split.model_copy(update={"reach": Reach(comfortable=2001, tight=4001)})
    assert "impossible" not in tight.explain()
    assert "all 4001" in tight.explain()


def test_of_sizes_that_were_not_judged_nothing_is_said(split):
    """The card may well take more: that is not impossible, and nothing that saves memory would show it."""
    size = split.judged_size
    known = {"largest_judged": size, "interpolated": True, "reach": Reach(comfortable=size, tight=size)}
    story = split.model_copy(update={**known, "changes": CHANGES}).explain()
    assert f"nothing is said of larger ones: no size above {size} was judged" in story
    assert "impossible" not in story
    assert "the plan has the largest size that was judged: this would only save memory" in story


CHANGES = (
    Change(name="checkpointing of 4 Block blocks", effect="more time", saved_bytes=2**30, micro_batch_size=20),
    Change(name="fused AdamW", saved_bytes=0, micro_batch_size=10),
    Change(name="Adam", effect="another optimizer", saved_bytes=-(2**20), micro_batch_size=0),
    Change(name="bfloat16 autocast", effect="lower precision", failed="in train.py:12: " + "it cannot be traced " * 9),
)


def test_changes_that_do_not_help_are_said_not_to(split, whole, nothing):
    """Where nothing was asked for it is said how to ask."""
    assert "ask with what_if=True" in section(split, "What would help")[0]
    traced, size = CHANGES[1:3], split.judged_size
    assert size >= max(change.micro_batch_size for change in traced)
    closing = f"none of it lets more than {size} samples into a micro-batch"
    assert closing in split.model_copy(update={"changes": traced}).explain()
    helps = Change(name="Adam", micro_batch_size=size + 1)
    assert closing not in split.model_copy(update={"changes": (*traced, helps)}).explain()
    assert "all of the target fits as it is" in whole.model_copy(update={"changes": CHANGES}).explain()
    none = nothing.model_copy(update={"changes": CHANGES[2:3]})
    assert section(none, "What would help")[-1] == "  still nothing fits"
