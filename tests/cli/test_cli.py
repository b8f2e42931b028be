"""The command line: what each command answers, as text and as JSON, how it ends, and what it imports."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path

import pytest
import torch
from ledgers import add_run, make_plan, make_run
from rich.console import Console
from sampling import sample
from torch import nn

import autobatch
from autobatch import Plan
from autobatch.cli import model_commands, output, plans
from autobatch.cli.main import main
from autobatch.prediction.cards import find_gpu

SOURCE = '''
import torch
from torch import nn
from torch.nn import functional as F

def make():
    """What fit takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    return {
        "model": model,
        "batch": (torch.randn(256, 64), torch.randint(4, (256,))),
        "step": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "budget": "16MiB",
    }

def normalised():
    """A step that does not split."""
    found = make()
    found["model"] = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    found["optimizer"] = torch.optim.SGD(found["model"].parameters(), lr=0.1)
    return found

def of_blocks():
    """A step whose blocks may be recomputed."""
    found = make()
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    found["model"] = nn.Sequential(*blocks)
    found["optimizer"] = torch.optim.SGD(found["model"].parameters(), lr=0.1)
    return found

def without_optimizer():
    found = make()
    del found["optimizer"], found["budget"]
    return found

def without_batch():
    return {"model": nn.Conv2d(3, 8, 3)}

def misspelt():
    return {**make(), "optimiser": None}

def needs_arguments(width):
    return make()

def returns_a_model():
    return nn.Linear(2, 2)

def fails():
    raise RuntimeError("the data is not there")

