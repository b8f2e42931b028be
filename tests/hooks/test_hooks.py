"""Events of a run arrive in the real trackers, and what goes wrong there costs a log line."""

from __future__ import annotations

import io
import json
import logging
import resource
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autobatch
from autobatch import hooks
from autobatch.errors import InvalidArgument
from autobatch.events import Retried, SizeChanged, StepFailed, StepFinished, emit
from autobatch.testing import FakeDevice, oom_at

pytestmark = pytest.mark.quick

FINISHED = StepFinished(
    step=7, micro_batch_sizes=(86, 85, 85), retries=1, peak_bytes=5 * 2**30, seconds=0.25, budget_bytes=8 * 2**30
)
RETRIED = Retried(
    step=7,
    failed_size=128,
    new_size=86,
    used_bytes=2**30,
    budget_bytes=8 * 2**30,
    reason="OutOfMemoryError: CUDA out of memory.",
)
CHANGED = SizeChanged(step=8, old_size=86, new_size=43, reason="less is free")
FAILED = StepFailed(step=9, reason="DoesNotFit: no room for one sample", out_of_memory=True)
EVENTS = [RETRIED, FINISHED, CHANGED, FAILED]

NUMBERS = {
    "autobatch/samples": 256,
    "autobatch/micro_batch_size": 86,
    "autobatch/accumulation_steps": 3,
    "autobatch/retries": 1,
    "autobatch/peak_bytes": 5 * 2**30,
    "autobatch/seconds": 0.25,
    "autobatch/budget_bytes": 8 * 2**30,
}


def send(hook, events=EVENTS):
    """Hand all events to a hook, as a runner would."""
    for event in events:
        hook(event)


def train(*own_hooks, steps=2):
    """A real run of two steps on a pretended card, the first of which meets the end of memory."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpu = FakeDevice(lambda samples: 1000 + 50 * samples, total_bytes=4000)
    batch = torch.ones(64, 3)

    def step(model, rows):
        return model(rows).square().mean()

    plan = autobatch.fit(model, 64, batch=batch, step=step, optimizer=optimizer, device=gpu, progress=False)
    runner = autobatch.Runner(plan, model, step, optimizer, device=gpu, hooks=own_hooks)
    with oom_at(3):
        results = [runner.step(batch)]
    return results + [runner.step(batch) for _ in range(steps - 1)]


def test_tensorboard_draws_every_number_at_its_step(tmp_path):
    """Written by torch's own writer, read back by TensorBoard's own reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own deprecations
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            results = train(hooks.tensorboard(writer))
            send(hooks.tensorboard(writer))
        found = EventAccumulator(str(tmp_path)).Reload()
    for name, value in NUMBERS.items():
        assert [(scalar.step, scalar.value) for scalar in found.Scalars(name)][-1] == (7, pytest.approx(value))
    sizes = [(scalar.step, scalar.value) for scalar in found.Scalars("autobatch/micro_batch_size")]
    assert sizes[:2] == [(index, max(result.micro_batch_sizes)) for index, result in enumerate(results)]
    assert found.Scalars("autobatch/retries")[0].value == results[0].retries == 1
    assert found.Scalars("autobatch/out_of_memory_at")[-1].value == 128
    assert found.Scalars("autobatch/size_limit")[-1].step == 8


def test_mlflow_keeps_every_number_of_a_run(tmp_path, monkeypatch):
    """In a local file store: in the active run, or in the one that was named."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own deprecations
        import mlflow

        mlflow.set_tracking_uri(tmp_path.as_uri())
        named = mlflow.MlflowClient().create_run(mlflow.create_experiment("other")).info.run_id
        mlflow.set_experiment("autobatch")
        send(hooks.mlflow())
        assert mlflow.active_run() is None  # else this next line, the user's, would fail
        with mlflow.start_run() as active:
            send(hooks.mlflow())
            send(hooks.mlflow(named), [FINISHED])
        logged = mlflow.get_run(active.info.run_id).data.metrics
        assert {name: logged[name] for name in NUMBERS} == NUMBERS
        assert mlflow.get_run(named).data.metrics == NUMBERS
        history = mlflow.MlflowClient().get_metric_history(named, "autobatch/retries")
        assert [(metric.step, metric.value) for metric in history] == [(7, 1.0)]


def test_prometheus_scrapes_the_counters_over_http():
    """Counters add up over the events of two hooks of one registry; gauges are of the last one."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    send(hooks.prometheus(registry))
    send(hooks.prometheus(registry), [FINISHED])
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    scraped = dict(line.split(" ") for line in page.splitlines() if not line.startswith("#"))
    assert {name: float(scraped[name]) for name in scraped if not name.endswith("_created")} == {
        "autobatch_steps_total": 2,
        "autobatch_samples_total": 512,
        "autobatch_retries_total": 1,
        "autobatch_out_of_memory_total": 2,
        "autobatch_failures_total": 1,
        "autobatch_step_seconds_total": 0.5,
        "autobatch_micro_batch_size": 86,
        "autobatch_accumulation_steps": 3,
        "autobatch_peak_bytes": 5 * 2**30,
        "autobatch_budget_bytes": 8 * 2**30,
    }


