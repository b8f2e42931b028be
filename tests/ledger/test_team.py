"""A team's server gets each plan and run once, whatever becomes of it or of us, and no training waits for it."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from contextlib import contextmanager
from threading import Event

import pytest
import torch
from ledgers import ROOT, add_run, finished, make_plan, make_update, resized, retried, run_process, start_process
from plans import make_whole_plans
from team_server import TOKEN, serving_team, wait_for
from torch import nn

import autobatch
from autobatch.events.run_history import Run
from autobatch.events.runner_events import RankStep
from autobatch.ledger import courier as courier_module
from autobatch.ledger import store as store_module
from autobatch.ledger import wire
from autobatch.ledger.courier import Courier
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.ledger.server import Server, ServerAway
from autobatch.ledger.store import Store
from autobatch.records import DeviceInfo, Tenant, Verdict

PRINT = "0123456789abcdef" * 2  # a fingerprint


@pytest.fixture(autouse=True)
def _new_process(monkeypatch, caplog):
    """Begin as a process that has warned of nothing, and end its threads' work."""
    monkeypatch.setattr(store_module, "_warned", set())
    monkeypatch.setattr(courier_module, "_couriers", {})
    caplog.set_level(logging.WARNING, "autobatch")
    yield
    for courier in courier_module._couriers.values():
        courier._home = courier._outbox = ROOT / "no such folder"
        courier._warn = lambda _: None  # a request may still be on its way, and fail in the time of another test


@pytest.fixture
def team(monkeypatch, tmp_path):
    """A server, and a user who knows it."""
    with serving_team() as server:
        use(monkeypatch, tmp_path, server.url)
        yield server


def use(monkeypatch, home, url):
    monkeypatch.setenv("AUTOBATCH_HOME", str(home))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    monkeypatch.setenv("AUTOBATCH_SERVER", url)
    monkeypatch.setenv("AUTOBATCH_TOKEN", TOKEN)


def outbox(home):
    folder = home / "outbox"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def record(plan, *events):
    recorder = RunRecorder(plan, Ledger.open(DeviceInfo(kind="cpu", name="CPU", total_bytes=2**30)))
    for event in events:
        recorder(event)
    return recorder


def test_without_a_server_nothing_is_imported():
    """No module, no thread, no file beyond those of the ledger."""
    program = """
import os, sys, threading
from ledgers import finished, make_plan
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
Ledger.open().remember(make_plan())
recorder = RunRecorder(make_plan(), Ledger.open())
recorder(finished(0))
print([name for name in sys.modules if name.startswith(("autobatch.service", "http", "autobatch.ledger.team"))])
print(threading.active_count(), sorted(os.listdir(os.environ["AUTOBATCH_HOME"])))
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        output, _ = run_process(program, AUTOBATCH_HOME=folder, AUTOBATCH_LEDGER="on")
    assert output == "[]\n1 ['plans', 'runs']\n"


def test_a_plan_is_handed_in_and_found_on_another_computer(team, tmp_path, monkeypatch):
    """With its step's digest; another home finds it by the fingerprint."""
    plan = make_plan(fingerprint=PRINT)
    assert Ledger.open().remember(plan)
    wait_for(lambda: team.plans and not outbox(tmp_path))
    [handed] = team.plans.values()
    assert (handed.id, handed.step, handed.plan.micro_batch_sizes) == ("a1", PRINT[:16], plan.micro_batch_sizes)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "other"))
    there = Ledger.open()
    assert there.recall(PRINT) == []
    assert [one.id for one in there.recall_from_team(PRINT)] == ["a1"]
    assert there.recall_from_team(PRINT[::-1]) == []