number = 3
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a user's module in it, and a ledger of its own."""
    (tmp_path / "train_it.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("train_it", None)


@pytest.fixture
def ask(capsys):
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*arguments):
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@cache
def predict_everything():
    """A prediction with all that one may ask for, made once."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return autobatch.predict(
        model, torch.zeros(2, 8), lambda m, b: m(b).mean(), gpu="L4", target_batch=64, what_if=True, all_cards=True
    )


@pytest.fixture
def predicted(monkeypatch):
    """Where it counts how an answer is printed, it is that one: each of its own would be traced for a second or six."""

    @wraps(autobatch.predict)
    def predict(*, gpu, what_if=False, **_):
        found = predict_everything()
        return found.model_copy(update={"gpu": find_gpu(gpu), "changes": found.changes if what_if else ()})

    monkeypatch.setattr(model_commands, "predict", predict)


@pytest.mark.usefixtures("here")
def test_a_day_with_it(ask):
    """Plan, look, compare, repeat: the second plan is confirmed by one trial, and all that was stored can be found."""
    code, text, _ = ask("fit", "train_it:make", "--target", "256")
    assert code == 0
    assert text.startswith("autobatch: 256 = ")
    code, text, _ = ask("fit", "train_it.py:make", "--target", "256", "--json")
    second = Plan.model_validate_json(text)
    assert (code, len(second.trials)) == (0, 1)

    code, text, _ = ask("plans")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["id", second.id]
    assert "Sequential" in text
    assert "1 x" in text
    [row] = json.loads(ask("plans", "--json")[1])
    assert (row["plan"]["id"], row["earlier"]) == (second.id, [second.confirms])
    assert ask("plans", "--model", "transformer")[1].startswith("no such plan is stored")

    code, text, _ = ask("show", second.id[:6])
    assert code == 0
    assert f"{second.micro_batch_size}" in text
    assert Plan.model_validate(json.loads(ask("show", second.id, "--json")[1])["plan"]) == second

    assert ask("diff", second.id, second.id)[0] == 0
    assert ask("diff", second.id, second.confirms)[0] == 1

    code, text, _ = ask("report", second.id)
    assert (code, text) == (0, f"written to autobatch-{second.id}.html\n")
    assert "<svg" in Path(f"autobatch-{second.id}.html").read_text()

    assert ask("forget", second.confirms)[:2] == (0, "1 plan forgotten\n")
    assert json.loads(ask("forget", "--all", "--json")[1]) == {"forgotten": 1}
    assert json.loads(ask("plans", "--json")[1]) == []


@pytest.mark.usefixtures("here")
def test_a_saved_plan_is_shown_compared_and_reported_by_its_file(ask):
    """Where no ledger has it too; --output - is the page itself."""
    assert ask("fit", "train_it:make", "--target", "256", "--save", "plan.json", "--no-reuse")[0] == 0
    plan = Plan.load("plan.json")
    ask("forget", "--all")
    assert str(plan.micro_batch_size) in ask("show", "plan.json")[1]
    assert ask("diff", "plan.json", "plan.json")[0] == 0
    assert ask("report", "plan.json", "-o", "-")[1].lstrip().lower().startswith("<!doctype html>")


@pytest.mark.quick
@pytest.mark.usefixtures("here")
def test_options_say_what_the_function_does_not(ask):
    """And what both say, the command line says."""
    code, text, _ = ask(
        *("fit", "train_it:make", "--target", "96", "--budget", "12MiB", "--headroom", "0.25"),
        *("--max-micro-batch", "32", "--objective", "memory", "--json"),
    )
    plan = Plan.model_validate_json(text)
    assert code == 0
    assert (plan.target_batch, plan.budget_bytes, plan.headroom_bytes) == (96, 12 * 2**20, 3 * 2**20)
    assert (plan.max_micro_batch, plan.objective) == (32, "memory")
    assert "Budget" in ask("fit", "train_it:make", "--target", "64", "--explain")[1]


@pytest.mark.usefixtures("here")
def test_strategies_are_allowed_by_an_option(ask):
    """The plan names the blocks that may be recomputed."""
    for options, blocks in (((), ()), (("--strategies", "auto"), ("0", "1", "2"))):
        code, text, _ = ask("fit", "train_it:of_blocks", "--target", "8", "--no-reuse", "--json", *options)
        assert code == 0
        assert Plan.model_validate_json(text).recomputable == blocks


@pytest.mark.quick
@pytest.mark.usefixtures("here")
def test_headroom_is_a_number_of_bytes_a_size_or_a_fraction(ask):
    """As ``fit`` takes it; anything else is refused in one line."""
    for given, headroom_bytes in (("1000000", 1000000), ("1MiB", 2**20), ("0.5", 6 * 2**20), ("0", 0)):
        asked = ("fit", "train_it:make", "--target", "8", "--budget", "12MiB", "--headroom", given, "--json")
        assert Plan.model_validate_json(ask(*asked)[1]).headroom_bytes == headroom_bytes
    for given in ("1.5", "nan", "1e6", "-1", "some", "", "9" * 5000):
        code, text, error = ask("fit", "train_it:make", "--target", "8", "--headroom", given)
        assert (code, text, error.count("\n")) == (2, "", 1)
        assert "headroom" in error


@pytest.mark.usefixtures("here")
def test_what_does_not_fit_ends_with_one(ask):
    """On stderr, or with --json on stdout."""
    code, text, error = ask("fit", "train_it:make", "--target", "256", "--budget", "100KiB")
    assert (code, text) == (1, "")
    assert "a micro-batch of 1 sample does not fit" in error
    code, text, error = ask("fit", "train_it:make", "--target", "256", "--budget", "100KiB", "--json")
    assert (code, error) == (1, "")
    assert json.loads(text)["error"] == "DoesNotFit"


@pytest.mark.usefixtures("here")
def test_verify_says_which_step_is_exact(ask):
    """0 and 1; the cause is named."""
    assert ask("verify", "train_it:make")[0] == 0
    code, text, _ = ask("verify", "train_it:normalised")
    assert code == 1
    assert "BatchNorm" in text
    assert json.loads(ask("verify", "train_it:normalised", "--json")[1])["exact"] is False


@pytest.mark.predicts
@pytest.mark.usefixtures("here")
def test_predict_answers_for_one_card_or_all(ask):
    """With no card here; a plan from it is marked, and what would help comes where it was asked for."""
    code, text, _ = ask("predict", "train_it:make", "--target", "4096", "--gpu", "L4", "--save", "plan.json")
    assert code == 0
    assert text.startswith("autobatch: predicted on L4: 4096 = ")
    assert "What would help" not in text
    assert Plan.load("plan.json").predicted
    code, text, _ = ask("predict", "train_it:without_optimizer", "--target", "4096", "--all", "--what-if")
    assert code == 0
    words = {word for line in text.splitlines() for word in line.split()}
    assert {"T4", "B200", "RTX", "GB200", "MI355X", "help", "autocast"} <= words


@pytest.mark.predicts
@pytest.mark.usefixtures("here", "predicted")
def test_predict_answers_for_several_cards(ask):
    """In the order in which they were named."""
    code, text, _ = ask("predict", "train_it:make", "--target", "64", "--gpu", "T4", "24GiB", "--json")
    assert code == 0
    assert [prediction["gpu"]["name"] for prediction in json.loads(text)] == ["T4", "24.0 GiB card"]


@pytest.mark.predicts
@pytest.mark.usefixtures("here", "predicted")
@pytest.mark.parametrize(
    "options", [["--gpu", "L4"], ["--gpu", "L4", "T4"], ["--all"], ["--gpu", "L4", "--explain"]], ids=" ".join
)
def test_what_would_help_is_printed_where_it_was_asked_for(ask, options):
    """Below each answer, in each form; nothing of it without --what-if."""
    asked = ("predict", "train_it:make", "--target", "64", *options)
    code, text, _ = ask(*asked, "--what-if")
    assert code == 0
    titles = [line for line in text.splitlines() if line.startswith("What would help")]
    assert len(titles) == (2 if "T4" in options else 1)
    assert text.count("bfloat16 autocast") == len(titles)
    if "--explain" not in options:
        assert "What would help" not in ask(*asked)[1]


@pytest.mark.predicts
@pytest.mark.usefixtures("here", "predicted")
def test_the_table_of_all_cards_fits_a_narrow_terminal(ask, monkeypatch):
    """No row is broken; each part of the table names the cards again."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(output, "_WIDE", 40)
    text = ask("predict", "train_it:make", "--target", "64", "--all")[1]
    rows = [line for line in text.splitlines() if line.startswith(("L4", "T4", "card"))]
    assert max(map(len, rows)) <= 40
    assert sum("card" in line for line in rows) > 1
    assert "micro-batch" in text


