"""Rows that cannot be read are set aside, reported once, and hide no other."""

from __future__ import annotations

import json
import logging
import sqlite3

import pytest
from ledgers import make_plan, make_run, make_update

from autobatch.cli.main import main
from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Setback
from autobatch.ledger import database, reader
from autobatch.ledger.ledger import Ledger
from autobatch.ledger.store import Store


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch):
    """Begin as a process that has warned of nothing."""
    monkeypatch.setattr(database, "_warned", set())


@pytest.fixture
def path(tmp_path):
    """A ledger with three plans of one fingerprint, each with a run."""
    file = tmp_path / "ledger.sqlite3"
    with Store(file) as store:
        for name in ("aa", "bb", "cc"):
            setback = Setback(step=0, kind="size", old_size=8, new_size=4)
            store.add_plan(make_plan(name, model=f"Net {name}"))
            store.add_run(make_run(f"r-{name}", name, ranges=make_update(0).ranges, setbacks=(setback,)))
    return file


def damage(path, change):
    """Change the plan bb's row with SQL."""
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE plans SET {change} WHERE id = 'bb'")
    connection.close()


def set_aside(path):
    """What was set aside: kinds and names."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT kind, id FROM set_aside ORDER BY rowid").fetchall()
    connection.close()
    return rows


DAMAGES = {
    "no JSON": "content = 'nonsense'",
    "empty": "content = ''",
    "bytes": "content = x'00ff'",
    "no UTF-8": "content = CAST(x'7b22ff227d' AS TEXT)",
    "a number": "content = 5",
    "a wrong number": "content = json_set(content, '$.target_batch', -1)",
    "a huge number": "content = json_set(content, '$.target_batch', 1e300)",
    "a date that is none": "content = json_set(content, '$.made_at', 1e300)",
    "an id that forges a row": "content = json_set(content, '$.id', 'bb' || char(10) || 'cc')",
    "a field that is no longer known": "content = replace(content, 'target_batch', 'tarfet_batch')",
    "a field that is missing": "content = json_remove(content, '$.device')",
    "deep": "content = replace(hex(zeroblob(50000)), '0', '[')",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_is_set_aside_and_the_others_are_served(path, name, caplog):
    """To a search for the same step, to the list, by id; it is reported once, whatever asks again."""
    damage(path, DAMAGES[name])
    with caplog.at_level(logging.WARNING, "autobatch"):
        assert [plan.id for plan in Ledger(path.parent).recall("f1")] == ["cc", "aa"]
        with Store(path) as store:
            assert [plan.id for plan in store.plans()] == ["cc", "aa"]
            assert [plan.id for plan in store.plans(model="net")] == ["cc", "aa"]
            assert store.find_plan("a").id == "aa"
            assert [run.id for run in store.runs_of("cc")] == ["r-cc"]
            with pytest.raises(InvalidArgument, match="no plan has the id 'bb'"):
                store.find_plan("bb")
            store.add_plan(make_plan("dd"))
    assert len(caplog.records) == 1
    assert "plan bb in the ledger is not one that this version reads (" in caplog.text
    assert set_aside(path) == [("run", "r-bb"), ("plan", "bb")]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_is_named_where_it_is_asked_for(path, name):
    """The first time, with what is wrong."""
    damage(path, DAMAGES[name])
    with (
        Store(path) as store,
        pytest.raises(InvalidArgument, match=r"plan bb is not one that .* reads \(.*\): run fit"),
    ):
        store.find_plan("bb")


@pytest.mark.parametrize("change", [f"{column} = x'ff'" for column in ("fingerprint", "made_at")])
def test_a_damaged_column_beside_the_plan_hides_nothing(path, change):
    """The plan is in its content; what stands beside it is for finding it."""
    damage(path, change)
    with Store(path) as store:
        assert {plan.id for plan in store.plans()} == {"aa", "bb", "cc"}
        assert {"aa", "cc"} <= {plan.id for plan in store.plans_like("f1")}
        store.add_plan(make_plan("dd"))


RUN_DAMAGES = [
    "UPDATE runs SET outcome = 'finisjed' WHERE id = 'r-bb'",
    "UPDATE runs SET pid = 'x' WHERE id = 'r-bb'",
    "UPDATE runs SET started_at = 1e300 WHERE id = 'r-bb'",
    "UPDATE runs SET last_seen_at = -5 WHERE id = 'r-bb'",
    "UPDATE runs SET reason = CAST(x'ff' AS TEXT), pid = -1 WHERE id = 'r-bb'",
    "UPDATE ranges SET first_step = -1 WHERE run_id = 'r-bb'",
    "UPDATE ranges SET first_step = 9 WHERE run_id = 'r-bb'",
    "UPDATE ranges SET seconds = 'soon' WHERE run_id = 'r-bb'",
    "UPDATE setbacks SET kind = 'retrx' WHERE run_id = 'r-bb'",
    "UPDATE setbacks SET old_size = 0 WHERE run_id = 'r-bb'",
]


@pytest.mark.parametrize("statement", RUN_DAMAGES)
def test_a_damaged_run_is_set_aside_and_its_plan_is_served(path, statement, caplog):
    """With the plan's other runs."""
    with Store(path) as store:
        store.add_run(make_run("r-whole", "bb"))
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    for _ in range(2):
        with Store(path) as store:
            assert [run.id for run in store.runs_of("bb")] == ["r-whole"]
            assert store.find_plan("bb").id == "bb"
    assert set_aside(path) == [("run", "r-bb")]
    assert len(caplog.records) == 1


