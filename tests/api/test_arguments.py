"""Wrong arguments of public calls: each gives one line of our own error, and none is accepted in silence."""

from __future__ import annotations

import collections
import json
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from calls import fit, make_runner
from plans import make_plan
from torch import nn
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch import batches, hooks, testing
from autobatch._formatting import name_type, show_value
from autobatch.cli.main import main
from autobatch.errors import AutobatchError, InvalidArgument

HUGE = 10**400
LONGER_THAN_PYTHON_WRITES = 10**5000
LONGEST_MESSAGE = 450


class Rows:
    """A batch type of a user's own."""

    def __init__(self, rows):
        self.rows = rows


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


class WantsEpoch:
    """A scheduler of another library."""

    def step(self, epoch):
        raise AssertionError


class WantsClosure(torch.optim.SGD):
    def step(self, closure):
        raise AssertionError


def predict(**changes):
    """A prediction that works, but for the changes."""
    return autobatch.predict(Plain(torch.float32), make_batch(4), mean_step, **{"gpu": "L4", **changes})


def fake(curve=lambda n: 10 + n, **options):
    """A fit on a fake device."""
    return fit(device=testing.FakeDevice(curve, **{"total_bytes": 1000, **options}), headroom=0)


def enter(manager):
    """What is wrong with it is found at the latest when the block begins."""
    with manager:
        pass


def register_and_fit(batch=None, **functions):
    """A fit on a batch of a registered type, whose own functions are right but for those given."""
    right = {
        "count": lambda b: len(b.rows),
        "take": lambda b, indices: Rows(b.rows[indices]),
        "map": lambda b, function: Rows(function(b.rows)),
    }
    batches.register(Rows, **{**right, **functions})
    return fit(batch=batch or Rows(make_batch(4)[0]), step=lambda m, b: m(b.rows).square().mean())


def share(dataset=range(64), **options):
    """A sampler that works, but for the changes."""
    return autobatch.ShareSampler(make_plan(16, 8), dataset, **options)


def share_state():
    """What one that has begun nothing would go on with."""
    return {"epoch": 0, "batch": 0, "seed": 0, "shuffle": True, "samples": 64, "target_batch": 16}


SWITCHES = ["no", "False", 0, 1, None, 5, np.True_, torch.tensor(True)]
NO_COUNTS = [0, -1, 1.5, True, "4", None, HUGE, LONGER_THAN_PYTHON_WRITES, [1], Unprintable(), torch.ones(2), int]
NO_WHOLES = NO_COUNTS[1:]  # counted from 0
NO_BATCHES = [5, True, "abc", b"abc", [], {}, (), iter([1]), (n for n in [make_batch(4)]), {1, 2}, range(3), object()]
NO_BATCHES += [collections.deque([make_batch(4)]), torch.zeros(()), 1.5, Rows, torch.utils.data.Dataset]
NO_DEVICES = ["cuda:99", "nonsense", 5, None, object(), testing.FakeDevice, "meta", torch.device("meta")]
NO_NORMS = [HUGE, True, "1", float("nan"), 0, -1, [1.0], int, torch.ones(2)]
NO_WEIGHTS = [HUGE, -HUGE, "4", b"4", None, [1.0], float("nan"), float("inf"), -1, {"a": HUGE}, {"a": "1"}]
NO_CURVES = [-5, None, float("nan"), float("inf"), "5", True, 1j]
NO_PLACES = ["x", 1.5, True, 0, -1, None, [1], HUGE * 0]
SGD, STEP_LR = torch.optim.SGD, torch.optim.lr_scheduler.StepLR

