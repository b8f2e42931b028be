"""Files that are no plan of ours: whatever they hold is refused in one line, or can be shown."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import make_plan
from pydantic import ValidationError
from sampling import sample

from autobatch import plan as plan_module
from autobatch._bounds import LONGEST_TEXT
from autobatch.cli.plans import _plan_row
from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run, Setback, StepRange
from autobatch.plan import Plan
from autobatch.records import ModuleError, Tenant, Verdict

LONGEST_S = 60.0
"""Of computing, for all that is done with a plan together: a second at most, and hours where a search does not end."""


def use(plan, folder):
    """Everything that a user does with a plan."""
    began = time.process_time()
    assert len(str(plan).splitlines()) == 1
    assert plan.explain()
    assert plan._repr_html_()
    assert max(len(cell.splitlines()) for cell in _plan_row(plan, 0, [])) == 1
    for framework in ("huggingface", "deepspeed"):
        try:
            assert plan.settings(framework)
        except InvalidArgument as error:  # of ranks that cannot share the target
            assert "cannot be shared equally" in str(error)  # noqa: PT017 - other errors must come out
    plan.save(folder / "again.json")
    assert Plan.load(folder / "again.json") == plan
    assert time.process_time() - began < LONGEST_S


def load(content, folder):
    """The plan of these bytes, used; or the text of the refusal."""
    path = folder / "plan.json"
    path.write_bytes(content)
    began = time.process_time()
    try:
        plan = Plan.load(path)
    except InvalidArgument as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        assert len(text) < 1000 + len(str(path))
        assert time.process_time() - began < LONGEST_S
        return text
    use(plan, folder)
    return ""


def fields(**changes):
    """A plan's JSON with other fields, as bytes."""
    return json.dumps({**json.loads(make_plan().model_dump_json()), **changes}).encode()


def nested(path, value):
    """A plan's JSON in which the field at this path is another, as bytes."""
    content = json.loads(make_plan(device=DEVICE, verdict=VERDICT).model_dump_json())
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(content).encode()


DEVICE = make_plan().device.model_copy(update={"tenants": (Tenant(pid=1, used_bytes=2, name="x"),), "uuid": "u"})
VERDICT = Verdict(exact=True, relative_error=1e-7, causes=("why",), samples=4, partitions=((2, 2),), seconds=0.1)


