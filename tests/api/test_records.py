"""Records: frozen, closed, equal by content, and the same after a trip through JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autobatch.records import DeviceInfo, MemoryUsage, Record, Tenant, Trial

# JSON has no NaN; bytes go beyond what a float can hold exactly.
COUNTS = st.integers(min_value=0, max_value=2**62)
SECONDS = st.floats(min_value=0, max_value=1e9)

TENANTS = st.builds(Tenant, pid=COUNTS, used_bytes=COUNTS, name=st.text())
DEVICES = st.builds(
    DeviceInfo,
    kind=st.sampled_from(["cuda", "cpu", "mps"]),
    name=st.text(),
    total_bytes=COUNTS,
    uuid=st.none() | st.text(),
    tenants=st.lists(TENANTS, max_size=3).map(tuple),
)
USAGES = st.builds(
    MemoryUsage, allocated=COUNTS, reserved=COUNTS, peak_allocated=COUNTS, peak_reserved=COUNTS, alloc_retries=COUNTS
)
TRIALS = st.builds(
    Trial,
    micro_batch_size=st.integers(min_value=1, max_value=2**31),
    outcome=st.sampled_from(["fits", "oom", "thrash"]),
    peak_allocated=COUNTS,
    peak_reserved=COUNTS,
    optimizer_peak=COUNTS,
    alloc_retries=COUNTS,
    seconds=SECONDS,
    backward_allocated=st.none() | COUNTS,
    backward_reserved=st.none() | COUNTS,
    resident_bytes=COUNTS,
)
RECORDS = st.one_of(TENANTS, DEVICES, USAGES, TRIALS)


@given(RECORDS)
def test_json_round_trip(record: Record) -> None:
    """What is written as JSON reads back as an equal record of the same type."""
    assert type(record).model_validate_json(record.model_dump_json()) == record


@given(RECORDS)
def test_records_are_values(record: Record) -> None:
    """A copy is equal and hashes alike, so that records can be compared, put in sets and used as keys."""
    copy = record.model_copy(deep=True)
    assert copy == record
    assert hash(copy) == hash(record)


@given(RECORDS)
def test_every_field_is_frozen(record: Record) -> None:
    """No stage can change what an earlier one has said."""
    for field in type(record).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(record, field, getattr(record, field))


@given(RECORDS)
def test_undeclared_fields_are_refused(record: Record) -> None:
    """A misspelt or newer field is an error that names it, never dropped in silence."""
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


@pytest.mark.parametrize(
    ("size", "seconds", "rate"),
    [(8, 0.5, 32.0), (1, 2.0, 1.0), (43, 0.0, 0.0)],
)
def test_rate_counts_both_micro_batches(size: int, seconds: float, rate: float) -> None:
    """A trial runs two micro-batches; where no time was taken the rate is 0, not a division by zero."""
    assert Trial(micro_batch_size=size, outcome="fits", seconds=seconds).samples_per_second == rate
