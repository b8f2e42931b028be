"""Wrong arguments of public calls: each gives one line of our own error, and none is accepted."""

import collections
import json
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from calls import fit, make_runner
from plans import make_plan
from texts import Reader, count_tokens, length_of, make_texts, read_step
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
    def __init__(self, rows):
        self.rows = rows


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


class WantsEpoch:
    def step(self, epoch):
        raise AssertionError


class WantsClosure(torch.optim.SGD):
    def step(self, closure):
        raise AssertionError


def predict(**changes):
    """A prediction that works, but for the changes."""
    return autobatch.predict(Plain(torch.float32), make_batch(4), mean_step, **{"gpu": "L4", **changes})


def fake(curve=lambda n: 10 + n, **options):
    return fit(device=testing.FakeDevice(curve, **{"total_bytes": 1000, **options}), headroom=0)


def enter(manager):
    """A wrong argument is found at the latest when the block begins."""
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
    """The state of a sampler that has begun nothing."""
    return {"epoch": 0, "batch": 0, "seed": 0, "shuffle": True, "samples": 64, "target_batch": 16}


SWITCHES = ["no", 0, 1, None, np.True_, torch.tensor(True)]
NO_COUNTS = [0, -1, 1.5, True, "4", HUGE, LONGER_THAN_PYTHON_WRITES, [1], Unprintable(), torch.ones(2), int]
NO_SAMPLES = [None, *NO_COUNTS]
NO_MOST = [value for value in NO_COUNTS if value is not HUGE and value is not LONGER_THAN_PYTHON_WRITES]
NO_WHOLES = [None, *NO_COUNTS[1:]]  # counted from 0
NO_BATCHES = [5, "abc", [], {}, (), iter([1]), (n for n in [make_batch(4)]), {1, 2}, range(3), object()]
NO_BATCHES += [collections.deque([make_batch(4)]), torch.zeros(()), Rows, torch.utils.data.Dataset]
NO_DATA = [None, 5, HUGE, {"x": 1}, iter([1]), [], torch.ones(()), Unprintable(), torch.utils.data.Dataset]
NO_DEVICES = ["cuda:99", "nonsense", 5, object(), testing.FakeDevice, "meta", torch.device("meta")]
NO_BYTES = [-1, True, "x", HUGE, LONGER_THAN_PYTHON_WRITES, [1], float("nan"), Fraction(HUGE), 1j, Unprintable()]
NO_HEADROOMS = [1.0, -0.1, np.float32(1), "0.1", float("inf"), "5%", False, ""]
NO_FUNCTIONS = [object, int, 3, "equal"]  # of a batch
NO_NORMS = [HUGE, True, "1", float("nan"), 0, -1, [1.0], int, torch.ones(2)]
NO_MARGINS = [HUGE, True, "0.1", None, float("nan"), 1, -0.1, Fraction(HUGE), 1j]
NO_WEIGHTS = [HUGE, -HUGE, "4", b"4", None, [1.0], float("nan"), float("inf"), -1, {"a": HUGE}, {"a": "1"}]
NO_WEIGHTS += [-1e-9, True, np.bool_(True), torch.tensor(True), torch.ones(1, 1) > 0]
NO_STATES = [None, 5, [], {}, "x", {"epoch": HUGE}, {**share_state(), "seed": HUGE}, {**share_state(), "batch": HUGE}]
NO_CHOICES = [True, 5, "x", [1], np.array(["warn", "raise"]), torch.ones(2)]
NO_PATHS = [None, 5, True, HUGE, [], b"\0", "\0"]
NO_NAMES = [HUGE, True, [], b"ddp", 1.5, object(), int]
SGD, STEP_LR = torch.optim.SGD, torch.optim.lr_scheduler.StepLR


def verify(batch=None, **options):
    return autobatch.verify(Plain(torch.float32), make_batch(4) if batch is None else batch, mean_step, **options)


def weigh(value):
    return make_runner(weigh=lambda batch: value).step(make_batch(16))


def state_count(value):
    return fit(step=lambda m, b: autobatch.Mean(mean_step(m, b), count=value))


def return_instead(change):
    return fit(step=lambda m, b: change(mean_step(m, b)))