CALLS = {
    **{
        f"fit({name}={show_value(value)})": lambda name=name, value=value: fit(**{name: value})
        for name in ("accumulate_in_float32", "reuse", "progress")
        for value in SWITCHES
    },
    **{
        f"predict({name}={show_value(value)})": lambda name=name, value=value: predict(**{name: value})
        for name in ("expandable_segments", "scaler", "what_if", "progress")
        for value in SWITCHES
    },
    **{f"FakeDevice(measures={show_value(v)})": lambda v=v: fake(measures=v) for v in SWITCHES},
    **{f"fit(target_batch={show_value(v)})": lambda v=v: fit(target_batch=v) for v in NO_COUNTS},
    **{f"predict(target_batch={show_value(v)})": lambda v=v: predict(target_batch=v) for v in NO_COUNTS},
    **{
        f"fit(max_micro_batch={show_value(v)})": lambda v=v: fit(max_micro_batch=v)
        for v in NO_COUNTS
        if v is not None and v is not HUGE and v is not LONGER_THAN_PYTHON_WRITES  # a bound may be that large
    },
    **{
        f"fit({name}={show_value(v)})": lambda name=name, v=v: fit(**{name: v})
        for name in ("budget", "headroom")
        for v in (-1, True, "x", HUGE, LONGER_THAN_PYTHON_WRITES, [1], float("nan"), Fraction(HUGE), 1j, Unprintable())
    },
    **{
        f"fit({name}={show_value(v)})": lambda name=name, v=v: fit(**{name: v})
        for name in ("objective", "check")
        for v in (True, 5, "x", [1], np.array(["warn", "raise"]), torch.ones(2))
    },
    **{f"fit(device={show_value(v)})": lambda v=v: fit(device=v) for v in NO_DEVICES if v is not None},
    **{f"tenant(device={show_value(v)})": lambda v=v: enter(testing.tenant(10, v)) for v in NO_DEVICES},
    "tenant(None)": lambda: enter(testing.tenant(None)),
    **{f"fit(batch={name_type(v)})": lambda v=v: fit(batch=v) for v in NO_BATCHES},
    **{
        f"verify(batch={name_type(v)})": lambda v=v: autobatch.verify(Plain(torch.float32), v, mean_step)
        for v in NO_BATCHES
    },
    **{f"step({name_type(v)})": lambda v=v: make_runner().step(v) for v in (None, *NO_BATCHES)},
    **{f"step_over({show_value(v)})": lambda v=v: make_runner().step_over(v) for v in (None, 5, "abc", b"a", [], [5])},
    "fit(batch=meta)": lambda: fit(batch=(torch.zeros(4, 6, device="meta"), make_batch(4)[1])),
    "fit(batch=meta, weigh=)": lambda: fit(batch=torch.zeros(4, 6, device="meta"), weigh=lambda b: b.sum()),
    "verify(batch=meta)": lambda: autobatch.verify(Plain(), torch.zeros(4, 6, device="meta"), mean_step),
    "step(meta)": lambda: make_runner().step((torch.zeros(16, 6, device="meta"), make_batch(16)[1])),
    "fit(step=complex)": lambda: fit(step=lambda m, b: m(b[0]).mean() * 1j),
    "step(complex)": lambda: make_runner(step=lambda m, b: {"a": m(b[0]).mean() * 1j}).step(make_batch(16)),
    **{f"weigh {show_value(v)}": lambda v=v: make_runner(weigh=lambda b: v).step(make_batch(16)) for v in NO_WEIGHTS},
    **{
        f"Mean(count={show_value(v)})": lambda v=v: fit(step=lambda m, b: autobatch.Mean(mean_step(m, b), count=v))
        for v in (HUGE, "4", None, -1, float("nan"))
    },
    **{f"max_grad_norm={show_value(v)}": lambda v=v: make_runner(max_grad_norm=v) for v in NO_NORMS},
    **{
        f"scaler={show_value(v)}": lambda v=v: make_runner(scaler=v)
        for v in (torch.amp.GradScaler, True, "yes", object(), 5)
    },
    **{
        f"scheduler={show_value(v)}": lambda v=v: make_runner(scheduler=v)
        for v in (STEP_LR, True, "cosine", object(), 5, WantsEpoch(), WantsEpoch)
    },
    **{
        f"ShareSampler(dataset={name_type(v)})": lambda v=v: share(v)
        for v in (None, 5, HUGE, {"x": 1}, iter([1]), [], torch.ones(()), Unprintable(), torch.utils.data.Dataset)
    },
    **{
        f"ShareSampler({name}={show_value(v)})": lambda name=name, v=v: share(**{name: v})
        for name in ("shuffle", "drop_last")
        for v in SWITCHES
    },
    **{f"ShareSampler(seed={show_value(v)})": lambda v=v: share(seed=v) for v in NO_WHOLES},
    **{f"ShareSampler.set_epoch({show_value(v)})": lambda v=v: share().set_epoch(v) for v in NO_WHOLES},
    **{f"ShareSampler.state_dict({show_value(v)})": lambda v=v: share().state_dict(v) for v in NO_WHOLES},
    **{
        f"ShareSampler.load_state_dict({show_value(v)})": lambda v=v: share().load_state_dict(v)
        for v in (
            None,
            5,
            [],
            {},
            "x",
            {"epoch": HUGE},
            {**share_state(), "seed": HUGE},
            {**share_state(), "batch": HUGE},
        )
    },
    "ShareSampler(plan=5)": lambda: autobatch.ShareSampler(5, range(16)),
    "fit(optimizer=class)": lambda: fit(optimizer=SGD),
    "Runner(optimizer=class)": lambda: autobatch.Runner(fit(), Plain(), mean_step, SGD),
    "fit(optimizer=WantsClosure)": lambda: (m := Plain(), fit(model=m, optimizer=WantsClosure(m.parameters()))),
    "fit(model=class)": lambda: fit(model=Plain),
    "Runner(hooks=[class])": lambda: make_runner(hooks=[Rows]),
    "Runner(hooks=5)": lambda: make_runner(hooks=5),
    "Runner(keep=[class])": lambda: make_runner(keep=[nn.Linear]),
    "Runner(keep=5)": lambda: make_runner(keep=5),
    "Runner(device=class)": lambda: make_runner(device=testing.FakeDevice),
    "map=None": lambda: register_and_fit(map=lambda b, function: None),
    "map=tensor": lambda: register_and_fit(map=lambda b, function: function(b.rows)),
    "take=the first ones": lambda: register_and_fit(take=lambda b, indices: Rows(b.rows[: len(indices)])),
    "take=sorted": lambda: register_and_fit(take=lambda b, indices: Rows(b.rows[sorted(indices)])),
    "take=None": lambda: register_and_fit(take=lambda b, indices: None),
    "count=huge": lambda: register_and_fit(count=lambda b: -HUGE),
    **{
        f"{mark.__name__}({show_value(v)})": lambda mark=mark, v=v: mark(v)
        for mark in (batches.Samples, batches.Fields)
        for v in (None, 5, "abc", b"abc", {"x": 1}, int)
    },
    **{f"curve -> {show_value(v)}": lambda v=v: fake(lambda n: v) for v in NO_CURVES},
    **{f"curve({show_value(v)})": lambda v=v: testing.FakeDevice(v, 10) for v in (None, 5, "x")},
    "thrashes_from": lambda: fake(thrashes_from="3"),
    "tenants=5": lambda: fake(tenants=5),
    "tenants=[5]": lambda: fake(tenants=[5]),
    **{f"oom_at({show_value(v)})": lambda v=v: enter(testing.oom_at(v)) for v in NO_PLACES},
    "oom_at()": lambda: enter(testing.oom_at()),
    **{f"predict(gpu={show_value(v)})": lambda v=v: predict(gpu=v) for v in (HUGE, True, [], "", 1.5, object(), int)},
    **{
        f"predict(margin={show_value(v)})": lambda v=v: predict(margin=v)
        for v in (HUGE, True, "0.1", None, float("nan"), 1, -0.1, Fraction(HUGE), 1j)
    },
    **{f"predict(world_size={show_value(v)})": lambda v=v: predict(world_size=v) for v in NO_COUNTS if v is not None},
    **{
        f"predict(data_parallel={show_value(v)})": lambda v=v: predict(world_size=2, data_parallel=v)
        for v in (HUGE, True, "DDP", b"ddp", [], 1.5, object(), int)
    },
    **{f"settings({show_value(v)})": lambda v=v: fit().settings(v) for v in (None, 5, [], {}, "keras", HUGE)},
    **{
        f"{call.__name__}({show_value(v)})": lambda call=call, v=v: call(v)
        for call in (autobatch.Plan.load, hooks.jsonl)
        for v in (None, 5, True, HUGE, [], b"\0", "\0")
    },
    **{f"save({show_value(v)})": lambda v=v: fit().save(v) for v in (None, 5, [], "\0")},
    "jsonl(folder)": lambda: hooks.jsonl("."),
    "console(level=True)": lambda: hooks.console(level=True),
    "console(level='INFO')": lambda: hooks.console(level="INFO"),
    "console(write=5)": lambda: hooks.console(write=5),
    "tensorboard(5)": lambda: hooks.tensorboard(5),
    "wandb(5)": lambda: hooks.wandb(5),
    "memory_snapshot(5)": lambda: hooks.memory_snapshot(5),
    "memory_snapshot(most='x')": lambda: hooks.memory_snapshot(".", most="x"),
    "prometheus(labels=5)": lambda: hooks.prometheus(labels=5),
    "mlflow(5)": lambda: hooks.mlflow(5),
    "memory_snapshot(entries=-1)": lambda: hooks.memory_snapshot(".", entries=-1),
}


