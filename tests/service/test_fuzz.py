"""A hostile client: requests that schemathesis makes from the OpenAPI. Sampled; ``make proof`` sends ten thousand."""

from __future__ import annotations

import json
import logging
import random

import pytest
from sampling import IN_PROOF
from services import make_plan_in, make_prediction, make_run_in, make_summary, run_in_thread

from autobatch.service.records import PlanIn, PredictionIn, RunIn

try:
    import hypothesis
    import requests
    import schemathesis
except ImportError:
    schemathesis = None

EXAMPLES = 300 if IN_PROOF else 5  # valid ones, and as many that are not, of each of 19 operations
PAGES = ["/", "/runs", "/plans", "/predictions", "/alerts", "/search?q=a", "/compare?first=a1&second=a1", "/metrics"]
LISTS = ["/plans", "/runs", "/predictions", "/cards", "/predictions/errors"]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]


@pytest.mark.skipif(schemathesis is None, reason="needs the extra serve-tests, which needs Python 3.11")
def test_no_request_fails_or_breaks_a_page(service, caplog):
    """No answer of 500, and all pages and lists can be shown afterwards."""
    caplog.set_level(logging.ERROR, "autobatch")
    service.limit._rate = service.limit._burst = 1e9
    service.store.add_plan(PlanIn.model_validate(make_plan_in()))
    service.store.add_run(RunIn.model_validate(make_run_in()))
    service.store.add_prediction(PredictionIn.model_validate(make_prediction()))
    headers = {"Authorization": f"Bearer {service.tokens.create('fuzz', 'admin')}"}
    sent = [0, 0]
    with run_in_thread(service) as address, requests.Session() as session:
        document = session.get(f"{address}/api/v1/openapi.json", headers=headers).json()
        del document["paths"]["/api/v1/events"]  # it never ends
        for operation in schemathesis.openapi.from_dict(document).get_all_operations():
            _fuzz(operation.ok(), address, headers, sent, session)
        assert sent[1] > 0
        plans = session.get(f"{address}/api/v1/plans?limit=500", headers=headers).json()["plans"]
        runs = session.get(f"{address}/api/v1/runs?limit=500", headers=headers).json()["runs"]
        paths = [*PAGES, *(f"/api/v1{path}?limit=500" for path in LISTS)]
        paths += [f"/plans/{plan['id']}" for plan in plans] + [f"/runs/{run['id']}" for run in runs]
        cookies = {"autobatch_token": headers["Authorization"].split()[1]}
        for path in paths:
            answer = session.get(f"{address}{path}", headers=headers, cookies=cookies)
            assert answer.status_code in {200, 404}, (path, answer.status_code)
    assert [record.getMessage() for record in caplog.records] == []
    print(f"{sent[0]} requests, {sent[1]} accepted, {len(plans)} plans, {len(runs)} runs")  # noqa: T201 - pytest -s


def _fuzz(operation, address, headers, sent, session):
    """Send requests to one operation, well-formed and not."""

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
    def send_valid(case):
        _send(case)

    @hypothesis.settings(parent=send_valid._hypothesis_internal_use_settings)
    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def send_invalid(case):
        _send(case)

    def _send(case):
        answer = case.call(base_url=address, headers=headers, session=session, timeout=300)
        sent[0] += 1
        sent[1] += answer.status_code < 300
        assert answer.status_code < 500, (case.method, case.path, answer.status_code, answer.text)

    send_valid()
    send_invalid()


HOSTILE = [None, True, -1, 0, 1, 0.5, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 1e308, -1e308, "", "a", "0" * 32, "<b>"]
HOSTILE += ["\x00", "\ud800", "\u202e", "x" * 5000, "NaN", "Infinity", [], [[]], {}, {"a": 1}, [0] * 3, ["\x00"]]


def _places(value, path=()):
    """Yield the path of each value in a record."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, (*path, index))


def _replace(value, path, new):
    """Return a record with another value at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replace(copy[path[0]], path[1:], new)
    return copy


def test_a_damaged_record_breaks_no_page(client, service):
    """Valid records with one hostile value anywhere: refused, or shown like any other."""
    kinds = {
        "/plans": make_plan_in("a0"),
        "/runs": make_run_in("a0"),
        "/runs/r1/summaries": make_summary(0),
        "/predictions": make_prediction("a0"),
        "/gate": {"prediction": make_prediction("a0"), "limit_bytes": 2**30},
    }
    client.post("/api/v1/plans", json=make_plan_in())
    client.post("/api/v1/runs", json=make_run_in("r1"))
    client.cookies["autobatch_token"] = service.tokens.create("a browser", "reader")
    pages = {"/plans": "/plans/{}", "/runs": "/runs/{}"}
    cases = [(kind, path, new) for kind, record in kinds.items() for path in _places(record) for new in HOSTILE]
    chosen = random.Random(1).sample(cases, len(cases) if IN_PROOF else 250)
    accepted = 0
    for index, (kind, path, new) in enumerate(chosen):
        record = kinds[kind] | ({"number": index % 900} if "number" in kinds[kind] else {"id": f"b{index}"})
        record.pop("id", None) if kind == "/gate" else None
        record = _replace(record, path, new)
        body = json.dumps(record).encode()
        answer = client.post(f"/api/v1{kind}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in {200, 201, 400, 409, 422}, (kind, path, new, answer.text)
        accepted += answer.status_code < 300
        if answer.status_code == 201 and kind in pages:
            shown = client.get(f"/api/v1{pages[kind].format(answer.json()['id'])}")
            assert shown.status_code == 200, (kind, path, new, shown.text)
            page = client.get(pages[kind].format(answer.json()["id"]))
            assert page.status_code == 200, (kind, path, new, page.text)
    for path in [*PAGES, *(f"/api/v1{path}" for path in LISTS)]:
        shown = client.get(path)
        assert shown.status_code == 200, (path, shown.text)
    print(f"{len(chosen)} damaged records, {accepted} accepted")  # noqa: T201 - pytest -s