@pytest.mark.predicts
@pytest.mark.usefixtures("here")
def test_which_of_several_cards_was_meant_is_printed(ask):
    """With the prediction for the commonest."""
    code, text, _ = ask("predict", "train_it:make", "--target", "64", "--gpu", "H100")
    assert code == 0
    assert "! gpu='H100' is taken for the commonest of that name: H100-80GB; also H100-94GB" in text


WRONG = {
    "no module": (("fit", "nowhere:make", "--target", "8"), "no module 'nowhere' here"),
    "no module but a dotted folder": (("fit", "train_it./:make", "--target", "8"), "no module 'train_it./' here"),
    "no module but a dot": (("fit", "train_it.:make", "--target", "8"), "no module 'train_it.' here"),
    "no file": (("fit", "nowhere.py:make", "--target", "8"), "no file nowhere.py"),
    "no function": (("fit", "train_it:mak", "--target", "8"), "'train_it:mak': train_it has no function mak"),
    "no callable": (("fit", "train_it:number", "--target", "8"), "train_it has no function number"),
    "no colon": (("fit", "train_it", "--target", "8"), "'train_it' is not MODULE:FUNCTION, such as train:make"),
    "arguments": (("fit", "train_it:needs_arguments", "--target", "8"), "takes arguments: name a function that can"),
    "no dict": (("fit", "train_it:returns_a_model", "--target", "8"), "return a dict such as {'model': model"),
    "unknown key": (("fit", "train_it:misspelt", "--target", "8"), "returned 'optimiser'; known are model,"),
    "no target": (("fit", "train_it:make"), "say --target: 'train_it:make' returned no 'target_batch'"),
    "a target of 0": (
        ("fit", "train_it:make", "--target", "0"),
        "--target='0' must be at least 1",
    ),
    "no batch": (("fit", "train_it:without_batch", "--target", "8"), "Conv2d"),
    "nothing to verify": (("verify", "train_it:without_batch"), "returned no 'batch'"),
    "no card": (
        ("predict", "train_it:make"),
        "no CUDA card here: name one as --gpu H100-80GB, or its memory as --gpu 24GiB, or ask for --all",
    ),
    "unknown card": (("predict", "train_it:make", "--gpu", "L5"), "gpu='L5' is not known"),
    "two plans in a file": (("predict", "train_it:make", "--gpu", "L4", "T4", "--save", "x"), "2 cards were named"),
    "unknown plan": (("show", "0123"), "no plan has the id '0123'"),
    "no such file": (("show", "nothing.json"), "no file nothing.json"),
    "nothing to forget": (("forget",), "forget takes ids, --older-than DAYS or --all: one of them"),
    "two ways to forget": (("forget", "--all", "--older-than", "3"), "one of them"),
    "no plans at all": (("plans", "--limit", "0"), "--limit='0' must be at least 1"),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", WRONG)
def test_misuse_ends_with_two_and_says_what_to_do(ask, name):
    """One line, no traceback."""
    arguments, message = WRONG[name]
    code, text, error = ask(*arguments)
    assert (code, text) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1


OTHERS_WORDS = re.compile("Input should|Value error|Field required|Extra inputs|unable to parse|Invalid")

BAD_VALUES = [
    *((*command, value) for value in ("x", "", "0", "-5", "1.5", "1e3", "nan") for command in (
        ("plans", "--limit"),
        ("fit", "train_it:make", "--target"),
        ("fit", "train_it:make", "--target", "8", "--max-micro-batch"),
        ("predict", "train_it:make", "--gpu", "L4", "--world-size"),
    )),
    *(("fit", "train_it:make", "--target", "8", "--budget", value) for value in ("x", "", "0", "-5", "5%", "nan")),
    *(("fit", "train_it:make", "--target", "8", "--headroom", value) for value in ("x", "", "-5", "1.5", "5%", "nan")),
    *(("predict", "train_it:make", "--gpu", "L4", "--margin", value) for value in ("x", "", "-5", "1.5", "5%", "nan")),
    *(("gate", "train_it:make", "--gpu", "L4", "--limit", value) for value in ("x", "", "0", "-5", "5%", "nan")),
    *(("forget", "--older-than", value) for value in ("x", "", "0", "-5", "nan", "inf")),
    *(("predict", "train_it:make", "--gpu", value) for value in ("x", "", "0GiB", "24")),
    ("fit", "train_it:make", "--objective", "speed"),
    ("predict", "train_it:make", "--data-parallel", "zero"),
]  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", BAD_VALUES, ids=" ".join)
def test_a_bad_value_is_named_in_our_own_words(ask, command):
    """In one line with the option and the value; not in those of the library that reads it."""
    code, text, error = ask(*command)
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert command[-2].lstrip("-").replace("-", "_") in error.replace("-", "_").replace("target_batch", "target")
    assert command[-1].removesuffix(".0") in error
    assert not OTHERS_WORDS.search(error), error


BAD_FILES = {
    "no JSON": lambda text: "{bad",
    "nothing": lambda text: "",
    "half a plan": lambda text: text[:200],
    "something else": lambda text: '{"a": 1}',
    "a list": lambda text: "[]",
    "a negative number": lambda text: text.replace('"target_batch":32', '"target_batch":-3'),
    "a text for a number": lambda text: text.replace('"target_batch":32', '"target_batch":"32"'),
    "a field more": lambda text: text.replace('{"target_batch"', '{"more":1,"target_batch"'),
    "a text for a list": lambda text: text.replace('"micro_batch_sizes":[', '"micro_batch_sizes":"x","old":['),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_plan_file_is_refused_in_our_own_words(here, ask, name):
    """In one line, which names the file."""
    content = BAD_FILES[name](make_plan("a1").model_dump_json())
    (here / "plan.json").write_text(content)
    code, text, error = ask("show", "plan.json")
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert "plan.json is not a plan that this version reads" in error
    assert not OTHERS_WORDS.search(error), error


@pytest.mark.usefixtures("here")
def test_what_the_users_own_code_raises_is_no_answer(ask):
    """Another exit code than that of "does not fit", and its own traceback."""
    code, text, error = ask("fit", "train_it:fails", "--target", "8")
    assert (code, text) == (70, "")
    assert "in fails" in error
    assert error.splitlines()[-1] == "RuntimeError: the data is not there"


def test_a_module_that_the_users_own_misses_is_named(here, ask):
    """The user's module is there; what it imports is not, and that is another thing."""
    (here / "broken_it.py").write_text("import nothing_of_that_name\n")
    code, _, error = ask("fit", "broken_it:make", "--target", "8")
    assert code == 70
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in error


@pytest.mark.usefixtures("here")
def test_a_ledger_that_is_off_or_broken_is_reported(ask, monkeypatch):
    """Whoever asks for it should know; a saved plan can be looked at all the same."""
    ask("fit", "train_it:make", "--target", "64", "--save", "plan.json")
    monkeypatch.setenv("AUTOBATCH_LEDGER", "off")
    assert "AUTOBATCH_LEDGER turns the ledger off" in ask("plans")[2]
    assert ask("show", "plan.json")[0] == 0
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    monkeypatch.setenv("AUTOBATCH_HOME", "plan.json")
    assert ask("show", "plan.json")[0] == 0
    assert "plans cannot be stored" in ask("doctor")[1]


HOMES = {
    "a file": lambda folder: (folder / "x.txt").write_text(""),
    "a folder in a file": lambda folder: (folder / "x.txt").write_text(""),
    "a link to itself": lambda folder: (folder / "x.txt").symlink_to("x.txt"),
}


@pytest.mark.parametrize("command", ["plans", "show a1", "diff a1 b2", "report a1", "forget --all", "push", "serve"])
@pytest.mark.parametrize("name", HOMES)
def test_a_home_that_cannot_be_used_is_refused_in_one_line(here, ask, monkeypatch, name, command):
    """As any misuse: 1 would be an answer, such as "the plans differ"."""
    HOMES[name](here)
    monkeypatch.setenv("AUTOBATCH_HOME", "x.txt/inside" if "in a" in name else "x.txt")
    monkeypatch.setenv("AUTOBATCH_SERVER", "http://127.0.0.1:9")
    code, text, error = ask(*command.split())
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert "x.txt" in error
    assert "AUTOBATCH_HOME" in error


@pytest.mark.usefixtures("here")
def test_verbose_says_what_happens_on_the_way(ask):
    """Each trial on stderr; the answer itself stays alone on stdout, and the next command is silent again."""
    _, text, error = ask("fit", "train_it:make", "--target", "64", "--verbose", "--json")
    assert Plan.model_validate_json(text)
    assert "autobatch: trial of " in error
    assert ask("fit", "train_it:make", "--target", "64")[2] == ""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "own_logging", sample(["", "logging.basicConfig(level=logging.DEBUG)", "logging.basicConfig()"], 3)
)
def test_no_line_is_there_twice(own_logging, here, tmp_path):
    """On a terminal, where progress is shown too, and whatever logging the user's own module sets up on import."""
    source = (here / "train_it.py").read_text()
    (here / "train_it.py").write_text(f"import logging\n{own_logging}\n{source}")
    main, terminal = os.openpty()
    command = [sys.executable, "-m", "autobatch", "fit", "train_it:make", "--target", "64", "--verbose", "--no-reuse"]
    ran = subprocess.Popen(command, stdout=terminal, stderr=terminal, cwd=here)
    os.close(terminal)
    text = b""
    with suppress(OSError):  # the end, on Linux
        while part := os.read(main, 4096):
            text += part
    os.close(main)
    assert ran.wait() == 0
    ours = [line for line in text.decode().splitlines() if "autobatch" in line]
    trials = [line for line in ours if "trial of " in line]
    assert len(trials) == len(set(trials)) == len({line.partition("trial of ")[2].split()[0] for line in trials}) > 0
    assert len([line for line in ours if "64 = " in line]) == 1
    assert not [line for line in ours if line.count("autobatch:") > 1]


def test_a_plan_of_another_version_is_reported_and_left_out(here, ask, monkeypatch):
    """On stderr, so that nobody takes it for gone."""
    monkeypatch.setattr("autobatch.ledger.store._warned", set())
    ask("fit", "train_it:make", "--target", "64")
    [path] = (here / "home" / "plans").rglob("*.json")
    path.write_text(path.read_text().replace('"target_batch": 64', '"target_batch": "many"'))
    code, text, error = ask("plans", "--json")
    assert (code, json.loads(text)) == (0, [])
    assert "is not one that this version reads (target_batch='many' must be" in error


@pytest.mark.usefixtures("here")
def test_warnings_of_a_plan_are_said_once(ask):
    """In the answer, and not on stderr as well."""
    _, text, error = ask("fit", "train_it:normalised", "--target", "64", "--budget", "2MiB", "--max-micro-batch", "16")
    assert "BatchNorm" in text
    assert error == ""


@pytest.mark.quick
@pytest.mark.usefixtures("here")
def test_devices_shows_the_hosts_memory(ask):
    """Also on a machine without a card."""
    code, text, _ = ask("devices")
    assert code == 0
    assert text.splitlines()[-1].startswith("CPU")
    data = json.loads(ask("devices", "--json")[1])
    assert data["cpu"]["total_bytes"] > data["cpu"]["available_bytes"] > 0


def start(*arguments, **environment):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",  # where a test asks for another encoding
        timeout=200,
        check=False,
    )