@pytest.fixture(autouse=True)
def _forget_types(monkeypatch):
    monkeypatch.setattr("autobatch.batch.registry._registered", {})


# Without addresses: each process that runs tests must know them by the same names.
@pytest.mark.parametrize("call", CALLS.values(), ids=[re.sub(r" at 0x\w+", "", name) for name in CALLS])
def test_a_wrong_argument_is_one_line_of_ours(call):
    """Neither a foreign traceback nor an answer; no number of hundreds of digits."""
    with pytest.raises(AutobatchError) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < LONGEST_MESSAGE
    assert "0" * 50 not in str(caught.value)
    assert caught.value.__cause__ is None or not isinstance(caught.value, InvalidArgument)


@pytest.mark.parametrize(
    "value", [HUGE, LONGER_THAN_PYTHON_WRITES, -HUGE, "x" * 999, [HUGE], Unprintable(), "a\nb"], ids=name_type
)
def test_a_value_in_a_message_is_short(value):
    """Whatever it is, also where Python cannot write it."""
    assert len(show_value(value)) <= 80
    assert len(show_value(value).splitlines()) == 1


def test_a_plan_has_a_hash_that_goes_with_its_equality(tmp_path):
    """One that was saved and loaded is the same key."""
    plan = fit()
    plan.save(tmp_path / "plan.json")
    assert {plan: 1}[autobatch.Plan.load(tmp_path / "plan.json")] == 1
    assert hash(plan) != hash(plan.model_copy(update={"id": "another"}))