def test_runs_differ_by_their_labels():
    """Two runs of one process, each under its own label."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    send(hooks.prometheus(registry, {"run": "a"}), [FINISHED])
    send(hooks.prometheus(registry, {"run": "b"}), [FINISHED, FINISHED])
    assert registry.get_sample_value("autobatch_steps_total", {"run": "a"}) == 1
    assert registry.get_sample_value("autobatch_steps_total", {"run": "b"}) == 2


class Recorded:
    """A run of Weights & Biases as far as a hook uses one."""

    def __init__(self):
        self.logged = []

    def log(self, values):
        self.logged.append(values)


def test_wandb_gets_the_numbers_with_the_runners_step_among_them(monkeypatch):
    """A step of their own would go back where the user's goes on; without a run, the library's active one is meant."""
    given, module = Recorded(), Recorded()
    monkeypatch.setitem(sys.modules, "wandb", module)
    send(hooks.wandb(given), [FINISHED])
    send(hooks.wandb(), [FINISHED])
    assert given.logged == module.logged == [{**NUMBERS, "autobatch/step": 7}]


def test_jsonl_has_a_line_for_each_event(tmp_path):
    """With its name, its time, and its fields; a second hook goes on in the same file."""
    path = tmp_path / "deep" / "events.jsonl"
    send(hooks.jsonl(path))
    results = train(hooks.jsonl(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines[:4]] == ["Retried", "StepFinished", "SizeChanged", "StepFailed"]
    fields = {name: value for name, value in lines[1].items() if name not in {"event", "time"}}
    assert StepFinished.model_validate(fields) == FINISHED
    assert lines[0]["time"] <= lines[1]["time"]
    finished = [line for line in lines[4:] if line["event"] == "StepFinished"]
    assert [tuple(line["micro_batch_sizes"]) for line in finished] == [result.micro_batch_sizes for result in results]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    """In one line that begins with the user's call."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "events.jsonl", "/proc/events.jsonl", tmp_path / ("n" * 300), ""):
        with pytest.raises(InvalidArgument, match=r"^jsonl\('[^\n]*\)[^\n]*: name a file [^\n]*$"):
            hooks.jsonl(path)
    with pytest.raises(InvalidArgument, match=r"^jsonl\(5\): pass a path, such as 'events.jsonl'$"):
        hooks.jsonl(5)


def test_a_line_that_was_cut_is_logged_and_spoils_no_other(tmp_path, caplog):
    """As on a full disk: here the size of a file is limited for a while."""
    path = tmp_path / "events.jsonl"
    hook = hooks.jsonl(path)
    emit(FINISHED, [hook])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        emit(FINISHED, [hook])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    emit(CHANGED, [hook])
    assert "20 of" in caplog.text
    whole, cut, last = path.read_text().splitlines()
    assert json.loads(whole)["event"] == "StepFinished"
    assert len(cut) == 20
    assert json.loads(last)["event"] == "SizeChanged"


def test_console_writes_above_a_bar(monkeypatch):
    """A bar of tqdm is drawn anew beneath the line; without tqdm it is plain. Steps that went well are silent."""
    from tqdm import tqdm

    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm(total=3, file=screen, mininterval=0) as bar:
        bar.update(1)
        send(hooks.console())
        bar.update(1)
    lines = screen.getvalue().replace("\r", "\n").splitlines()
    assert f"autobatch: {RETRIED}" in lines
    assert f"autobatch: {CHANGED}" in lines
    assert f"autobatch: {FINISHED}" not in lines
    screen.truncate(0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    send(hooks.console(logging.DEBUG))
    assert [f"autobatch: {event}" for event in EVENTS] == screen.getvalue().lstrip("\0").splitlines()


def test_console_writes_where_it_is_asked_to():
    """Such as a rich console's own print."""
    lines = []
    send(hooks.console(logging.WARNING, write=lines.append))
    assert lines == [f"autobatch: {RETRIED}", f"autobatch: {CHANGED}"]


def test_without_cuda_a_memory_snapshot_costs_one_warning(tmp_path, caplog):
    """Torch has none of the CPU's memory; steps go on, and nothing is written."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    hook = hooks.memory_snapshot(tmp_path / "snapshots")
    send(hook)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no memory snapshots will be written" in caplog.text
    assert not (tmp_path / "snapshots").exists()


def test_a_memory_snapshot_is_written_at_each_shortage_up_to_a_number(tmp_path, monkeypatch):
    """By torch's own functions, here replaced by ones that write their name; default: beside the ledger."""
    recorded = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: recorded.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    hook = hooks.memory_snapshot(most=2)
    send(hook, [FINISHED, RETRIED, FAILED, RETRIED])
    assert recorded == [{"max_entries": 100_000}]
    names = sorted(path.name.split("-")[3] for path in (tmp_path / "snapshots").glob("*.pickle"))
    assert names == ["step7", "step9"]


def test_a_hook_that_raises_costs_a_line_and_no_step(caplog):
    """A tracker that cannot be reached, say: weights are as without it."""

    def unreachable(event):
        raise ConnectionError("no route to the tracker")

    results = train(unreachable)
    assert [result.retries for result in results] == [1, 0]
    assert "no route to the tracker" in caplog.text


def test_nothing_is_imported_before_it_is_used():
    """Neither torch nor any tracker comes with the hooks."""
    program = (
        "import sys, autobatch; autobatch.hooks.tensorboard; "
        "sys.exit(bool({'torch', 'tensorboard', 'wandb', 'mlflow', 'prometheus_client', 'tqdm'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_what_a_tracker_needs_is_asked_for_at_once(monkeypatch):
    """A writer that is none, a library that is not installed."""
    with pytest.raises(autobatch.InvalidArgument, match="pass a SummaryWriter"):
        hooks.tensorboard(None)
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError):
            getattr(hooks, name)()