def test_looking_imports_no_torch(here, ask):
    """Nor does asking for help with any command."""
    ask("fit", "train_it:make", "--target", "64", "--save", "plan.json")
    commands = [["plans"], ["show", "plan.json"], ["diff", "plan.json", "plan.json"], ["report", "plan.json"]]
    commands += [["devices"], ["doctor"], ["--help"], ["plans", "--help"]]
    program = (
        "import sys\nfrom autobatch.cli.main import main\n"
        f"for command in {commands!r}:\n"
        "    try: main(command)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = start("-c", program, AUTOBATCH_HOME=str(here / "home"), AUTOBATCH_LEDGER="on")
    assert done.returncode == 0, done.stderr


def time_best(*arguments, **environment):
    """Seconds of computing that such a process takes, the best of three: others use the machine too."""

    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(3):
        before = spent()
        start(*arguments, **environment)
        seconds.append(spent() - before)
    return min(seconds)


RECORDS = "import pydantic\nclass Record(pydantic.BaseModel): size: int"


@pytest.mark.slow
@pytest.mark.quick
def test_help_answers_at_once():
    """In less than four times what pydantic takes to start: a ratio, as this machine may be slow just now."""
    assert time_best("-m", "autobatch", "--help") < 4 * time_best("-c", RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["plans"], ["show", "plan.json"], ["devices"], ["doctor"]], ids=" ".join)