def test_what_leaves_the_computer_is_names_and_numbers(team, tmp_path, monkeypatch):
    """No path, no key of the batch, no other process of the card; with the variable the paths too."""
    tenants = (Tenant(pid=7, used_bytes=9, name="/usr/bin/bob"),)
    device = DeviceInfo(kind="cuda", name="NVIDIA L4", total_bytes=24 * 2**30, tenants=tenants)
    verdict = Verdict(exact=False, relative_error=0.0, unchecked="cannot open /home/bob/c")
    secret = {"warnings": ("look at /home/bob/a.py",), "batch_dims": {"bob": 2}, "device": device, "verdict": verdict}
    Ledger.open().remember(make_plan(fingerprint=PRINT, **secret))
    wait_for(lambda: team.plans)
    assert b"bob" not in team.bodies[0]
    monkeypatch.setenv("AUTOBATCH_SHARE_PATHS", "1")
    monkeypatch.setattr(courier_module, "_couriers", {})
    Ledger.open().remember(make_plan("a2", fingerprint=PRINT, **secret))
    wait_for(lambda: "a2" in team.plans)
    assert team.plans["a2"].plan.warnings == ("look at /home/bob/a.py",)
    assert b"usr" not in team.bodies[-1]


def test_a_run_is_handed_in_from_its_begin_to_its_end(team, tmp_path, monkeypatch):
    """Its plan first, totals from its start, setbacks once, the device's memory, and how it ended."""
    monkeypatch.setattr(courier_module, "_TICK_S", 0.02)
    monkeypatch.setattr(wire, "SUMMARY_S", 0.2)
    monkeypatch.setattr("autobatch.ledger.run_recorder._LEAST_WAIT_S", 0.01)
    monkeypatch.setattr("autobatch.ledger.run_recorder._MOST_OF_TIME", 1.0)
    recorder = record(make_plan(), finished(0))
    wait_for(lambda: team.runs)
    [begun] = team.runs.values()
    assert (begun.plan_id, begun.target_batch, begun.micro_batch_size, begun.model) == ("a1", 32, 8, "Net")
    assert begun.cards[0].total_bytes > begun.cards[0].own_bytes > 0
    wait_for(lambda: team.summaries)
    for event in (retried(1), finished(1, (4,) * 8, retries=1), resized(2), finished(2)):
        recorder(event)
        time.sleep(0.1)
    wait_for(lambda: len(team.summaries) > 1)
    del recorder
    wait_for(lambda: team.ends and not outbox(tmp_path))
    ordered = [team.summaries[begun.id, number] for number in range(len(team.summaries))]
    assert [one.steps for one in ordered] == sorted(one.steps for one in ordered)
    last = ordered[-1]
    assert (last.steps, last.samples, last.retries, last.size_changes, last.micro_batch_size) == (3, 96, 1, 1, 8)
    assert [(one.step, one.kind) for summary in ordered for one in summary.setbacks] == [(1, "retry"), (2, "size")]
    assert max(one.peak_bytes for one in ordered) == 100
    assert team.ends[begun.id].outcome == "finished"
    assert team.asked.index("/plans") < team.asked.index("/runs")


def test_only_rank_0_hands_in(team, tmp_path):
    """For all ranks, whose steps its summaries add up."""
    first, second = make_whole_plans((8,) * 2, (0.5,) * 2, fingerprint=PRINT, made_at=3e9)
    Ledger.open().remember(second)
    assert outbox(tmp_path) == []
    Ledger.open().remember(first)
    wait_for(lambda: team.plans)
    assert [one.plan.rank for one in team.plans.values()] == [0]
    recorder = record(first)
    parts = [RankStep(rank=rank, samples=8, micro_batch_size=8, peak_bytes=100 + rank) for rank in range(2)]
    recorder(finished(0).model_copy(update={"ranks": tuple(parts)}))
    del recorder
    wait_for(lambda: team.ends)
    [run], [summary] = team.runs.values(), team.summaries.values()
    assert [(one.host, one.device) for one in run.ranks] == [("here", first.device.name)] * 2
    assert (summary.samples, summary.rank_peaks) == (16, (100, 101))


