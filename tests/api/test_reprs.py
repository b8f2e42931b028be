"""What a REPL, a debugger or a failing assertion shows of a record: one line that helps."""

from __future__ import annotations

import inspect

import pytest
import torch
from ledgers import make_plan, make_run
from torch import nn

import autobatch
import autobatch.events
from autobatch import MemoryCurve, StepResult
from autobatch.errors import InvalidArgument
from autobatch.events.runner_events import RankStep
from autobatch.prediction.prediction import Prediction
from autobatch.records import DeviceInfo, Record, Trial, Verdict

LONG = "it happened " * 400
TRIALS = tuple(Trial(micro_batch_size=n, outcome="fits", peak_reserved=n * 2**20, seconds=0.1) for n in range(1, 200))
MANY = tuple(
    RankStep(rank=n, samples=4, micro_batch_size=2, retries=0, peak_bytes=2**30, seconds=0.5) for n in range(64)
)


def result(**fields):
    """A step's, as large as asked for."""
    return StepResult(torch.tensor(0.5), (4, 4, 3), 1, 3 * 2**30, 0.25, **fields)


RECORDS = {
    "plan": (lambda: make_plan().model_copy(update={"trials": TRIALS, "warnings": (LONG,) * 9}), "autobatch: "),
    "run": (make_run, "Run("),
    "trial": (lambda: TRIALS[42], "Trial(micro_batch_size=43, outcome='fits', peak_reserved=43.0 MiB"),
    "device": (lambda: DeviceInfo(kind="cuda", name=LONG, total_bytes=2**34), "DeviceInfo(kind='cuda', name='it happ"),
    "verdict": (
        lambda: Verdict(exact=False, relative_error=0.25, causes=(LONG,) * 3, samples=8),
        "Verdict(exact=False, relative_error=0.25",
    ),
    "rank": (lambda: MANY[5], "RankStep(samples=4, micro_batch_size=2, "),
    "event": (
        lambda: autobatch.events.StepFailed(step=4, reason=LONG, out_of_memory=True),
        "StepFailed(step=4, reason='it happened",
    ),
    "step of many micro-batches": (
        lambda: result(aux=(None,) * 32, samples=(tuple(range(500)),) * 3),
        "StepResult(loss=0.5, micro_batch_sizes='2 x 4 + 1 x 3', retries=1, peak_bytes=3.0 GiB, seconds=0.25",
    ),
    "step on many ranks": (lambda: result(ranks=MANY, aux=(torch.zeros(900),) * 3), "StepResult(loss=0.5"),
    "skipped step": (lambda: StepResult(torch.tensor(torch.nan), (), 0, 0, 0.0, skipped=True), "StepResult(loss=nan"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_repr_is_one_short_line(name):
    """With what it is about first; lists and texts of any length do not make it longer."""
    make, begins = RECORDS[name]
    text = repr(make())
    assert text.startswith(begins)
    assert "\n" not in text
    assert len(text) <= 200
    assert "None" not in text


def test_a_plan_in_a_repl_is_what_print_shows():
    """And so it is in a list of plans."""
    plan = make_plan()
    assert repr(plan) == str(plan)
    assert repr([plan]) == f"[{plan}]"


def test_a_curve_shows_its_ends():
    """Where the knots of a search would be many numbers."""
    knots = tuple((size, size * size * 2**20) for size in range(2, 90))
    assert repr(MemoryCurve(allocated=knots, reserved=knots)) == "MemoryCurve(2: 4.0 MiB, 89: 7.7 GiB)"


def test_every_record_of_ours_has_the_short_repr():
    """Nobody has brought back pydantic's own, which has every field."""
    kinds = [Record]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 20
    assert {inspect.getmodule(kind.__repr__).__name__.partition(".")[0] for kind in kinds} == {"autobatch"}


@pytest.fixture(scope="module")
def predictions():
    """One that fits, and one that does not."""
    model, step = nn.Linear(64, 4), lambda model, batch: model(batch).square().mean()
    fits = autobatch.predict(model, torch.zeros(2, 64), step, gpu="24GiB", target_batch=12)
    with torch.device("meta"):
        large = nn.Linear(30_000, 30_000)
    return fits, autobatch.predict(large, torch.zeros(2, 30_000), step, gpu=2**30, target_batch=12)


@pytest.mark.predicts
def test_a_prediction_is_used_like_its_plan(predictions):
    """Its sizes are the plan's, and a Runner asks for the plan."""
    fits, none = predictions
    for name in ("micro_batch_size", "micro_batch_sizes", "accumulation_steps"):
        assert getattr(fits, name) == getattr(fits.plan, name)
        assert not getattr(none, name)
    for prediction in predictions:
        assert repr(prediction) == str(prediction)
        assert "\n" not in repr(prediction)
        assert len(repr(prediction)) <= 200
        assert isinstance(prediction, Prediction)
        with pytest.raises(InvalidArgument, match=r"Prediction.*prediction\.plan") as caught:
            autobatch.Runner(prediction, nn.Linear(64, 4), None, None)
        assert "\n" not in str(caught.value)