def leaves(value, path=()):
    """The path of every number, text and list in a plan's JSON."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
        return
    yield path
    if isinstance(value, list):
        for part in value[:1]:  # the others are of the same kind
            yield from leaves(part, (*path, 0))


PATHS = list(leaves(json.loads(make_plan(device=DEVICE, verdict=VERDICT).model_dump_json())))

EXTREMES = {
    "10**18": 10**18,
    "10**400": 10**400,
    "-1": -1,
    "-10**400": -(10**400),
    "2**63": 2**63,
    "1e308": 1e308,
    "5e-324": 5e-324,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "nan": math.nan,
    "a line break": "a\nautobatch: 1 = 1 x 1 on CPU",
    "an escape sequence": "\x1b[2J",
    "a C1 control": "\x9b2J",
    "a line separator": "a\u2028b",
    "another direction": "a\u202eb",
    "half a character": "\ud800",
    "a long text": "x" * (LONGEST_TEXT + 1),
    "nothing": None,
    "an empty list": [],
    "a long list": [1] * 20_000,
    "a list of texts": ["x"] * 20_000,
    "an object": {"a": {"b": {}}},
    "an empty text": "",
}


@pytest.mark.parametrize(("number", "name"), [*enumerate(EXTREMES)])
def test_an_extreme_anywhere_is_refused_or_can_be_shown(tmp_path, number, name):
    """In each field of a plan and of all that it holds; CI puts each extreme into another third of them."""
    for path in sample(PATHS[number % 3 :], 3):
        load(nested(path, EXTREMES[name]), tmp_path)


STEERING = [name for name, value in EXTREMES.items() if isinstance(value, str) and value and "x" not in value]


@pytest.mark.parametrize("field", ["id", "model", "fingerprint", "version", "confirms"])
@pytest.mark.parametrize("name", STEERING)
def test_a_text_that_steers_is_refused_in_a_file(tmp_path, field, name):
    """A line break forges a row of ``autobatch plans``, an escape sequence hides one."""
    assert field in load(fields(**{field: EXTREMES[name]}), tmp_path) or name == "half a character"
    assert load(fields(device={**json.loads(DEVICE.model_dump_json()), "name": EXTREMES[name]}), tmp_path)
    assert load(fields(warnings=[EXTREMES[name]]), tmp_path)
    assert load(fields(batch_lists={EXTREMES[name]: "fields"}), tmp_path)


@pytest.mark.parametrize("name", STEERING)
def test_such_a_text_is_spelt_out_in_a_plan_that_is_made_here(tmp_path, name):
    """A driver's or a user's name costs no plan, and the plan survives its file."""
    plan = make_plan(id=EXTREMES[name], model=EXTREMES[name], warnings=(EXTREMES[name], "x" * 10**6))
    assert plan.id.isprintable()
    assert plan.id.isascii()
    assert len(plan.warnings[1]) == LONGEST_TEXT
    use(plan, tmp_path)


HOSTILE = {
    "a target that takes a second to divide": fields(target_batch=10**18, micro_batch_sizes=[10**18]),
    "bytes beyond a float": fields(budget_bytes=10**400, headroom_bytes=0),
    "a number of a million digits": b'{"target_batch": ' + b"9" * 10**6 + b"}",
    "a date beyond the calendar": fields(made_at=1e300),
    "a date before it": fields(made_at=-1e300),
    "deep lists": b"[" * 100_000,
    "a deep field": b'{"curve": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a long name of a field": json.dumps({"x\n" * 10**6: 1}).encode(),
    "many unknown fields": json.dumps({f"f{n}": n for n in range(100_000)}).encode(),
    "a million wrong entries": fields(micro_batch_sizes=[0] * 10**6),
    "too many micro-batches": fields(
        target_batch=2 * 10**6, micro_batch_sizes=[1] * (2 * 10**6), micro_batch_size=1, accumulation_steps=2 * 10**6
    ),
    "a null byte": b"\x00",
    "no UTF-8": fields().replace(b"NVIDIA", b"\xff\xfe"),
    "two plans": fields() * 2,
    "the end is missing": fields()[:-20],
    "the size is more than the most": fields(max_micro_batch=10),
    "the largest and the sizes differ": fields(micro_batch_size=44),
    "knots that bend down": fields(curve={"allocated": [[1, 5], [2, 9], [3, 10]], "reserved": [[1, 5], [2, 9]]}),
    "a knot below zero": fields(curve={"allocated": [[1, -5], [2, 9]], "reserved": [[1, 5], [2, 9]]}),
    "a trial of no samples": fields(trials=[{"micro_batch_size": 0, "outcome": "fits"}]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, name):
    """Soon, whatever its size."""
    assert "is not a plan that this version reads" in load(HOSTILE[name], tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    """Nor one without an end."""
    monkeypatch.setattr(plan_module, "_LARGEST_FILE", 10_000)
    assert "is larger than" in load(b" " * 10_001 + fields(), tmp_path)
    with pytest.raises(InvalidArgument, match="is not a plan: it is larger than"):
        Plan.load("/dev/zero")


@given(
    content=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(), part, max_size=4),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_refused_in_one_line(tmp_path_factory, content):
    """Binary files and JSON of any form."""
    assert load(content, tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize("error", [0.0, 1e-7, math.inf, math.nan])
def test_a_verdict_without_bounds_survives_its_file(tmp_path, error):
    """An infinite error is one of parts that have a gradient where the whole batch has none, or of no numbers."""
    modules = (ModuleError(module="head", relative_error=error),)
    use(make_plan(verdict=Verdict(exact=False, relative_error=error, modules=modules)), tmp_path)


@pytest.mark.parametrize("value", [-1, 2**63, 10**400, math.nan, "x", "a\nb", [], None])
def test_a_runs_numbers_are_bounded_too(value):
    """Of ranges, setbacks and the run itself: what the ledger reads is shown as well."""
    cases = [
        (StepRange, {"first_step": 0, "last_step": 1, "micro_batch_size": 1}),
        (Setback, {"step": 0, "kind": "size", "old_size": 2, "new_size": 1}),
        (Run, {"id": "r", "plan_id": "p", "pid": 1, "started_at": 0.0, "last_seen_at": 0.0}),
    ]
    for record, good in cases:
        for name, old in good.items():
            if isinstance(old, str) and value == "x":
                continue
            content = json.dumps({**good, name: value})
            with pytest.raises(ValidationError):
                record.model_validate_json(content)