@contextmanager
def silent_port():
    """A server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def no_answer(handler):
    time.sleep(3)


def an_error(handler):
    handler.reply(500, b"<html>")


def no_json(handler):
    handler.reply(200, b"<html>it works</html>")


def another_json(handler):
    handler.reply(200, json.dumps([1, {"plans": 7}]).encode())


def deep_json(handler):
    handler.reply(200, b"[" * 100_000)


def wrong_plans(handler):
    """An answer of ours without a plan that can be read."""
    handler.reply(200, json.dumps({"plans": [7, {"target_batch": "\x1b"}, {"id": []}] * 3}).encode())


def endless(handler):
    """64 MiB."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" " * 2**16)


def slow(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def elsewhere(handler):
    handler.send_response(307)
    handler.send_header("Location", "http://127.0.0.1:9/api/v1/recall")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def nothing_at_all(handler):
    handler.close_connection = True


def garbage(handler):
    handler.wfile.write(b"\x00\xff no http\r\n" * 10)


TROUBLES = [
    *(no_answer, an_error, no_json, another_json, deep_json, wrong_plans, endless, slow, elsewhere, nothing_at_all),
    garbage,
]


def lines_of(caplog, team):
    """What was logged of this server; threads of other tests may still log of theirs."""
    return [line for line in caplog.messages if team.url in line]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_answer_breaks_a_recall(team, tmp_path, caplog, trouble):
    """Within the time, without an error, with one line; nothing that was to be handed in is lost."""
    team.trouble = trouble
    ledger = Ledger.open()
    began = time.monotonic()
    assert [*map(ledger.recall_from_team, (PRINT, PRINT))] == [[], []]
    assert time.monotonic() - began < 60
    assert len(lines_of(caplog, team)) == (trouble is not wrong_plans)
    assert ledger.remember(make_plan(fingerprint=PRINT))
    if trouble in (no_json, garbage, an_error, elsewhere, nothing_at_all, deep_json):
        wait_for(lambda: "/plans" in team.asked)
        assert outbox(tmp_path) == [f"plans.{PRINT}.a1.json"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid:8765", "https://127.0.0.1:9"])
def test_a_server_that_is_away_costs_one_line(tmp_path, monkeypatch, caplog, url):
    """Nothing is raised, all is stored here."""
    use(monkeypatch, tmp_path, url)
    ledger = Ledger.open()
    assert ledger.recall_from_team(PRINT) == []
    assert ledger.remember(make_plan(fingerprint=PRINT))
    record(make_plan(), finished(0))
    [line] = [line for line in caplog.messages if url in line]  # another test's server may still be found away
    assert "handed in later" in line
    assert TOKEN not in line
    assert [plan.id for plan in ledger.recall(PRINT)] == ["a1"]


@pytest.mark.parametrize(
    "url",
    ["autobatch", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a?token=x", "http://[", "file:///etc"],
)
def test_an_address_that_is_none_costs_one_line(tmp_path, monkeypatch, caplog, url):
    """It is not used."""
    use(monkeypatch, tmp_path, url)
    assert type(Ledger.open()) is type(Ledger.open()) is Ledger
    [line] = caplog.messages
    assert "AUTOBATCH_SERVER" in line


def test_a_token_with_a_line_break_is_refused(tmp_path, monkeypatch, caplog):
    """It would be another header."""
    use(monkeypatch, tmp_path, "http://127.0.0.1:9")
    monkeypatch.setenv("AUTOBATCH_TOKEN", "a\r\nHost: b")
    assert type(Ledger.open()) is Ledger
    assert "AUTOBATCH_TOKEN" in caplog.text


def test_what_was_not_handed_in_is_handed_in_later_once(team, tmp_path, monkeypatch):
    """By the next process; what the server took without an answer is handed in again under the same numbers."""

    def take_without_answer(handler):
        team.take(handler.path, team.bodies[-1])
        handler.close_connection = True

    team.trouble = take_without_answer
    courier = Courier(tmp_path, Server.named())
    Store(tmp_path).add_plan(make_plan(fingerprint=PRINT))
    courier.note_plan(make_plan(fingerprint=PRINT))
    with pytest.raises(ServerAway):
        courier.hand_in()
    assert list(team.plans) == ["a1"]
    team.trouble = None
    assert Courier(tmp_path, Server.named()).hand_in() == 0  # too young: its own process may be at it
    assert Courier(tmp_path, Server.named()).hand_in(everything=True) == 1
    assert (list(team.plans), outbox(tmp_path)) == (["a1"], [])


@pytest.mark.parametrize("kill_after", range(7))
def test_a_run_arrives_whole_whoever_hands_it_in(team, tmp_path, monkeypatch, kill_after):
    """Another process goes on after a kill at any request, and all summaries are those of one that was not killed."""
    events = [(0, finished(0)), (10, finished(1)), (40, retried(2)), (41, finished(2, retries=1)), (100, finished(3))]
    now = [1e9]
    monkeypatch.setattr("autobatch.ledger.run_recorder.time.time", lambda: now[0])
    monkeypatch.setattr("autobatch.ledger.run_recorder.time.monotonic", lambda: now[0])
    recorder = RunRecorder(make_plan(), Ledger(tmp_path))
    for at, event in events:
        now[0] = 1e9 + at
        recorder(event)
    del recorder
    monkeypatch.undo()
    use(monkeypatch, tmp_path, team.url)
    left = [kill_after]

    def die(handler):
        if left[0] == 0:
            raise OSError
        left[0] -= 1
        status, answer = team.take(handler.path, team.bodies[-1])
        handler.reply(status, json.dumps(answer).encode())

    courier = Courier(tmp_path, Server.named())
    courier.note_everything()
    team.trouble = die
    try:
        courier.hand_in(everything=True)
    except ServerAway:
        left[0] = -1
        Courier(tmp_path, Server.named()).hand_in(everything=True)
    assert outbox(tmp_path) == []
    [run] = team.runs
    assert [(one.number, one.steps, one.retries) for one in team.summaries.values()] == [
        *((0, 2, 0), (1, 2, 0), (2, 4, 1)),  # step 2 was written with step 3
    ]
    assert team.ends[run].outcome == "finished"


def test_live_summaries_are_those_of_the_whole_file(team, tmp_path, monkeypatch):
    """However often a growing file is read: another process that goes on has the same numbers for the same steps."""
    now = [1e9]
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: now[0])
    monkeypatch.setattr(Courier, "wake", lambda self: None)
    recorder = record(make_plan())
    [courier] = courier_module._couriers.values()
    for step in range(30):
        now[0] += 7 if step != 20 else 700
        recorder(retried(step) if step == 11 else finished(step))
        if step % 3 == 0:
            now[0] += 2
            courier.hand_in()
    del recorder
    courier.hand_in()
    [begun] = team.runs.values()
    [path] = tmp_path.glob("runs/*/*.jsonl")
    whole = wire.Summaries(begun)
    expected = [one for line in path.read_bytes().splitlines() for one in whole.add(Run.model_validate_json(line))]
    assert [one.model_copy(update={"cards": ()}) for one in team.summaries.values()] == [*expected, *whole.finish()]
    assert (expected[-1].retries, len(expected) > 5, outbox(tmp_path)) == (0, True, [])


def test_a_record_that_the_server_refuses_is_left_out(team, tmp_path, caplog):
    """It would be refused each time; those after it are handed in."""
    taken = team.take
    team.take = lambda path, body: (422, {"detail": "no\n"}) if b'"a1"' in body else taken(path, body)
    courier = Courier(tmp_path, Server.named())
    for plan in (make_plan("a1"), make_plan("a2")):
        Store(tmp_path).add_plan(plan)
        courier.note_plan(plan)
    assert courier.hand_in() == 1
    assert (list(team.plans), outbox(tmp_path)) == (["a2"], [])
    assert len(caplog.records) == 1


def page_of_a_proxy(handler):
    handler.send_response(422)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@pytest.mark.parametrize("status", [400, 403, 404, 413, 421, 500, 503, "a proxy", "another server"])
def test_an_answer_that_is_not_about_the_record_loses_nothing(team, tmp_path, status):
    """A wrong host, a wrong path and a proxy keep the mark; the next attempt hands it in."""
    courier = Courier(tmp_path, Server.named())
    Store(tmp_path).add_plan(make_plan())
    courier.note_plan(make_plan())
    marks = outbox(tmp_path)
    if status == "a proxy":
        team.trouble = page_of_a_proxy
    elif status == "another server":
        team.trouble = another_json
    else:
        team.trouble = lambda handler: handler.reply(status, b'{"detail": "no"}')
    with pytest.raises(ServerAway):
        courier.hand_in()
    assert outbox(tmp_path) == marks
    team.trouble = None
    assert courier.hand_in() == 1


def test_one_record_does_not_block_those_behind_it(team, tmp_path, caplog):
    """Neither one that the server fails on nor a mark that cannot be read; both are kept."""
    taken = team.take
    team.take = lambda path, body: (500, {"detail": "no"}) if b'"a1"' in body else taken(path, body)
    courier = Courier(tmp_path, Server.named())
    for name in ("a1", "a2"):
        Store(tmp_path).add_plan(make_plan(name))
        courier.note_plan(make_plan(name))
    (tmp_path / "outbox" / "predictions.0.json").mkdir()
    with pytest.raises(ServerAway, match=r"a1\.json: it answered 500"):
        courier.hand_in(everything=True)
    assert list(team.plans) == ["a2"]
    assert len(outbox(tmp_path)) == 2
    team.take = taken
    with pytest.raises(ServerAway, match=r"predictions\.0"):
        courier.hand_in(everything=True)
    assert list(team.plans) == ["a2", "a1"]


def test_a_damaged_mark_costs_itself(team, tmp_path, caplog):
    """Those after it are handed in."""
    courier = Courier(tmp_path, Server.named())
    Store(tmp_path).add_plan(make_plan("zz"))
    courier.note_plan(make_plan("zz"))
    for name in ("a.json", "runs.json", "plans.a.b.c.d.json", "predictions.p.json", "runs.a.b.json"):
        (tmp_path / "outbox" / name).write_bytes(b"\xff{")
    assert courier.hand_in(everything=True) == 1
    assert ([*team.plans], len(caplog.records)) == (["zz"], 1)
    assert outbox(tmp_path) == ["plans.a.b.c.d.json"]  # of a plan that may still be written


def test_a_wrong_token_loses_nothing(team, tmp_path, monkeypatch, caplog):
    """What was kept is handed in with the right one."""
    monkeypatch.setenv("AUTOBATCH_TOKEN", "abt_wrong")
    Ledger.open().remember(make_plan())
    wait_for(lambda: caplog.messages)
    assert "AUTOBATCH_TOKEN" in caplog.messages[0]
    monkeypatch.setenv("AUTOBATCH_TOKEN", TOKEN)
    assert Courier(tmp_path, Server.named()).hand_in(everything=True) == 1


def test_a_plan_that_was_forgotten_is_not_handed_in(team, tmp_path, monkeypatch):
    """Its mark goes when it is old; a young one may be of a plan that is just being written."""
    courier = Courier(tmp_path, Server.named())
    courier.note_plan(make_plan())
    assert (courier.hand_in(), len(outbox(tmp_path))) == (0, 1)
    monkeypatch.setattr(courier_module, "_FOREIGN_S", -1.0)
    assert (courier.hand_in(), outbox(tmp_path), team.asked) == (0, [], [])


PATIENT = """
from autobatch.ledger import courier
courier._END_S = 100.0  # a second may be too short where others use the machine
"""

STEPS = """
import os, sys
from ledgers import failed, finished, make_plan
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.run_recorder import RunRecorder
from autobatch.records import DeviceInfo
device = DeviceInfo(kind="cpu", name="CPU", total_bytes=9)
recorder = RunRecorder(make_plan(fingerprint="0123456789abcdef" * 2), Ledger.open(device))
for step in range(5):
    recorder(finished(step))
"""


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("", "finished"),
        ("sys.exit(3)", "finished"),
        ("raise SystemError", "finished"),
        ("recorder(failed('no memory'))", "failed"),
        ("del recorder", "finished"),
    ],
)
def test_the_end_of_a_process_is_handed_in(team, end, outcome):
    """A process that ends well waits a moment for it."""
    start_process(PATIENT + STEPS + end).communicate(timeout=200)
    [run] = team.runs
    assert (team.ends[run].outcome, team.summaries[run, 0].steps) == (outcome, 5)


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_killed_process_leaves_its_run_to_the_next(team, tmp_path, monkeypatch, end):
    """With the steps that the file has, and no end that nobody knows of."""
    start_process(f"{PATIENT}{STEPS}[one.end() for one in courier._couriers.values()]; {end}").communicate(timeout=200)
    [run] = team.runs
    assert not team.ends
    monkeypatch.setattr(courier_module, "_FOREIGN_S", -1.0)
    monkeypatch.setattr(courier_module, "_SILENT_S", -1.0)
    Courier(tmp_path, Server.named()).hand_in()
    assert team.summaries[run, 0].steps > 0
    assert (team.ends, outbox(tmp_path)) == ({}, [])