def test_looking_takes_little_more_than_importing_pydantic(command, here, ask):
    """Less than six times as long, mostly for our records, typer and rich; with torch, twelve times and more."""
    ask("fit", "train_it:make", "--target", "64", "--save", "plan.json")
    ledger = {"AUTOBATCH_HOME": str(here / "home"), "AUTOBATCH_LEDGER": "on"}
    assert time_best("-m", "autobatch", *command, **ledger) < 6 * time_best("-c", RECORDS)


def test_it_runs_as_a_module_and_as_a_command():
    """Both say the version; without a command both say how to use it, and end with 2."""
    script = Path(sys.executable).with_name("autobatch")
    for program in (["-m", "autobatch"], [str(script)] if script.exists() else ["-m", "autobatch"]):
        assert start(*program, "--version").stdout.startswith("autobatch ")
        assert start(*program).returncode == 2


def test_a_reader_that_has_seen_enough_is_no_error(here):
    """As with ``autobatch devices | true``: nothing is printed on stderr."""
    program = f"sleep 0.2 | {shlex.quote(sys.executable)} -m autobatch devices --json | true"
    done = start("-c", f"import subprocess, sys; sys.exit(subprocess.run({program!r}, shell=True).returncode)")
    assert done.stderr == ""


PRINTS = """
from train_it import make as make_quietly

def make():
    print("loading my data")
    return make_quietly()
"""


