"""The ledger's files: written, found, deleted, by many at once and under kills."""

from __future__ import annotations

import os
import random
import resource
import stat
import time
from itertools import pairwise

import pytest
from ledgers import add_run, make_plan, make_run, make_update, names, start_process
from plans import make_whole_plans
from sampling import sample

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import RankTotal, Setback, StepRange
from autobatch.ledger import store as store_module
from autobatch.ledger.store import Store, plan_id, runs_id
from autobatch.records import DeviceInfo

pytestmark = pytest.mark.quick


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty ledger, in a process that has warned of nothing."""
    monkeypatch.setattr(store_module, "_warned", set())
    return Store(tmp_path / "home")


def make_ranks(size=3, **changes):
    plans = make_whole_plans((8,) * size, (0.5,) * size, fingerprint="f1", made_at=3e9, **changes)
    return [plan.model_copy(update={"model": "Net"}) for plan in plans]


def test_what_is_written_is_read_again(store):
    """A plan is equal to itself, and is there once however often it was stored."""
    for _ in range(2):
        store.add_plan(make_plan(warnings=("näh ✂",)))
    assert store.plans() == store.plans_like("f1") == [make_plan(warnings=("näh ✂",))]


def test_the_folder_is_the_users_own(tmp_path, store):
    """Nobody else may look in."""
    store.add_plan(make_plan())
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_each_plan_is_a_file_by_fingerprint_and_id(tmp_path, store):
    """As the documentation says, with no draft left."""
    add_run(store, make_plan("a1"), make_run("r1"))
    files = [str(path.relative_to(tmp_path / "home")) for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert sorted(files) == ["plans/f1/a1.json", "runs/a1/r1.jsonl"]


def test_plans_come_newest_first_and_are_chosen_by_parts_of_names(store):
    """Model and device in any case of letters; a part is enough, and % and _ are letters."""
    h100 = DeviceInfo(kind="cuda", name="NVIDIA H100", total_bytes=1)
    store.add_plan(make_plan("old", model="GPT"))
    store.add_plan(make_plan("mid", model="SmallGPT", device=h100))
    store.add_plan(make_plan("new", model="ResNet"))
    assert names(store.plans()) == ["new", "mid", "old"]
    assert names(store.plans(limit=2)) == ["new", "mid"]
    assert names(store.plans(model="gpt")) == ["mid", "old"]
    assert names(store.plans(model="gpt", device="l4")) == ["old"]
    assert names(store.plans(device="h1_0")) == names(store.plans(model="%")) == []


def test_the_clock_changes_neither_the_order_nor_what_is_kept(store, monkeypatch):
    """It is 500 days ahead, goes back and stands still: of a fingerprint the last stored is the newest."""
    monkeypatch.setattr(store_module, "_MOST_PLANS", 3)
    for name, moment in zip("abcde", (2e18, 2e18 + 4e16, 1e18, 1e18, 1e18), strict=True):
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: int(moment))
        store.add_plan(make_plan(name))
        assert names(store.plans_like("f1"))[0] == name
    assert names(store.plans()) == ["e", "d", "c"]


def test_of_many_plans_the_newest_of_each_fingerprint_are_kept_with_their_runs(tmp_path, store, monkeypatch):
    """A plan that a run uses again is new again."""
    monkeypatch.setattr(store_module, "_MOST_PLANS", 2)
    store.add_plan(make_plan("other", fingerprint="f2"))
    for name in "ab":
        add_run(store, make_plan(name), make_run(f"r{name}", name))
    add_run(store, make_plan("a"), make_run("again", "a"))
    store.add_plan(make_plan("c"))
    assert names(store.plans()) == ["c", "a", "other"]
    assert len(store.runs_of("a")) == 2
    assert {path.name for path in (tmp_path / "home" / "runs").iterdir()} == {"a"}


def test_plans_like_are_those_of_the_same_fingerprint(store):
    """Exactly the same; plans without one are like nothing."""
    for name, fingerprint in [("a", "f"), ("b", "f"), ("c", "F"), ("d", ""), ("e", "../f")]:
        store.add_plan(make_plan(name, fingerprint=fingerprint))
    assert names(store.plans_like("f")) == ["b", "a"]
    assert names(store.plans_like("../f")) == ["e"]
    assert store.plans_like("") == []


def test_a_plan_is_found_by_as_much_of_its_id_as_is_unique(store):
    """An exact id wins over longer ones; what is unknown or unclear names candidates."""
    for name in ("ab", "abc1", "abc2", "x"):
        store.add_plan(make_plan(name))
    assert [store.find_plan(wanted).id for wanted in ("ab", "abc1", "x")] == ["ab", "abc1", "x"]
    with pytest.raises(InvalidArgument, match=r"several plans begin with 'abc': abc2, abc1; give more"):
        store.find_plan("abc")
    with pytest.raises(InvalidArgument, match=r"several plans begin with 'a': .*, \.\.\."):
        store.add_plan(make_plan("abd"))
        store.find_plan("a")
    for wanted in ("z", "%", "", "abc1 ", "../x"):
        with pytest.raises(InvalidArgument, match=r"no plan has the id '.*'; the newest are abd, x, abc2"):
            store.find_plan(wanted)


def test_where_there_is_no_plan_the_message_says_how_to_get_one(store):
    """An empty ledger is no error of its own."""
    with pytest.raises(InvalidArgument, match=r"no plan is stored yet: run fit\(\)"):
        store.find_plan("a")
    assert store.plans() == store.runs_of("a") == []


@pytest.mark.parametrize("name", ["", "../../x", "a/b", "a.b", "x" * 300, "\x00"])
def test_a_plan_without_a_usable_id_gets_one(tmp_path, store, name):
    """Added twice it is there once, with an id and a date by which it can be found; no file is outside."""
    plan = make_plan().model_copy(update={"id": name, "made_at": 0.0})
    before = time.time()
    store.add_plan(plan)
    store.add_plan(plan)
    add_run(store, plan, make_run(plan=runs_id(plan)))
    [stored] = store.plans()
    assert before <= stored.made_at <= time.time()
    assert stored.id == plan_id(plan)
    assert store.find_plan(stored.id) == stored == plan.model_copy(update={"id": stored.id, "made_at": stored.made_at})
    assert len(store.runs_of(stored.id)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


DAMAGE = {
    "empty": b"",
    "half": make_plan().model_dump_json().encode()[:300],
    "another field": make_plan(version="9.1.0").model_dump_json()[:-1].encode() + b',"colour":"red"}',
    "not text": random.Random(0).randbytes(500),
    "not a plan": b"[1, 2]",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_costs_itself_and_one_log_line(tmp_path, store, caplog, content):
    """It hides no other plan, is not changed, can be forgotten, and is healed if its plan is stored again."""
    for name in "abc":
        store.add_plan(make_plan(name))
    for name in "bc":
        (tmp_path / "home" / "plans" / "f1" / f"{name}.json").write_bytes(content)
    assert names(store.plans(limit=1)) == names(store.plans()) == names(store.plans_like("f1")) == ["a"]
    assert len(caplog.records) == 1
    assert (tmp_path / "home" / "plans" / "f1" / "b.json").read_bytes() == content
    with pytest.raises(InvalidArgument, match=r"b\.json is not a plan that .* reads \(.*\); run fit\(\) again"):
        store.find_plan("b")
    assert store.forget(["b"]) == 1
    store.add_plan(make_plan("c"))
    assert names(store.plans()) == ["c", "a"]


def test_what_is_not_a_plan_of_ours_is_left_alone(tmp_path, store):
    """Folders, drafts of killed processes and other files, beside plans and above them."""
    store.add_plan(make_plan())
    folder = tmp_path / "home" / "plans"
    (folder / "f1" / "folder.json").mkdir()
    for name in ("a1.json.77.draft", "a.b.json", "notes.txt", "..json"):
        (folder / "f1" / name).touch()
    (folder / "README").touch()
    assert names(store.plans()) == ["a1"]
    assert store.find_plan("a1") == make_plan()


def test_a_run_is_read_as_it_was_written(store):
    """With all its ranges and setbacks in order, and newest first among others."""
    ranges = tuple(
        StepRange(first_step=n, last_step=n, micro_batch_size=n, seconds=0.1 * n, allowed_size=n) for n in range(12)
    )
    setbacks = tuple(Setback(step=n, kind="retry", old_size=n + 2, new_size=n + 1, reason=str(n)) for n in range(12))
    run = make_run(ranges=ranges, setbacks=setbacks, outcome="failed", reason="why")
    add_run(store, make_plan(), run)
    add_run(store, make_plan(), make_run("r2", started_at=4e9))
    assert store.runs_of("a1") == [make_run("r2", started_at=4e9), run]
    assert store.runs_of("a") == []


def test_updates_follow_each_other(store):
    """Steps of one size make one range, ranks and setbacks add up, the run's own fields are the last ones."""
    store.begin_run(make_plan())
    setbacks = tuple(Setback(step=1, kind="size", old_size=8, new_size=new) for new in (4, 2))
    like_the_first = StepRange(first_step=1, last_step=4, micro_batch_size=9, samples=128)
    store.update_run(make_update(0))
    store.update_run(make_run(line=1, ranges=(like_the_first,), setbacks=setbacks[:1]))
    store.update_run(make_update(5, steps=2, setbacks=setbacks[1:], ranks=(RankTotal(steps=1, retries=1),)))
    last = RankTotal(steps=2, peak_bytes=9)
    store.update_run(make_update(7, outcome="failed", reason="why", last_seen_at=6e9, ranks=(last,)))
    [run] = store.runs_of("a1")
    assert [(part.samples, part.micro_batch_size) for part in run.ranges] == [(160, 9), (64, 8), (32, 8)]
    assert run.setbacks == setbacks
    assert run.ranks == (RankTotal(steps=3, retries=1, peak_bytes=9),)
    assert (run.outcome, run.reason, run.last_seen_at, run.started_at) == ("failed", "why", 6e9, 3e9)