def test_a_server_that_hangs_does_not_hold_the_end_of_a_process(tmp_path, monkeypatch):
    """A second at most, once."""
    with silent_port() as url:
        use(monkeypatch, tmp_path, url)
        process = start_process(STEPS + "sys.stdout.write('done'); sys.stdout.flush()")
        assert process.stdout.read(4) == "done"
        began = time.monotonic()
        process.communicate(timeout=200)
        assert time.monotonic() - began < 60
    assert process.returncode == 0


def test_a_forked_child_hands_in_its_own(team):
    """The parent's thread is not in the child; a child that trains has a thread of its own."""
    program = f"""{PATIENT}{STEPS}
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside a thread
child = os.fork()
if child == 0:
    recorder(finished(100))
    mine = RunRecorder(make_plan("b1"), Ledger.open(device))
    mine(finished(7))
    del mine, recorder
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    _, errors = run_process(program)
    assert errors == ""
    assert {team.runs[run].plan_id: team.summaries[run, 0].steps for run in team.runs} == {"a1": 5, "b1": 1}


def test_the_end_of_a_process_waits_for_another_look(tmp_path, monkeypatch):
    """Whichever line the thread is at when the process ends: what was written last is looked for after that."""
    monkeypatch.setattr(courier_module, "_END_S", 100.0)
    lines = {line for _, _, line in Courier._work.__code__.co_lines() if line}
    for line in sorted(lines):
        courier, looks, is_there, begun = Courier(tmp_path, Server("http://127.0.0.1:9", "")), [], [], Event()
        courier._own["a plan"] = None

        def hand_in(courier=courier, looks=looks):
            is_ending = courier._is_ending
            time.sleep(0.01)
            looks.append(is_ending)

        monkeypatch.setattr(courier, "hand_in", hand_in)

        def trace(frame, event, _, line=line, is_there=is_there, begun=begun):
            if event == "line" and frame.f_lineno == line and not is_there:
                is_there.append(line)
                begun.set()
                time.sleep(0.02)  # the end begins meanwhile
            return trace if frame.f_code is Courier._work.__code__ else None

        threading.settrace(trace)
        courier.wake()
        threading.settrace(None)
        begun.wait(0.2)
        courier.end()
        assert looks[-1], line


def test_the_thread_imports_nothing(team):
    """A child that is forked during an import has half of that module for good."""
    program = f"""