def test_what_is_set_aside_is_whole(path):
    """As it stood there, for whoever wants to mend it."""
    damage(path, "content = replace(content, '\"target_batch\":32', '\"target_batch\":-2')")
    with Store(path) as store:
        store.plans()
    connection = sqlite3.connect(path)
    [(run,), (plan,)] = connection.execute("SELECT content FROM set_aside ORDER BY rowid")
    connection.close()
    assert json.loads(plan)["target_batch"] == -2
    assert json.loads(run)["id"] == "r-bb"
    assert len(json.loads(run)["ranges"]) == len(json.loads(run)["setbacks"]) == 1


def test_a_good_plan_that_takes_the_row_meanwhile_stays(path, monkeypatch):
    """Another process forgets the damaged plan and stores it whole: SQLite gives it the number of the last row."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE plans SET content = 'nonsense' WHERE id = 'cc'")
    connection.close()

    def store_again(*_):
        with Store(path) as other:
            other.forget(["cc"])
            other.add_plan(make_plan("cc"))
            other.add_run(make_run("r-new", "cc"))

    monkeypatch.setattr(reader, "_warn_of_damage", store_again)
    with Store(path) as store:
        assert [plan.id for plan in store.plans()] == ["bb", "aa"]
        assert store.find_plan("cc") == make_plan("cc")
        assert [run.id for run in store.runs_of("cc")] == ["r-new"]
    assert set_aside(path) == []


def test_a_good_run_that_takes_the_row_meanwhile_stays(path, monkeypatch):
    """So with runs, whose plan is whole."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET pid = 'x' WHERE id = 'r-cc'")
    connection.close()

    def replace_it(*_):
        with sqlite3.connect(path) as other:
            other.execute("DELETE FROM runs WHERE id = 'r-cc'")
        other.close()
        with Store(path) as store:
            store.add_run(make_run("r-new", "cc"))

    monkeypatch.setattr(reader, "_warn_of_damage", replace_it)
    with Store(path) as store:
        assert store.runs_of("cc") == []
        assert [run.id for run in store.runs_of("cc")] == ["r-new"]
    assert set_aside(path) == []


@pytest.mark.parametrize("what", [{"everything": True}, {"older_than_seconds": 0}])
def test_forgetting_takes_what_is_set_aside(path, what):
    """Whoever wants everything gone wants that gone too."""
    damage(path, DAMAGES["no JSON"])
    with Store(path) as store:
        store.plans()
        store.forget(**what)
    assert set_aside(path) == []


def test_a_ledger_that_may_only_be_read_is_served_too(path, caplog):
    """What is damaged stays where it is."""
    damage(path, DAMAGES["no JSON"])
    with Store(path) as store:
        store._connection.execute("PRAGMA query_only = ON")
        assert [plan.id for plan in store.plans()] == ["cc", "aa"]
        assert [plan.id for plan in store.plans()] == ["cc", "aa"]
    assert len(caplog.records) == 1
    assert set_aside(path) == []


def test_any_flipped_byte_of_a_row_leaves_the_others(path, tmp_path):
    """In the file itself, anywhere in the plan's row: the other plans are served, and a new one can be written."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    whole = path.read_bytes()
    content = make_plan("bb", model="Net bb").model_dump_json().encode()
    start = whole.index(content)
    page = (start // 4096) * 4096
    assert start + len(content) < page + 4096
    columns = whole.rindex(b"bb", page, start) - 9  # the id and the header before it
    for position in [*range(columns, start), *range(start, start + len(content), 29)]:
        changed = bytearray(whole)
        changed[position] ^= 0x80
        home = tmp_path / f"home{position}"
        home.mkdir()
        (home / "ledger.sqlite3").write_bytes(changed)
        assert {"aa", "cc"} <= {plan.id for plan in Ledger(home).recall("f1")}, position
        with Store(home / "ledger.sqlite3") as store:
            assert {"aa", "cc"} <= {plan.id for plan in store.plans()}, position
        assert Ledger(home).remember(make_plan("dd")), position
        with Store(home / "ledger.sqlite3") as store:
            assert {"aa", "cc", "dd"} <= {plan.id for plan in store.plans()}, position


def test_the_list_of_plans_is_printed(path, capsys, monkeypatch):
    """Without the damaged one, which is reported on stderr, once."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(path.parent))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    damage(path, DAMAGES["an id that forges a row"])
    assert main(["plans"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["id", "cc", "aa"]
    assert printed.err.count("set aside") == 1
    monkeypatch.setattr(database, "_warned", set())  # as the next process would begin
    assert main(["plans"]) == 0
    assert capsys.readouterr().err == ""
