"""Records: frozen, closed, equal by content, and the same after a trip through JSON."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autobatch.records import DeviceInfo, MemoryUsage, Record, Tenant, Trial

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