@pytest.mark.parametrize("command", sample([("fit", "--target", "64"), ("predict", "--gpu", "L4"), ("verify",)], 3))
def test_what_the_users_code_prints_is_no_part_of_the_json(here, ask, command):
    """It goes to stderr; without --json it stays where the user put it."""
    (here / "prints_it.py").write_text(PRINTS)
    _, text, error = ask(command[0], "prints_it:make", *command[1:], "--json")
    json.loads(text)
    assert "loading my data" in error
    assert "loading my data" in ask(command[0], "prints_it:make", *command[1:])[1]
    sys.modules.pop("prints_it")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "command", [("fit", "train_it:make", "--target", "64"), ("predict", "train_it:make", "--gpu", "L4")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(ask, command):
    """No plan is made, and no traceback is printed."""
    code, text, error = ask(*command, "--save", "nowhere/plan.json")
    assert (code, text) == (2, "")
    assert "--save 'nowhere/plan.json': no file can be written there" in error
    assert json.loads(ask("plans", "--json")[1]) == []


@pytest.mark.predicts
@pytest.mark.usefixtures("here", "predicted")
def test_the_function_may_follow_the_cards(ask):
    """As it does in the help; --all and --gpu exclude each other."""
    assert ask("predict", "--gpu", "L4", "T4", "train_it:make")[1].count("predicted on") == 2
    assert ask("predict", "--gpu", "L4", "--gpu", "T4", "--target", "8", "train_it:make")[0] == 0
    assert "pass MODULE:FUNCTION" in ask("predict", "--gpu", "L4")[2]
    assert ask("predict", "--gpu", "L4", "--all", "train_it:make")[0] == 2


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("days", ["-1", "0", "nan", "inf"])
def test_what_is_no_age_forgets_nothing(ask, days):
    """A sign that slipped in must not delete all there is."""
    ask("fit", "train_it:make", "--target", "64")
    code, _, error = ask("forget", "--older-than", days)
    assert code == 2
    assert "must be a number of days above 0" in error
    assert len(json.loads(ask("plans", "--json")[1])) == 1


READS_ARGUMENTS = """
import argparse
from train_it import make as make_it
options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=8)
width = options.parse_args().width

def make():
    return make_it()
"""


def test_a_script_that_reads_its_arguments_is_not_given_ours(here, ask):
    """As training scripts do when they are imported; its defaults hold, and ours are there again afterwards."""
    (here / "reads_it.py").write_text(READS_ARGUMENTS)
    before = list(sys.argv)
    assert ask("fit", "reads_it:make", "--target", "64", "--json")[0] == 0
    assert sys.argv == before
    sys.modules.pop("reads_it")


@pytest.mark.slow
def test_what_a_child_of_the_users_code_prints_is_no_part_of_the_json(here):
    """Nor what a library writes to the file descriptor itself."""
    (here / "loud_it.py").write_text(
        "import os\nos.write(1, b'raw\\n')\nos.system('echo child')\nfrom train_it import make\n"
    )
    done = start("-m", "autobatch", "fit", "loud_it:make", "--target", "64", "--json", AUTOBATCH_LEDGER="off")
    assert Plan.model_validate_json(done.stdout)
    assert {"raw", "child"} <= {*done.stderr.split()}


@pytest.mark.usefixtures("here")
def test_two_searches_that_found_the_same_do_not_differ(ask):
    """Names, dates and durations are each plan's own."""
    ids = [
        Plan.model_validate_json(ask("fit", "train_it:make", "--target", "64", "--no-reuse", "--json")[1]).id
        for _ in range(2)
    ]
    code, text, _ = ask("diff", *ids)
    assert (code, text.splitlines()[1:]) == (0, ["nothing else differs"])


@pytest.mark.usefixtures("here")
def test_a_list_that_was_cut_says_so(ask):
    """With what shows the rest."""
    ask("fit", "train_it:make", "--target", "64")
    ask("fit", "train_it:make", "--target", "64", "--no-reuse")
    assert ask("plans", "--limit", "1")[1].splitlines()[-1] == "the newest 1 of 2; --limit shows more"
    assert "shows more" not in ask("plans")[1]


@pytest.mark.usefixtures("here")
def test_a_ledger_that_is_turned_off_is_no_trouble(ask, monkeypatch):
    """Somebody wanted it so."""
    monkeypatch.setenv("AUTOBATCH_LEDGER", "off")
    assert "fine    plans are not stored: AUTOBATCH_LEDGER turns that off" in ask("doctor")[1]


@pytest.mark.quick
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["fit", "train_it:make", "--target", "many"], "--target"),
        (["fit", "--target", "8"], "Missing argument"),
        (["plans", "--colour"], "--colour"),
        (["predict", "--gpu", "L4", "--all", "train_it:make"], "not allowed with"),
        (["plan"], "plan"),
        ([], "see autobatch"),
    ],
)
def test_a_command_line_that_means_nothing_ends_in_one_line(ask, command, why):
    """With exit code 2 and where to read more; and as JSON for who asked for that."""
    code, said, error = ask(*command)
    assert (code, said) == (2, "")
    assert why in error
    assert "--help" in error
    code, said, error = ask(*command, "--json")
    assert (code, error) == (2, "")
    assert why in json.loads(said)["message"]