def edit(path, change):
    """The file with a field changed: ``(path into the JSON, value)``."""
    *outer, last = change[0].split(".")
    data = json.loads(path.read_text())
    part = data
    for key in outer:
        part = part[int(key) if key.isdigit() else key]
    part[last] = change[1]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        ("max_micro_batch", 0),
        ("device.total_bytes", 0),
        ("predicted", "yes"),
        ("predicted", 0),
        ("verdict.exact", 1),
        ("seconds", True),
        *((name, True) for name in ("target_batch", "world_size", "accumulation_steps", "smallest_micro_batch")),
        *(("rank", False), ("shares", [16.0]), ("shares", "16")),
        *((name, True) for name in ("max_micro_batch", "budget_bytes", "state_bytes", "trials.0.micro_batch_size")),
        *((name, "16") for name in ("target_batch", "budget_bytes", "trials.0.peak_allocated", "device.total_bytes")),
        *((name, 16.0) for name in ("target_batch", "peak_bytes", "identity.tensors")),
    ],
    ids=str,
)
def test_a_plan_that_was_edited_by_hand_is_refused(tmp_path, change):
    """A number that is none, or that says nothing."""
    path = tmp_path / "plan.json"
    plan = fit()
    plan.save(path)
    assert autobatch.Plan.load(path) == plan
    edit(path, change)
    with pytest.raises(InvalidArgument, match=change[0].partition(".")[0]):
        autobatch.Plan.load(path)


