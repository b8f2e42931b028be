"""The public surface: names, signatures, and how the pages call them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import autobatch
from autobatch.fitting.options import FitAndRunOptions, FitOptions, RunnerOptions, names_of

ROOT = Path(__file__).resolve().parents[2]

USAGE = Path(__file__).with_name("typed_usage.py")

NAMES = [
    "AutobatchError",
    "CannotRetry",
    "DeviceInfo",
    "DoesNotFit",
    "InexactSplit",
    "InvalidArgument",
    "Mean",
    "MemoryCurve",
    "NeedsBatch",
    "PerStep",
    "Plan",
    "Prediction",
    "RankFailed",
    "RankLost",
    "Runner",
    "ShareSampler",
    "StepResult",
    "Sum",
    "Trial",
    "Verdict",
    "WholeBatch",
    "__version__",
    "batches",
    "by_length",
    "fit",
    "hooks",
    "is_oom",
    "map",
    "predict",
    "testing",
    "verify",
]

# A change here changes the public contract: it belongs into CHANGELOG.md. ``*`` begins the keyword-only arguments.
SIGNATURES = {
    "fit": "model target_batch * batch=None step=None optimizer=None weigh=None cut=None device=None budget=None "
    "headroom=None max_micro_batch=None objective='throughput' accumulate_in_float32=True check='warn' reuse=True "
    "progress=True share='equal' strategies=None",
    "predict": "model batch=None step=None optimizer=None * weigh=None target_batch=256 world_size=None "
    "data_parallel=None gpu=None margin=0.1 expandable_segments=False scaler=False what_if=False all_cards=False "
    "progress=True",
    "verify": "model batch step=None weigh=None * cut=None device=None",
    "Runner": "plan model step optimizer * weigh=None cut=None device=None scaler=None max_grad_norm=None "
    "scheduler=None hooks=() keep=() backward=None",
    "Runner.fit": "model target_batch * batch=None step=None optimizer=None options",
    "Runner.run": "loader * epochs=None drop_last=False",
    "Runner.step": "batch",
    "Runner.accumulate": "batch",
    "Runner.step_over": "batches",
    "Runner.state_dict": "",
    "Runner.load_state_dict": "state",
    "map": "fn batch * device=None budget=None headroom=None max_piece=None cut=None collate=None to=None "
    "on_result=None progress=True",
    "ShareSampler": "plan dataset * shuffle=True seed=0 drop_last=False",
    "ShareSampler.set_epoch": "epoch",
    "ShareSampler.state_dict": "batches_done",
    "ShareSampler.load_state_dict": "state",
    "by_length": "length_of dims=None padding=None",
    "Mean": "loss count",
    "Sum": "loss count",
    "PerStep": "loss",
    "is_oom": "error * memory_is_low=None handled=None",
    "Plan.load": "path",
    "Plan.loader": "dataset * shuffle=True seed=0 drop_last=False options",
    "Plan.save": "path",
    "Plan.settings": "framework * sequence_length=None",
    "Plan.explain": "",
}

BY_POSITION = {"fit": 2, "predict": 1, "verify": 1, "Runner": 2}
"""How many arguments a page writes without a name: those before ``batch=``."""


def spell_signature(name: str) -> str:
    """Arguments in order, each with its default, ``self`` left out."""
    target = autobatch
    for part in name.split("."):
        target = getattr(target, part)
    words: list[str] = []
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(f"{parameter.name}{default}")
    return " ".join(words)


def test_the_public_names_are_those_that_are_recorded() -> None:
    """A name that comes or goes has to be written down here."""
    assert sorted(autobatch.__all__) == NAMES
    assert all(hasattr(autobatch, name) for name in NAMES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_the_one_that_is_recorded(name: str) -> None:
    """Names, order, defaults and what is keyword-only."""
    assert spell_signature(name) == SIGNATURES[name]


def test_what_users_import_has_docstrings() -> None:
    """Every public function and class has a docstring, and every public method that the package wrote itself."""
    public = [getattr(autobatch, name) for name in NAMES]
    objects = [one for one in public if inspect.isclass(one) or inspect.isfunction(one)]
    methods = [
        method
        for one in objects
        if inspect.isclass(one)
        for name, method in inspect.getmembers(one, inspect.isfunction)
        if not name.startswith("_") and method.__module__.startswith("autobatch")
    ]
    assert {method.__name__ for method in methods} >= {"step", "run", "explain", "largest"}
    assert [one.__qualname__ for one in (*objects, *methods) if not one.__doc__] == []


def test_one_call_takes_what_the_two_take() -> None:
    """The options of ``Runner.fit`` are the arguments of ``fit`` and of ``Runner``, with the same types."""
    explicit = {"model", "target_batch", "plan", "batch", "step", "optimizer"}
    for options, call in ((FitOptions, autobatch.fit), (RunnerOptions, autobatch.Runner)):
        parameters = inspect.signature(call).parameters
        assert set(names_of(options)) == parameters.keys() - explicit
        declared = {name: FitAndRunOptions.__annotations__[name].__forward_arg__ for name in names_of(options)}
        assert declared == {name: parameters[name].annotation for name in declared}
    assert set(names_of(FitAndRunOptions)) == {*names_of(FitOptions), *names_of(RunnerOptions)}


def test_an_argument_that_is_not_there_is_named_with_those_that_are() -> None:
    """Before anything is run; mypy refuses it too (``typed_usage.py``)."""
    with pytest.raises(autobatch.InvalidArgument, match=r"Runner\.fit\(\) has no argument cutt; it has .*cut"):
        autobatch.Runner.fit(nn.Linear(2, 1), 4, cutt=len)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (3, {}, r"^Runner\(plan, model, step\) has no optimizer: [^\n]*optimizer=None[^\n]*accumulate\(\)[^\n]*$"),
        (2, {}, r"^Runner\(\): missing a required argument: 'step'[^\n]*$"),
        (4, {"scalar": 1}, r"^Runner\(\): got an unexpected keyword argument 'scalar'[^\n]*scaler[^\n]*$"),
    ],
    ids=["optimizer", "step", "unknown"],
)
def test_a_runner_that_lacks_an_argument_says_so(arguments: int, options: dict[str, int], message: str) -> None:
    """In one line, as the user called it: no class that users do not know is in it."""
    with pytest.raises(autobatch.InvalidArgument, match=message):
        autobatch.Runner(*range(arguments), **options)  # type: ignore[arg-type]


def test_no_public_class_is_made_by_a_private_one() -> None:
    """Python writes the name of the class that defines ``__init__`` into its errors."""
    makers = {name: getattr(autobatch, name).__init__ for name in NAMES if inspect.isclass(getattr(autobatch, name))}
    named = {name: maker.__qualname__ for name, maker in makers.items() if inspect.isfunction(maker)}
    foreign = {name: maker for name, maker in named.items() if maker not in (f"{name}.__init__", "BaseModel.__init__")}
    assert foreign == {}


def shown_code() -> Iterator[tuple[str, str]]:
    """Every Python block of a page, and every example and benchmark."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for code in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
            yield page.relative_to(ROOT).as_posix(), code
    for folder in ("examples", "benchmarks"):
        for script in sorted((ROOT / folder).glob("*.py")):
            yield script.relative_to(ROOT).as_posix(), script.read_text(encoding="utf-8")