@pytest.mark.usefixtures("here")
def test_a_name_cannot_steer_the_terminal(ask):
    """Whoever may write a plan file may not clear the screen of who looks at it, nor may the model's own name."""
    name = "Net\x1b[2J\x9b31m\x07\x00"
    with plans.open_store() as store:
        store.add_plan(make_plan("a1", model=name))
    said = ask("show", "a1")[1]
    assert "Net\\x1b[2J\\x9b31m\\x07\\x00" in said
    plan = make_plan()
    plan.model_copy(update={"device": plan.device.model_copy(update={"name": name})}).save("steering.json")
    code, shown, refused = ask("show", "steering.json")
    assert (code, shown) == (2, "")
    assert "device.name: a text with a line break or another control character" in refused
    said += refused
    assert not [letter for letter in said if letter != "\n" and not letter.isprintable()]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_word_of_a_table_is_broken(width):
    """Columns that do not fit the terminal follow below, with the first column again."""
    row = ("a1b2c3d4e5f6", "2026-09-21 14:13", "ResNet", "NVIDIA L4", "256 = 6 x 43", "18.7 GiB", "2 x", "3: 120 steps")
    headings = ("id", "made", "model", "device", "plan", "peak", "confirmed", "runs")
    drawn = io.StringIO()
    for table in output.Table([row], headings, right={5}).fit(width):
        Console(file=drawn, width=width).print(table)
    lines = drawn.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert {word for cell in (*row, *headings) for word in cell.split()} == {*drawn.getvalue().split()}
    assert len(lines) == 2 or width < 120


def test_a_ledger_that_can_only_be_read_is_reported(here):
    """Opening it is not enough: whatever is found would not be stored."""
    with plans.open_store() as store:
        store.add_plan(make_plan())
    assert plans.find_fault() == (str(here / "home"), "")
    with short_files(0):
        place, fault = plans.find_fault()
    assert place == str(here / "home")
    assert "too large" in fault


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("source", [".:make", "..:make", ".train_it:make"])
def test_a_name_that_begins_with_a_dot_is_no_module(ask, source):
    """Nothing that it could be relative to is known."""
    code, _, error = ask("fit", source, "--target", "4")
    assert code == 2
    assert "is not MODULE:FUNCTION" in error


@contextmanager
def short_files(most_bytes):
    """While this lasts, no file may be longer: as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_plan_that_cannot_be_written_is_reported_and_leaves_nothing(here, ask, monkeypatch):
    """With what it was, and without half a file beside it; a dash is no file's name."""
    assert "name a file" in ask("fit", "train_it:make", "--target", "8", "--save", "-")[2]
    (here / "old.json").write_text("{}")
    monkeypatch.setenv("AUTOBATCH_LEDGER", "off")
    with short_files(512):
        code, _, error = ask("fit", "train_it:make", "--target", "8", "--save", "old.json")
    assert code == 2
    assert "--save old.json cannot be written" in error
    assert "8 = 1 x 8 on CPU" in error
    assert (here / "old.json").read_text() == "{}"
    assert not [*here.glob("*.draft")]


@pytest.mark.parametrize("command", sample([["plans"], ["plans", "--json"]], 3), ids=" ".join)
@pytest.mark.parametrize(
    ("stdout", "said"), [(">/dev/full", "the answer cannot be written"), (">&-", "closed"), (">/dev/null", "")]
)
def test_an_answer_that_nobody_can_read_ends_with_2(here, command, stdout, said):
    """And one line, where there is a stderr; 1 would be an answer."""
    line = f"exec {shlex.quote(sys.executable)} -m autobatch {' '.join(command)} {stdout}"
    environment = {**os.environ, "AUTOBATCH_HOME": str(here / "home"), "AUTOBATCH_LEDGER": "on"}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == (2 if said else 0)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1
    if said == "the answer cannot be written":
        assert said in done.stderr


@pytest.mark.predicts
@pytest.mark.usefixtures("here", "predicted")
def test_what_a_prediction_warns_of_is_printed(ask):
    """As of a plan that was measured; and at the end of its whole story."""
    for options in ([], ["--explain"], ["--all"]):
        cards = [] if "--all" in options else ["--gpu", "L4"]
        said = ask("predict", "train_it:without_optimizer", "--target", "8", *cards, *options)[1]
        assert "! no optimizer= was given" in said


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", [["show", "."], ["report", "."], ["diff", ".", "."]], ids=" ".join)
def test_a_folder_is_no_plan(ask, command):
    """And no beginning of an id."""
    code, _, error = ask(*command)
    assert code == 2
    assert ". is a folder" in error