def test_a_line_that_is_written_again_counts_once(store):
    """The last of each number, which may have more in it."""
    store.begin_run(make_plan())
    for update in [make_update(0), make_update(1), make_update(1, steps=3), make_update(4)]:
        store.update_run(update)
    [run] = store.runs_of("a1")
    assert [(part.first_step, part.last_step) for part in run.ranges] == [(0, 0), (1, 3), (4, 4)]


@pytest.mark.parametrize(
    "content", [b'{"id": "r1"', b"\xff\xfe", b"[1]", b""], ids=["half", "no text", "list", "empty"]
)
def test_a_damaged_line_costs_itself(tmp_path, store, caplog, content):
    """The other lines of the run are read, and so are other runs; one log line."""
    store.begin_run(make_plan())
    store.update_run(make_update(0))
    with (tmp_path / "home" / "runs" / "a1" / "r1.jsonl").open("ab") as file:
        file.write(content + b"\n")
    store.update_run(make_update(1, outcome="finished"))
    (tmp_path / "home" / "runs" / "a1" / "r2.jsonl").write_bytes(content)
    [run] = store.runs_of("a1")
    assert (run.steps, run.outcome) == (2, "finished")
    assert len(caplog.records) == 1


def test_a_full_disk_leaves_whole_lines(tmp_path, store):
    """A line that does not fit is taken back, so the next one is not damaged too."""
    store.begin_run(make_plan())
    store.update_run(make_update(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "home" / "runs" / "a1" / "r1.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="No space"):
            store.update_run(make_update(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.update_run(make_update(1)) == "written"
    assert store.runs_of("a1")[0].steps == 2


@pytest.mark.parametrize(
    ("what", "gone", "left"),
    [
        ({"ids": ["a", "a", "b2"]}, 2, ["c"]),
        ({"ids": []}, 0, ["c", "b2", "a"]),
        ({"ids": iter(["b"])}, 1, ["c", "a"]),
        ({"older_than_seconds": 2.5e9}, 1, ["c", "b2"]),
        ({"older_than_seconds": 9e9}, 0, ["c", "b2", "a"]),
        ({"everything": True}, 3, []),
    ],
)
def test_forgetting_takes_plans_with_all_that_is_theirs(store, monkeypatch, what, gone, left):
    """Their runs go too; it returns how many plans are gone."""
    for name, moment in [("a", 4e18), ("b2", 5e18), ("c", 6e18)]:
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: int(moment))
        add_run(store, make_plan(name), make_run(f"r{name}", name))
    monkeypatch.setattr(time, "time_ns", lambda: int(7e18))
    assert store.forget(**what) == gone
    assert names(store.plans()) == left
    assert [len(store.runs_of(name)) for name in left] == [1] * len(left)
    assert len(list(store._runs.iterdir())) == len(left)


def test_forgetting_an_unknown_id_forgets_nothing(store):
    """All or none."""
    store.add_plan(make_plan("a"))
    with pytest.raises(InvalidArgument, match="no plan has the id 'z'"):
        store.forget(["a", "z"])
    assert names(store.plans()) == ["a"]


def test_a_run_of_a_forgotten_plan_is_not_written(tmp_path, store):
    """Its update says so, and makes no file."""
    store.begin_run(make_plan())
    store.forget(everything=True)
    assert store.update_run(make_update(0)) == "forgotten"
    assert [*(tmp_path / "home").rglob("*.json*")] == []


def test_ranks_are_one_plan_in_each_list(store):
    """The first one's; the others are found by their own ids and by their rank."""
    plans = make_ranks()
    for plan in (*plans, make_plan("other", fingerprint="f2")):
        store.add_plan(plan)
    assert names(store.plans()) == ["other", "a0"]
    assert [names(store.plans_like("f1", rank)) for rank in range(4)] == [["a0"], ["a1"], ["a2"], []]
    assert store.find_plan("a1") == plans[1]
    assert {runs_id(plan) for plan in plans} == {"a0"}


@pytest.mark.parametrize(
    "what", [{"ids": ["a0"]}, {"ids": ["a2", "a1"]}, {"older_than_seconds": 0.0}, {"everything": True}]
)
def test_forgetting_one_rank_forgets_all(tmp_path, store, what):
    """They are one plan."""
    for plan in make_ranks():
        store.add_plan(plan)
    add_run(store, make_ranks()[0], make_run(plan="a0"))
    time.sleep(0.001)
    assert store.forget(**what) == 1
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []


def test_ranks_are_counted_as_one_plan(store, monkeypatch):
    """The newest plans are kept with all their ranks."""
    monkeypatch.setattr(store_module, "_MOST_PLANS", 2)
    for name in "xyz":
        for plan in make_ranks():
            ranks = [one.model_copy(update={"plan_id": f"{name}{one.rank}"}) for one in plan.ranks]
            store.add_plan(plan.model_copy(update={"id": f"{name}{plan.rank}", "ranks": tuple(ranks)}))
    assert [names(store.plans_like("f1", rank)) for rank in range(3)] == [[f"z{rank}", f"y{rank}"] for rank in range(3)]


WRITE_MANY = """
import sys
from pathlib import Path
from ledgers import make_update, make_plan, make_run
from autobatch.ledger.ledger import Ledger
assert "torch" not in sys.modules
name, ledger = sys.argv[2], Ledger(Path(sys.argv[1]))
plan, run = make_plan(name), make_run(name, name)
assert ledger.begin_run(plan)
for number in range(50):
    assert ledger.remember(make_plan(f"{name}-{number}")), number
    assert ledger.update_run(make_update(number, name, plan_id=name)) == "written", number
"""


@pytest.mark.timeout(300)
def test_many_writers_lose_nothing(tmp_path):
    """They write plans of one fingerprint, and a run each; all are there."""
    writers = sample(range(18), 6)
    processes = [start_process(WRITE_MANY, tmp_path, f"w{number}") for number in writers]
    for process in processes:
        _, errors = process.communicate(timeout=280)
        assert (process.returncode, errors) == (0, "")
    store = Store(tmp_path)
    assert len(store.plans()) == len(writers) * 51
    for number in writers:
        [run] = store.runs_of(f"w{number}")
        assert [part.first_step for part in run.ranges] == list(range(50))


WRITE_ON = """
import itertools, sys
from pathlib import Path
from ledgers import make_update, make_plan, make_run
from autobatch.ledger.store import Store
name, store = sys.argv[2], Store(Path(sys.argv[1]))
print("ready", flush=True)
store.begin_run(make_plan(name))
for number in itertools.count():
    store.add_plan(make_plan(f"{name}-{number}"))
    print("plan", f"{name}-{number}", flush=True)
    assert store.update_run(make_update(number, name, plan_id=name)) == "written"
    print("update", number, flush=True)
"""


def kill_while_writing(path, name, count, delay_s):
    """Kill a writer so long after its first acknowledgements; return what it had acknowledged: plans and steps."""
    process = start_process(WRITE_ON, path, name)
    assert process.stdout.readline() == "ready\n"
    first = "".join(process.stdout.readline() for _ in range(count))
    time.sleep(delay_s)
    process.kill()
    lines = (first + process.stdout.read()).split("\n")[:-1]  # a line that was cut off by the kill does not count
    process.communicate()
    words = [line.split() for line in lines]
    return [word for kind, word in words if kind == "plan"], [int(word) for kind, word in words if kind == "update"]


@pytest.mark.timeout(300)
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path, caplog):
    """At any moment of several writers: all that they had reported can be read, and no file is damaged."""
    draw = random.Random(0)
    for number in sample(range(15), 4):
        name, count, delay_s = f"w{number}", draw.randrange(20), draw.uniform(0, 0.05)
        plans, steps = kill_while_writing(tmp_path / f"home{number // 3}", name, count, delay_s)
        assert len(plans) + len(steps) >= count
        store = Store(tmp_path / f"home{number // 3}")
        assert set(plans) <= set(names(store.plans())), delay_s
        stored = [part.first_step for run in store.runs_of(name) for part in run.ranges]
        assert stored[: len(steps)] == steps, delay_s
    assert caplog.records == []


def test_two_thousand_plans_are_listed_in_a_moment(store):
    """The newest twenty, wherever they are, for a part of what it takes to read all."""
    for number in range(2000):
        path = store._plans / f"f{number // 2}" / f"p{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_plan(f"p{number}").model_dump_json())
        os.utime(path, ns=(number, number))
    times = [time.thread_time()]
    for limit in (20, 2000):
        assert names(store.plans(limit=limit)) == [f"p{number}" for number in range(1999, 1999 - limit, -1)]
        times.append(time.thread_time())
    newest, every = (later - earlier for earlier, later in pairwise(times))
    assert newest < every / 2