import sys, threading
class Watch:
    late = []
    def find_spec(name, *_):
        if threading.current_thread() is not threading.main_thread():
            Watch.late.append(name)
sys.meta_path.insert(0, Watch)
{PATIENT}{STEPS}
[one.end() for one in courier._couriers.values()]
print(Watch.late)
"""
    assert run_process(program) == ("[]\n", "")
    assert len(team.runs) == 1


@pytest.mark.parametrize("error", [LookupError("unknown encoding: idna"), ImportError("half a module"), MemoryError()])
def test_no_record_is_lost_by_an_error_on_this_side(team, tmp_path, monkeypatch, error):
    """Only what the server refuses, or what is damaged, is left out."""
    Ledger.open().remember(make_plan(fingerprint=PRINT))
    wait_for(lambda: not outbox(tmp_path))
    courier = Courier(tmp_path, Server.named())
    courier.note_everything()

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fail)
        with pytest.raises(ServerAway):
            courier.hand_in(everything=True)
    assert len(outbox(tmp_path)) == 1
    assert courier.hand_in(everything=True) == 1


def test_of_an_error_only_the_type_is_handed_in(team, tmp_path, monkeypatch):
    """Its text may quote data; with the variable the first line too."""
    monkeypatch.setattr(courier_module, "_SILENT_S", -float("inf"))
    for name in ("", "1"):
        monkeypatch.setenv("AUTOBATCH_SHARE_PATHS", name)
        update = make_update(0, f"r{name}", 3, plan_id="a1", outcome="failed", reason="KeyError: 'Jane Doe'")
        add_run(Store(tmp_path), make_plan(), update)
        courier = Courier(tmp_path, Server.named())
        courier.note_everything()
        courier.hand_in(everything=True)
    assert {name: end.reason for name, end in team.ends.items()} == {"r": "KeyError", "r1": "KeyError: 'Jane Doe'"}


def test_several_processes_share_one_ledger(team, tmp_path):
    """Each hands in its own run, and nothing twice."""
    processes = [start_process(PATIENT + STEPS) for _ in range(4)]
    for process in processes:
        process.communicate(timeout=200)
    assert (len(team.runs), len(team.ends), list(team.plans), outbox(tmp_path)) == (4, 4, ["a1"], [])


def make(**changes):
    """What ``fit`` takes, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    arguments = {"model": model, "target_batch": 1024, "batch": torch.randn(1024, 64), "budget": "6MiB"}
    arguments |= {"step": lambda model, batch: model(batch).square().mean()}
    return {**arguments, "optimizer": torch.optim.AdamW(model.parameters()), **changes}