def shown_calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every ``autobatch.fit(...)`` and its like in them."""
    for source, code in shown_code():
        for node in ast.walk(ast.parse(code)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "autobatch"
                and node.func.attr in BY_POSITION
            ):
                yield source, node.func.attr, node


def test_pages_name_their_arguments_from_the_batch_on() -> None:
    """At most plan, model and target are written by position, and every keyword is a parameter."""
    calls = list(shown_calls())
    assert {name for _, name, _ in calls} == set(BY_POSITION)
    for source, name, call in calls:
        assert len(call.args) <= BY_POSITION[name], f"{source}: {ast.unparse(call)}"
        known = inspect.signature(getattr(autobatch, name)).parameters
        assert {keyword.arg for keyword in call.keywords if keyword.arg} <= set(known), f"{source}: {ast.unparse(call)}"


@pytest.mark.slow
@pytest.mark.predicts
def test_typed_code_of_a_user_runs(tmp_path: Path) -> None:
    """The code that mypy checks also runs, and it uses every public name but the version."""
    program = f"import pathlib, typed_usage; typed_usage.main(pathlib.Path({str(tmp_path)!r}))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{USAGE.parent}", "AUTOBATCH_LEDGER": "off"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr
    used = set(re.findall(r"\bautobatch\.(\w+)", USAGE.read_text(encoding="utf-8")))
    assert set(autobatch.__all__) - used == {"__version__"}


def test_a_users_typed_code_imports_public_names_only() -> None:
    """Besides ``autobatch`` itself, its documented module of events."""
    modules = set(re.findall(r"^(?:from|import) (autobatch[\w.]*)", USAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert modules == {"autobatch", "autobatch.events"}
