"""A hostile client: requests that schemathesis makes from the OpenAPI. Sampled; ``make proof`` sends ten thousand."""

from __future__ import annotations

import logging

import pytest
from sampling import IN_PROOF
from services import make_plan_in, make_prediction, make_run_in, run_in_thread

from autobatch.service.records import PlanIn, PredictionIn, RunIn

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra serve-tests, which needs Python 3.11")
hypothesis = pytest.importorskip("hypothesis")
requests = pytest.importorskip("requests")

EXAMPLES = 300 if IN_PROOF else 5  # valid ones, and as many that are not, of each of 19 operations
PAGES = ["/", "/runs", "/plans", "/predictions", "/alerts", "/search?q=a", "/compare?first=a1&second=a1", "/metrics"]
LISTS = ["/plans", "/runs", "/predictions", "/cards", "/predictions/errors"]

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]


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
        answer = case.call(base_url=address, headers=headers, session=session)
        sent[0] += 1
        sent[1] += answer.status_code < 300
        assert answer.status_code < 500, (case.method, case.path, answer.status_code, answer.text)

    send_valid()
    send_invalid()