def test_a_run_that_went_silent_is_shown_with_when(here, ask):
    """It may have been killed, and what is counted is what it wrote until then."""
    ask("fit", "train_it:make", "--target", "64")
    with plans.open_store() as store:
        [plan] = store.plans()
        add_run(store, plan, make_run("r", plan.id, last_seen_at=1.5e9))
    line = ask("plans")[1].splitlines()[1]
    assert "last written 2017-07-1" in line


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "command", sample([["plans"], ["show", "a1"], ["report", "a1", "-o", "-"], ["diff", "a1", "b2"]], 6)
)
@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_a_stdout_that_cannot_hold_a_letter_shows_its_number(here, command, encoding):
    """The rest is as it was, and so is the exit code: a container's locale is often C."""
    with plans.open_store() as store:
        store.add_plan(make_plan("a1", model="Caf\xe9\u65e5"))
        store.add_plan(make_plan("b2", model="Caf\xe9\u65e5\u672c"))
    done = start("-m", "autobatch", *command, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if command[0] == "diff" else 0)
    assert "\\u65e5" in done.stdout


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_name_that_is_no_text_is_said_with_its_bytes(ask, options):
    """A file's name may be any bytes; Python has those that are no UTF-8 as halves of letters."""
    done = start("-m", "autobatch", "show", os.fsdecode(b"caf\xe9.json"), *options)
    assert done.returncode == 2
    assert "no file caf\\udce9.json" in (done.stdout if options else done.stderr)


LONG = "a" * 5000
"""No name on any file system, and no path on most."""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "command",
    [
        ["show", LONG],
        ["show", f"{LONG}.json"],
        ["diff", LONG, "a1"],
        ["report", LONG],
        ["report", "a1", "-o", LONG],
        ["report", "a1", "-o", f"{LONG}/page.html"],
        ["fit", "train_it:make", "--target", "8", "--save", LONG],
        ["predict", "train_it:make", "--gpu", "L4", "--save", LONG],
        ["fit", f"{LONG}.py:make", "--target", "8"],
        ["verify", f"{LONG}.py:make"],
        ["verify", f"{LONG}:make"],
        ["show", "loop"],
        ["verify", "loop.py:make"],
    ],
    ids=lambda command: " ".join(command).replace(LONG, "LONG"),
)
def test_a_path_that_cannot_be_is_refused_in_one_line(here, ask, command):
    """Whichever command takes it, before any work; the name itself is cut."""
    with plans.open_store() as store:
        store.add_plan(make_plan("a1"))
    for name in ("loop", "loop.py"):
        (here / name).symlink_to(name)
    code, text, error = ask(*command)
    assert (code, text) == (2, "")
    assert len(error.splitlines()) == 1
    assert len(error) < 400


def start_without_rights(*arguments, **environment):
    """The command for a user whom files' permissions bind; root's own do not."""
    found = shutil.which("setpriv")
    if os.geteuid() == 0 and found is None:
        pytest.skip("root may read whatever it likes, and there is no setpriv")
    drop = [found, "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    return start("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *drop, *arguments, **environment)


@pytest.mark.parametrize(
    "command",
    sample(
        [
            ["show", "plan.json"],
            ["diff", "plan.json", "plan.json"],
            ["report", "plan.json"],
            ["show", "closed/plan.json"],
            ["report", "closed/plan"],
            ["report", "other.json", "-o", "closed/page.html"],
            ["verify", "hidden.py:make"],
            ["verify", "closed/hidden.py:make"],
        ],
        5,
    ),
    ids=" ".join,
)
def test_a_file_that_may_not_be_read_is_said_to_be_so(here, command):
    """By its name and the system's reason, with exit code 2: nothing is wrong with autobatch."""
    make_plan().save(here / "plan.json")
    make_plan().save(here / "other.json")
    (here / "hidden.py").write_text(SOURCE)
    (here / "closed").mkdir()
    for name in ("plan.json", "hidden.py", "closed"):
        (here / name).chmod(0)
    environment = {"AUTOBATCH_HOME": str(here / "home"), "AUTOBATCH_LEDGER": "on"}
    done = start_without_rights(sys.executable, "-m", "autobatch", *command, **environment)
    (here / "closed").chmod(0o700)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "Permission denied" in done.stderr


def test_a_file_that_the_users_own_code_may_not_read_is_the_users_to_see(here, ask):
    """With its traceback."""
    (here / "reads_it.py").write_text("open('nothing.csv')\n")
    for source in ("reads_it.py:make", "reads_it:make"):
        code, _, error = ask("fit", source, "--target", "8")
        assert code == 70
        assert "FileNotFoundError" in error
        assert "nothing.csv" in error
        sys.modules.pop("reads_it", None)


@pytest.mark.usefixtures("here")
def test_a_plan_is_read_from_a_pipe(here):
    """As ``show <(zcat plan.json.gz)`` gives it, and ``show /dev/stdin``."""
    make_plan(model="FromAfar").save(here / "plan.json")
    command = f"{shlex.quote(sys.executable)} -m autobatch show"
    for line in (
        f"cat plan.json | {command} /dev/stdin",
        f"{command} <(cat plan.json)",
        f"{command} /dev/stdin <plan.json",
    ):
        done = start("-c", "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])", line)
        assert done.returncode == 0, done.stderr
        assert "FromAfar" in done.stdout
