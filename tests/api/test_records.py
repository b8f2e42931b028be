"""Records are frozen, closed and equal by content, survive JSON, and show themselves, bytes and counts in few words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ledgers import make_plan, make_run
from pydantic import ValidationError
from torch import nn

import autobatch
import autobatch.events
from autobatch import StepResult
from autobatch._formatting import format_bytes, plural
from autobatch.errors import InvalidArgument
from autobatch.events.runner_events import RankStep
from autobatch.prediction.prediction import Prediction
from autobatch.records import DeviceInfo, MemoryUsage, Record, Tenant, Trial, Verdict

pytestmark = pytest.mark.quick

RECORDS = [
    Tenant(pid=7, used_bytes=2**62, name="python"),
    DeviceInfo(kind="cuda", name="NVIDIA L4", total_bytes=2**34, uuid="u", tenants=(Tenant(pid=1, used_bytes=0),)),
    MemoryUsage(allocated=2**62 + 1, reserved=1, peak_allocated=2, peak_reserved=3, alloc_retries=4),
    Trial(micro_batch_size=8, outcome="fits", peak_reserved=2**53 + 1, seconds=0.25),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_a_value(record: Record) -> None:
    """It survives JSON, has a hash that goes with its equality, cannot be written to, and has no other field."""
    copy = type(record).model_validate_json(record.model_dump_json())
    assert copy == record
    assert hash(copy) == hash(record)
    for field in type(record).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(record, field, getattr(record, field))
    with pytest.raises(ValidationError, match="peak_alocated"):
        type(record).model_validate({**record.model_dump(), "peak_alocated": 1})


@pytest.mark.parametrize(
    ("record", "fields", "reason"),
    [
        (Trial, {"micro_batch_size": 8, "outcome": "slow"}, "'fits', 'oom' or 'thrash'"),
        (Trial, {"micro_batch_size": 8.5, "outcome": "fits"}, "micro_batch_size"),
        (Trial, {"outcome": "fits"}, "micro_batch_size"),
        (DeviceInfo, {"kind": "cuda", "name": "NVIDIA L4", "total_bytes": "23 GiB"}, "total_bytes"),
        (MemoryUsage, {"allocated": 0.5}, "allocated"),
    ],
)
def test_what_cannot_be_is_refused(record: type[Record], fields: dict[str, object], reason: str) -> None:
    """Another outcome, a part of a sample, bytes as text or a missing size do not become a record."""
    with pytest.raises(ValidationError, match=reason):
        record.model_validate(fields)


def test_the_rate_counts_both_micro_batches() -> None:
    """A trial runs two micro-batches; where no time was taken the rate is 0, not a division by zero."""
    trials = [Trial(micro_batch_size=8, outcome="fits", seconds=seconds) for seconds in (0.5, 0.0)]
    assert [trial.samples_per_second for trial in trials] == [32.0, 0.0]


LONG = "it happened " * 400
TRIALS = tuple(Trial(micro_batch_size=n, outcome="fits", peak_reserved=n * 2**20, seconds=0.1) for n in range(1, 200))
MANY = tuple(
    RankStep(rank=n, samples=4, micro_batch_size=2, retries=0, peak_bytes=2**30, seconds=0.5) for n in range(64)
)


def result(**fields):
    return StepResult(torch.tensor(0.5), (4, 4, 3), 1, 3 * 2**30, 0.25, **fields)


SHOWN = {
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


@pytest.mark.parametrize("name", SHOWN)
def test_a_repr_is_one_short_line(name):
    """The subject comes first; lists and texts of any length do not make it longer."""
    make, begins = SHOWN[name]
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


@pytest.fixture(scope="module")
def predictions():
    """A prediction that fits, and one that does not."""
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


UNITS = {"byte": 1, "bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# The upper end is 16 PiB: more than any one device holds.
BYTES = st.integers(min_value=-(2**54), max_value=2**54)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (1024**3 - 1, "1.0 GiB"),
        (1024**3, "1.0 GiB"),
        (8 * 1024**3, "8.0 GiB"),
        (2048 * 1024**3, "2048.0 GiB"),
    ],
)
def test_bytes_as_a_person_reads_them(count: int, text: str) -> None:
    """Powers of 1024, one decimal from KiB on, never ``1024.0`` of a unit that has a larger one."""
    assert format_bytes(count) == text


def _read_back(text: str) -> tuple[float, int]:
    """The value in bytes and the bytes in one unit."""
    number, unit = text.split(" ")
    return float(number) * UNITS[unit], UNITS[unit]


@given(BYTES)
def test_the_text_is_true_to_one_decimal(count: int) -> None:
    """The text differs by at most half of its last decimal (and floats' own rounding)."""
    value, unit = _read_back(format_bytes(count))
    assert abs(value - count) <= 0.0501 * unit if unit > 1 else value == count


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "trial"), "0 trials"),
        ((1, "trial"), "1 trial"),
        ((2, "trial"), "2 trials"),
        ((1, "micro-batch", "micro-batches"), "1 micro-batch"),
        ((6, "micro-batch", "micro-batches"), "6 micro-batches"),
        ((0, "retry", "retries"), "0 retries"),
    ],
)
def test_one_is_singular_and_nothing_else_is(arguments: tuple[int, str], text: str) -> None:
    """The plural is the singular with an s, unless it is given."""
    assert plural(*arguments) == text