def test_a_plan_of_another_computer_is_confirmed_by_one_trial(team, tmp_path, monkeypatch, caplog):
    """The second computer searches nothing; its own plan is handed in too."""
    caplog.set_level(logging.INFO, "autobatch")
    first = autobatch.fit(**make())
    wait_for(lambda: team.plans)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "other"))
    second = autobatch.fit(**make())
    assert (len(second.trials), second.confirms) == (1, first.id)
    assert second.micro_batch_sizes == first.micro_batch_sizes
    wait_for(lambda: len(team.plans) == 2)
    assert any(f"plan {first.id}" in line for line in caplog.messages)
    autobatch.fit(**make(target_batch=512))
    team.asked.clear()
    assert len(autobatch.fit(**make(), reuse=False).trials) > 1
    assert "/recall" not in team.asked


def test_a_plan_that_does_not_hold_is_not_taken_over(team, tmp_path, caplog):
    """One trial refutes it, and the search begins."""
    caplog.set_level(logging.INFO, "autobatch")
    true = autobatch.fit(**make())
    wait_for(lambda: team.plans)
    lie = true.model_copy(update={"id": "lie", "peak_bytes": true.peak_bytes // 2, "curve": None})
    Store(tmp_path).forget(everything=True)
    team.answers["/recall"] = {"plans": [lie.model_dump(mode="json")]}
    found = autobatch.fit(**make())
    assert (found.confirms, found.micro_batch_sizes) == ("", true.micro_batch_sizes)
    assert any("plan lie of an earlier run is not reused" in line for line in caplog.messages)


@pytest.mark.parametrize("trouble", [no_answer, wrong_plans])
def test_no_server_breaks_a_fit_or_a_step(team, trouble, caplog):
    """Neither changes what they do."""
    team.trouble = trouble
    arguments = make()
    plan = autobatch.fit(**arguments)
    names = ("model", "step", "optimizer")
    runner = autobatch.Runner(plan, *(arguments[name] for name in names))
    for _ in range(3):
        assert runner.step(arguments["batch"]).retries == 0
    assert len(lines_of(caplog, team)) <= 1