def test_a_take_that_uses_its_indices_is_taken():
    """Also where samples are alike, so that nothing can be seen of a ``take`` by them."""
    assert register_and_fit().target_batch == 16
    alike = {"take": lambda b, indices: Rows(torch.ones(len(indices), 6))}
    assert register_and_fit(batch=Rows(torch.ones(4, 6)), **alike).target_batch == 16


def test_step_over_takes_any_row_of_batches():
    """A generator and a deque of batches are several batches."""
    for several in ((make_batch(8) for _ in range(2)), collections.deque([make_batch(16)])):
        assert sum(make_runner().step_over(several).micro_batch_sizes) == 16


def test_an_infinite_norm_clips_nothing():
    """As in ``clip_grad_norm_``; NumPy's numbers are numbers."""
    for norm in (float("inf"), np.float32(1.0), 3):
        assert make_runner(max_grad_norm=norm).step(make_batch(16)).loss.isfinite()


@pytest.mark.parametrize(("phase", "sizes"), [("forward", (1,)), ("backward", (1,))])
def test_the_runner_says_in_which_pass_memory_ended(phase, sizes):
    """As ``fit`` does: what helps is not the same."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            if phase == "forward":
                raise error
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise error

    runner = make_runner(step=lambda m, b: Ends.apply(mean_step(m, b)))
    with pytest.raises(autobatch.DoesNotFit, match=f"ran out of memory in the {phase} pass at a micro-batch of one"):
        runner.step(make_batch(16))


def test_an_error_of_the_scheduler_says_that_the_update_was_made(caplog):
    """The user's own error comes out; a note and a line in the log say what has happened before it."""
    model = Plain(torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = STEP_LR(optimizer, 1)
    runner = autobatch.Runner(fit(model=model, optimizer=optimizer), model, mean_step, optimizer, scheduler=scheduler)
    error = ValueError("mine")

    def fail():
        raise error

    scheduler.step = fail
    with pytest.raises(ValueError, match="mine") as caught:
        runner.step(make_batch(16))
    assert caught.value is error
    said = "scheduler.step() raised this after the optimizer had stepped: parameters have moved"
    assert said in caplog.text
    assert any(said in note for note in getattr(error, "__notes__", [said]))


@pytest.fixture
def ask(monkeypatch, tmp_path, capsys):
    """Run a command with a ledger of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")

    def run(*arguments):
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        *(["plans", "--limit", text] for text in ("0", "-1", "x", "1.5", "", "9" * 5000)),
        *(["fit", "m:f", "--target", text] for text in ("0", "x", "", "9" * 5000)),
        *(["fit", "m:f", "--max-micro-batch", text] for text in ("0", "x", str(10**22))),
        ["predict", "m:f", "--target", "9" * 5000],
        *([command, name] for command in ("show", "report", "forget", "fit", "verify") for name in ("", " ")),
        *(["diff", name, ""] for name in ("", " ")),
        ["fit", "m:f", "--save", ""],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_a_wrong_option_is_one_short_line(ask, arguments):
    """Exit code 2, nothing on stdout, and no digit of a long number."""
    code, text, error = ask(*arguments)
    assert (code, text) == (2, "")
    assert len(error.splitlines()) == 1
    assert len(error) < LONGEST_MESSAGE
    assert "'" in error or "" not in arguments, "an empty name is shown as one"


def test_the_doctor_does_not_pass_settings_that_are_wrong(ask, monkeypatch, tmp_path):
    """A home that cannot be used: exit code 1, with what to do."""
    home = tmp_path / "file"
    home.write_text("")
    monkeypatch.setenv("AUTOBATCH_HOME", str(home))
    code, text, _ = ask("doctor")
    assert code == 1
    assert [line for line in text.splitlines() if line.startswith("WRONG") and str(home) in line]
