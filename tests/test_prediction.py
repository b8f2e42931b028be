"""``predict``: what it says, that it touches nothing, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, ConvNet, images, step, tokens
from torch import nn
from workloads import bits_of, differences

import autobatch
from autobatch.errors import CannotPredict, InvalidArgument
from autobatch.prediction.changes import EightBitAdam, repeated_blocks
from autobatch.prediction.gpu_table import GPUS


def predict(model=None, batch=None, run=step, **options):
    """A prediction that works, but for the options."""
    model = model or GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {"gpu": "2GiB", "target_batch": 64, **options}
    return autobatch.predict(model, tokens() if batch is None else batch, run, optimizer, **arguments)


@pytest.fixture(scope="module")
def prediction():
    """With every change tried."""
    return predict(GPT(layers=3), what_if=True)


def test_a_prediction_says_what_fits(prediction):
    """A plan that is marked predicted, within the card, with the margin on top."""
    plan = prediction.plan
    assert plan.predicted
    assert plan.trials == ()
    assert sum(plan.micro_batch_sizes) == 64
    assert plan.peak_bytes * (1 + prediction.margin) <= prediction.gpu.total_bytes - prediction.context_bytes
    assert plan.curve.peak_reserved(plan.micro_batch_size) >= plan.peak_bytes
    assert plan.micro_batch_size <= prediction.reach.comfortable <= prediction.reach.tight
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan
    assert "predicted peak" in str(plan)


def test_where_the_memory_goes_adds_up(prediction):
    """By kind it is the whole peak; parameters, gradients and optimizer state are as large as they are."""
    kinds = {part.name: part.byte_count for part in prediction.breakdown}
    point = next(point for point in prediction.points if point.size == prediction.judged_size)
    assert point.allocated * 0.98 <= sum(kinds.values()) <= point.allocated
    parameters = sum(p.nbytes for p in GPT(layers=3).parameters())
    assert kinds["parameter"] == parameters
    assert 2 * parameters <= kinds["optimizer state"] <= 2.1 * parameters
    assert len(prediction.modules) == 10
    assert prediction.per_sample_bytes > 0


def test_all_cards_are_judged(prediction):
    """Each that is known, with the same step."""
    assert [card.gpu for card in prediction.cards] == [gpu.name for gpu in GPUS]
    assert all(card.micro_batch_size == 64 for card in prediction.cards if card.total_bytes > 2**34)


def test_changes_are_traced_and_sorted(prediction):
    """Each in its own words, the one that saves most first; a change that needs more says so."""
    names = {change.name: change for change in prediction.changes}
    assert [change.saved_bytes for change in prediction.changes] == sorted(
        (change.saved_bytes for change in prediction.changes), reverse=True
    )
    assert not [change for change in prediction.changes if change.failed]
    checkpointed = next(change for name, change in names.items() if name.startswith("checkpointing"))
    assert checkpointed.saved_bytes > 0
    assert names["bfloat16 autocast"].saved_bytes > 0
    assert names["gradients zeroed, not set to None"].saved_bytes <= 0
    assert {"SGD without momentum", "fused AdamW", "8-bit AdamW", "expandable segments"} <= names.keys()


def test_the_story_has_every_number(prediction):
    """Each in its line, and one line for those in a hurry."""
    story = prediction.explain()
    assert story.startswith(str(prediction))
    assert max(map(len, story.splitlines())) <= 150
    assert all(card.gpu in story for card in prediction.cards)
    assert all(change.name in story for change in prediction.changes)
    assert "nothing was run" in str(prediction)


def test_nothing_is_touched():
    """Bit for bit: model, gradients, optimizer, generators, modes, and torch's view of this machine."""
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, images()).backward()
    optimizer.step()
    before, accelerator = bits_of(model, optimizer), torch.accelerator.current_accelerator()
    autobatch.predict(model, images(), step, optimizer, gpu="24GiB", target_batch=16)
    assert differences(bits_of(model, optimizer), before) == []
    assert torch.accelerator.current_accelerator() == accelerator


def test_a_model_on_meta_is_predicted():
    """Larger than this machine: no memory is needed but for the description."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(20_000, 20_000), nn.ReLU(), nn.Linear(20_000, 20_000))
    prediction = autobatch.predict(
        model, torch.zeros(2, 20_000), lambda m, b: m(b).mean(), torch.optim.Adam(model.parameters()), gpu="B200"
    )
    kinds = {part.name: part.byte_count for part in prediction.breakdown}
    assert kinds["parameter"] == 2 * 4 * (20_000**2 + 20_000)


def test_a_card_that_is_too_small_has_no_plan():
    """Said in one line, with what one sample would need."""
    prediction = predict(gpu="1GiB", model=GPT(width=1024, layers=4))
    assert prediction.plan is None
    assert prediction.judged_size == 1
    assert "not even one sample fits" in str(prediction)
    assert prediction.explain()


def test_a_step_that_needs_values_is_refused_with_its_line():
    """The user's own file, line and source."""

    def run(model, batch):
        loss = step(model, batch)
        return loss if loss.item() > 0 else loss * 2

    with pytest.raises(CannotPredict, match=r"test_prediction\.py:\d+: `return loss if loss\.item\(\) > 0"):
        predict(run=run)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gpu": "A100"}, "gpu='A100' could be"),
        ({"gpu": "4091"}, "is not known; did you mean"),
        ({"gpu": None}, "no CUDA card here: name one as gpu='H100-80GB', or its memory as gpu='24GiB'"),
        ({"margin": "10%"}, "margin='10%' must be a fraction from 0 to less than 1, such as 0.1"),
        ({"margin": 1.5}, "margin=1.5 must be a fraction from 0 to less than 1, such as 0.1"),
        ({"target_batch": 0}, "target_batch=0 must be an int of at least 1"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(options, text):
    """Before anything is traced."""
    if options.get("gpu", "") is None and torch.cuda.is_available():
        pytest.skip("there is a card here")
    with pytest.raises(InvalidArgument) as caught:
        predict(**options)
    assert text in str(caught.value)


def test_repeated_blocks_are_the_models_own():
    """A transformer's layers; none where nothing repeats."""
    assert [type(block).__name__ for block in repeated_blocks(GPT(layers=4))] == ["Block"] * 4
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_eight_bit_state_is_as_large_as_it_says():
    """Two bytes a number and eight for each 256; small parameters keep float32."""
    large, small = nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(10))
    optimizer = EightBitAdam([large, small], {})
    (large.sum() + small.sum()).backward()
    optimizer.step()
    sizes = [sum(tensor.nbytes for tensor in optimizer.state[p].values()) for p in (large, small)]
    assert sizes == [2 * 10_000 + 2 * 4 * 40, 2 * 4 * 10]