def cut_texts(length_of=length_of, **options):
    """A fit of samples by length, but for the changes."""
    cut, given = autobatch.by_length(length_of, **options), {"step": read_step, "weigh": count_tokens, "check": None}
    return autobatch.fit(Reader(), 12, batch=make_texts(), cut=cut, max_micro_batch=2, **given)


# Of each call the names of arguments, "" for one by position, and the values that each of them refuses.
REFUSED = [
    (fit, "accumulate_in_float32 reuse progress", SWITCHES),
    (fit, "target_batch", NO_SAMPLES),
    (fit, "max_micro_batch", NO_MOST),  # a bound may be large
    (fit, "budget headroom", NO_BYTES),
    (fit, "headroom", NO_HEADROOMS),
    (fit, "objective check", NO_CHOICES),
    (fit, "cut", [*NO_FUNCTIONS, autobatch.by_length, lambda batch: [batch], list]),
    (fit, "device", [*NO_DEVICES, "cuda", "cpu:1", torch.device("cuda:0")]),
    (fit, "batch", [*NO_BATCHES, (torch.zeros(4, 6, device="meta"), make_batch(4)[1])]),
    (fit, "optimizer", [SGD]),
    (fit, "model", [Plain]),
    (fit, "step", [lambda m, b: m(b[0]).mean() * 1j, 0, [], {}, ""]),
    (return_instead, "", [lambda loss: None, lambda loss: loss.item(), lambda loss: [loss, {}], lambda loss: (loss,)]),
    (return_instead, "", [lambda loss: (loss, 1, 2), lambda loss: ({}, loss), lambda loss: (loss.expand(2), {})]),
    (return_instead, "", [lambda loss: loss.expand(3), lambda loss: loss.expand(2, 0), lambda loss: loss.detach()]),
    (return_instead, "", [lambda loss: loss > 0, lambda loss: {"loss": loss, "logits": loss.expand(3)}]),
    (autobatch.by_length, "", [None, *NO_FUNCTIONS, 0.5, {"a": 1}, lambda: 1, lambda batch, size: batch]),
    (cut_texts, "length_of", [[1, 2]]),
    (cut_texts, "dims", [[1], "x", 5, {"tokens": 1}]),
    (cut_texts, "dims", [{'batch["tokens"]': dim} for dim in (1.5, None, True, "1", 0, 2)]),
    (cut_texts, "padding", ["both"]),
    (verify, "cut", NO_FUNCTIONS),
    (verify, "batch", [*NO_BATCHES, torch.zeros(4, 6, device="meta")]),
    (predict, "expandable_segments scaler what_if progress", SWITCHES),
    (predict, "target_batch", NO_SAMPLES),
    (predict, "world_size", NO_COUNTS),
    (predict, "gpu", ["", *NO_NAMES]),
    (predict, "margin", NO_MARGINS),
    (lambda data_parallel: predict(world_size=2, data_parallel=data_parallel), "data_parallel", ["DDP", *NO_NAMES]),
    (lambda v: make_runner().step(v), "", [None, *NO_BATCHES, (torch.zeros(16, 6, device="meta"), make_batch(16)[1])]),
    (lambda v: make_runner().step_over(v), "", [None, 5, "abc", b"a", [], [5]]),
    (make_runner, "max_grad_norm", NO_NORMS),
    (make_runner, "scaler", [torch.amp.GradScaler, True, "yes", object(), 5]),
    (make_runner, "scheduler", [STEP_LR, True, "cosine", object(), 5, WantsEpoch(), WantsEpoch]),
    (make_runner, "hooks", [[Rows], 5, [5], [[]], "abc", [None]]),
    (make_runner, "keep", [[nn.Linear], 5, "metric", [{}, 3], [object()]]),
    (make_runner, "cut", [*NO_FUNCTIONS, lambda batch: [batch], list]),
    (make_runner, "backward", ["backward", 3, nn.Linear, object()]),
    (lambda **options: make_runner().run([], **options), "epochs", [0, -1, 1.5, True, "2"]),
    (lambda **options: make_runner().run([], **options), "drop_last", SWITCHES),
    (lambda epochs: make_runner().run(iter([]), epochs=epochs), "epochs", [2]),
    (make_runner, "device", [testing.FakeDevice]),
    (lambda v: autobatch.Runner(fit(), Plain(), mean_step, v), "", [SGD, {}]),
    (lambda v: autobatch.Runner(v, Plain(), mean_step, None), "", ["plan.json", None]),
    (lambda v: autobatch.Runner(fit(), v, mean_step, None), "", [None, Plain]),
    (lambda v: autobatch.Runner(fit(), Plain(), v, None), "", ["step", 3]),
    (make_runner, "weigh", [*NO_FUNCTIONS, lambda: 1, lambda batch, size: 1]),
    (weigh, "", NO_WEIGHTS),
    (state_count, "", [HUGE, "4", None, -1, float("nan")]),
    (share, "dataset", NO_DATA),
    (share, "shuffle drop_last", SWITCHES),
    (share, "seed", NO_WHOLES),
    (lambda v: autobatch.ShareSampler(v, range(16)), "", [5]),
    (lambda v: share().set_epoch(v), "", NO_WHOLES),
    (lambda v: share().state_dict(v), "", NO_WHOLES),
    (lambda v: share().load_state_dict(v), "", NO_STATES),
    (register_and_fit, "map", [lambda b, function: None, lambda b, function: function(b.rows)]),
    (register_and_fit, "take", [lambda b, at: Rows(b.rows[: len(at)]), lambda b, at: Rows(b.rows[sorted(at)])]),
    (register_and_fit, "count", [lambda b: -HUGE]),
    (batches.Samples, "", [None, 5, "abc", b"abc", {"x": 1}, int]),
    (batches.Fields, "", [None, 5, "abc", b"abc", {"x": 1}, int]),
    (lambda v: fake(lambda n: v), "", [-5, None, float("nan"), float("inf"), "5", True, 1j]),
    (lambda v: testing.FakeDevice(v, 10), "", [None, 5, "x"]),
    (fake, "measures", SWITCHES),
    (fake, "thrashes_from", ["3"]),
    (fake, "tenants", [5, [5]]),
    (lambda v: enter(testing.oom_at(v)), "", ["x", 1.5, True, 0, -1, None, [1]]),
    (lambda device: enter(testing.tenant(10, device)), "device", [None, *NO_DEVICES]),
    (lambda v: enter(testing.tenant(v)), "", [None]),
    (lambda v: fit().settings(v), "", [None, 5, [], {}, "keras", HUGE]),
    (lambda v: fit().save(v), "", NO_PATHS[-1:]),
    (autobatch.Plan.load, "", NO_PATHS),
    (hooks.jsonl, "", [*NO_PATHS, "."]),
    (hooks.console, "level", [True, "INFO"]),
    (hooks.console, "write", [5]),
    (hooks.tensorboard, "", [5]),
    (hooks.wandb, "", [5]),
    (hooks.mlflow, "", [5]),
    (hooks.prometheus, "labels", [5]),
    (hooks.prometheus, "", [5]),
    (hooks.memory_snapshot, "", [5]),
    (lambda **options: hooks.memory_snapshot(".", **options), "most entries", ["x", -1]),
]
CALLS = {
    f"{number} {call.__name__}({name}) {index} {name_type(value)}": partial(call, **{name: value})
    if name
    else partial(call, value)
    for number, (call, names, values) in enumerate(REFUSED)
    for name in names.split() or [""]
    for index, value in enumerate(values)
}
CALLS["fit(optimizer=WantsClosure)"] = lambda: fit(model=(m := Plain()), optimizer=WantsClosure(m.parameters()))
CALLS["oom_at()"] = lambda: enter(testing.oom_at())


@pytest.fixture(autouse=True)
def _forget_types(monkeypatch):
    monkeypatch.setattr("autobatch.batch.registry._registered", {})


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
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
        *(("max_micro_batch", 0), ("device.total_bytes", 0), ("predicted", "yes"), ("predicted", 0)),
        *(("verdict.exact", 1), ("seconds", True), ("rank", False), ("shares", [16.0]), ("shares", "16")),
        *(("target_batch", True), ("budget_bytes", True), ("trials.0.micro_batch_size", True)),
        *(("target_batch", "16"), ("trials.0.peak_allocated", "16"), ("peak_bytes", 16.0), ("identity.tensors", 16.0)),
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
