"""Each error is one line with the user's own input and a remedy. Only public doors are used."""

import itertools
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from calls import fit, make_runner
from texts import Reader, count_tokens, length_of, make_texts, read_step
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset, TensorDataset
from workloads import Everything, Plain, make_batch, mean_step

import autobatch
from autobatch import errors
from autobatch.testing import FakeDevice

ROWS = torch.zeros(4, 2)
ONE_LINE = 400  # characters; what is longer tells a story: DoesNotFit, CannotRetry


def run_step(**options):
    """A step of a runner with these options."""
    make_runner(**options).step(make_batch(16))


def make_stepping_runner():
    """A runner whose step steps the runner's own optimizer."""
    holder = []
    runner = make_runner(step=lambda model, batch: holder[0].step() or mean_step(model, batch))
    holder.append(runner._workload.optimizer)
    return runner


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class SteplessSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def run_out_in_update():
    model = Plain(torch.float32)
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step)
    autobatch.Runner(plan, model, mean_step, SteplessSGD(model.parameters())).step(make_batch(16))


def run_out_at_one():
    """Memory ends at one sample of a step."""
    device = FakeDevice(lambda n: 10 + n, total_bytes=100)
    runner = make_runner(device=device)
    device.curve = lambda n: 101
    runner.step(make_batch(16))


def save_and_load(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    autobatch.Plan.load(tmp_path / "plan.json")


def run_odd_batch():
    """A batch that needs a piece of three where two are allowed."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    plan = autobatch.fit(model, 8, batch=make_batch(4), step=mean_step, max_micro_batch=2, check=None)
    autobatch.Runner(plan, model, mean_step, torch.optim.SGD(model.parameters())).step(make_batch(5))


def predict(model=None, **options):
    """A prediction for an L4."""
    return autobatch.predict(model or Plain(), make_batch(4), mean_step, gpu="L4", **options)


def make_sharded():
    """A model whose parameter says that it is sharded; without a process group none can be."""

    class DTensor(torch.Tensor):
        pass

    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(torch.zeros(4, 6).as_subclass(DTensor))
    return model


def two_counts(model, batch):
    """Two terms whose totals cannot be distinguished in one gradient."""
    loss = mean_step(model, batch)
    count = len(batch[0])
    return {"left": autobatch.Mean(loss, count=count), "right": autobatch.Mean(loss, count=2 * count)}


def count_by_turns():
    calls = itertools.count()

    def step(model, batch):
        loss = mean_step(model, batch)
        return loss if next(calls) % 2 else autobatch.Mean(loss, count=3)

    return step


def weigh_other_terms():
    calls = itertools.count()
    return lambda batch: {f"term {next(calls)}": 1.0}


def count_without_room(batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def step_through(head):
    """A step with a layer that neither the model nor the optimizer knows."""
    return lambda model, batch: F.cross_entropy(head(model(batch[0])), batch[1])


def write_into_batch(model, batch):
    batch[0].mul_(2)
    return mean_step(model, batch)


def call_backward(model, batch):
    """Call backward, as in a loop by hand."""
    loss = mean_step(model, batch)
    loss.backward(retain_graph=True)
    return loss


def write_gradients(model, batch):
    model.head.bias.grad = torch.zeros(4)
    return mean_step(model, batch)


def accumulate_while_accelerate_does():
    """In a loop under ``accelerator.accumulate()``."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    runner = make_runner()
    try:
        with Accelerator(cpu=True, gradient_accumulation_steps=2).accumulate():
            runner.accumulate(make_batch(16))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def fit_with(optimizer=None, hook=lambda parameter: None):
    """A fit with an optimizer of its own, or a hook on the first parameter."""
    model = Plain(torch.float32)
    hook(next(model.parameters()))
    fit(model=model, optimizer=optimizer and optimizer(model.parameters()))


def hook_late(hook):
    """A step after a hook was put on a parameter that only the optimizer holds."""
    scale, runner = nn.Parameter(torch.ones(3)), make_runner()
    runner._workload.optimizer.add_param_group({"params": [scale]})
    hook(scale)
    runner.step(make_batch(16))


def run_cut(groups):
    """A step of a batch of 16 that is divided into these."""
    run_step(cut=lambda batch, largest: groups)


def fit_texts(lengths=length_of, batch=None, **options):
    """A fit with lengths, but for the changes."""
    texts = make_texts() if batch is None else batch
    given = {"step": read_step, "weigh": count_tokens, "max_micro_batch": 2, "check": None, **options}
    model = Reader()
    return model, autobatch.fit(model, 12, batch=texts, cut=autobatch.by_length(lengths), **given)


def run_texts(batch, **given):
    model, plan = fit_texts()
    options = {"weigh": count_tokens, "cut": autobatch.by_length(length_of), **given}
    autobatch.Runner(plan, model, read_step, None, **options).accumulate(batch)


INVALID = [
    (lambda: fit_texts(3), "by_length", "length_of"),
    (lambda: fit_texts(lambda batch: [1]), "length_of()", '["attention_mask"]'),
    (lambda: fit_texts(batch=make_texts([6, 6])), "cut=autobatch.by_length", "length_of", "dims="),
    (lambda: fit_texts(batch={**make_texts(), "sound": torch.zeros(12, 60)}), '["labels"]', '["sound"]'),
    (lambda: run_texts(make_texts([25, 3])), "25", "fit()", "24"),
    (lambda: run_texts(make_texts(), cut=None), "cut=by_length"),
    (lambda: make_runner(cut=autobatch.by_length(length_of)), "by_length()", "cut=", "fit()"),
    (lambda: fit(target_batch=0), "target_batch=0"),
    (lambda: fit(max_micro_batch=1.5), "max_micro_batch=1.5"),
    (lambda: fit(target_batch=10**9), "target_batch=1000000000"),
    (
        lambda: autobatch.predict(Plain(), make_batch(4), mean_step, gpu="L4", target_batch=10**18),
        "target_batch=1000000000000000000",
    ),
    (lambda: autobatch.map(nn.Linear, ROWS), "fn=the class Linear"),
    (lambda: predict(world_size=0), "world_size=0", "10000"),
    (lambda: predict(world_size=4, data_parallel="zero3"), "data_parallel='zero3'", "'ddp'"),
    (lambda: predict(data_parallel="fsdp2"), "data_parallel='fsdp2'", "world_size=2"),
    (lambda: predict(world_size=4, target_batch=3), "target_batch=3", "target_batch=4"),
    (lambda: predict(make_sharded(), world_size=4), "fully_shard()", "world_size="),
    (lambda: fit(target_batch=10**8, max_micro_batch=3), "target_batch=100000000", "33333334"),
    (lambda: fit(objective="speed"), "objective='speed'", "'throughput'", "'memory'"),
    (lambda: fit(check="stop"), "check='stop'", "'warn'", "'raise'"),
    (lambda: fit(budget="8 apples"), "budget='8 apples'", "'8GiB'", "'512MiB'"),
    (lambda: fit(headroom=2.0), "headroom=2.0", "'512MiB'"),
    (lambda: fit(budget="1MiB", headroom="2MiB"), "headroom='2MiB'", "1.0"),
    (lambda: fit(device="cuda"), "device='cuda'"),
    (lambda: fit(model=nn.ReLU()), "ReLU"),
    (lambda: fit(model=nn.Linear(2, 2, device="meta")), "to_empty()"),
    (lambda: fit(batch={"x": torch.zeros(8, 6), "y": [torch.zeros(8), torch.zeros(7)]}), '["x"]', '["y"]'),
    (lambda: fit(batch=torch.zeros(0, 6)), "0"),
    (lambda: fit(batch={"name": "a"}), "the batch", "samples"),
    (lambda: fit(batch=[torch.zeros(8, 6), torch.zeros(8, 6)]), "autobatch.batches.Samples"),
    (lambda: fit(batch={"x": torch.zeros(2, 6), "pair": [torch.zeros(2), torch.zeros(2)]}), '["pair"]'),
    (lambda: fit(batch=SimpleNamespace(x=torch.zeros(8, 6))), "SimpleNamespace"),
    (lambda: fit(batch=(torch.zeros(8, 6), SimpleNamespace(y=torch.zeros(8)))), "SimpleNamespace"),
    (lambda: autobatch.batches.register(dict, count=len, take=len), "register()"),
    (lambda: autobatch.batches.register(SimpleNamespace, count=len, take=None), "SimpleNamespace", "take=", "NoneType"),
    (lambda: fit(batch=TensorDataset(torch.zeros(0, 6))), "TensorDataset"),
    (lambda: fit(batch=Stream()), "Stream"),
    (lambda: fit(step=lambda m, b: 1.0), "the step"),
    (lambda: fit(step=lambda m, b: m(b[0])), "the step"),
    (lambda: fit(step=lambda m, b: m(b[0]).mean().detach()), "the step", "no_grad"),
    (lambda: fit(weigh=lambda b: -1.0), "weigh()", "1.0"),
    (lambda: run_step(weigh=lambda b: 5.0), "weigh()", "16"),
    (lambda: fit(step=lambda m, b: {}), "the step"),
    (lambda: fit(step=lambda m, b: autobatch.Sum(m(b[0]).sum(), "many")), "count="),
    (lambda: fit(step=lambda m, b: autobatch.Mean(m(b[0]).mean(), count=True)), "count="),
    (lambda: fit(step=lambda m, b: autobatch.Sum(m(b[0]).sum(), (b[0] > 0).any())), "count=", "torch.bool"),
    (lambda: fit(step=lambda m, b: autobatch.Mean(m(b[0]).mean(), count=-1)), "count=", "1.0"),
    (
        lambda: fit(step=lambda m, b: {"loss": m(b[0]).mean(), "logits": m(b[0]).detach().mean()}),
        "'logits'",
        "the step",
        "no_grad",
    ),
    (lambda: run_step(step=two_counts), "the step", "'left'", "'right'"),
    (lambda: run_step(step=two_counts, weigh=lambda b: {"left": len(b[0])}), "weigh()", "'left'", "the step"),
    (
        lambda: make_runner().load_state_dict({**make_runner().state_dict(), "target_batch": 256}),
        "target_batch=256",
        "target_batch=16",
    ),
    (lambda: make_runner().load_state_dict({"epoch": 3}), "state=", "'epoch'", "state_dict()"),
    (lambda: make_runner(backward="backward"), "backward='backward'", "accelerator.backward"),
    (lambda: run_step(backward=lambda loss: None), "backward=", "loss.backward()"),
    (lambda: run_step(backward=lambda loss: (loss / 4).backward()), "backward="),
    (lambda: run_step(step=count_by_turns()), "the step"),
    (
        lambda: run_step(step=lambda m, b: autobatch.Mean(mean_step(m, b), count=7), weigh=lambda b: len(b[0])),
        "the step",
        "weigh()",
        "weigh=",
    ),
    (lambda: run_step(weigh=lambda b: bool((b[0] > 0).any())), "weigh()"),
    (lambda: run_step(weigh=lambda b: {}), "weigh()"),
    (lambda: run_step(weigh=lambda b: "all"), "weigh()"),
    (lambda: run_step(weigh=weigh_other_terms()), "weigh()", "'term 0'", "'term 1'"),
    (lambda: run_step(step=write_into_batch), "the step"),
    (lambda: run_step(step=call_backward), "the step", "torch.autograd.grad"),
    (lambda: make_stepping_runner().step(make_batch(16)), "the step", "optimizer.step()"),
    (lambda: run_step(step=write_gradients), "the step", "backward()", "zero_grad()"),
    (lambda: run_step(step=lambda m, b: (mean_step(m, b), mean_step(m, b))), "the step", "other.detach()"),
    (lambda: fit(step=step_through(nn.Linear(4, 4))), "the step", "requires_grad_"),
    (lambda: make_runner(step=step_through(nn.Linear(4, 4))).accumulate(make_batch(16)), "the step", "requires_grad_"),
    (lambda: make_runner().step((nn.Linear(6, 6)(make_batch(16)[0]), make_batch(16)[1])), "the step", "detach()"),
    (lambda: fit_with(optimizer=torch.optim.LBFGS), "optimizer=None", "runner.accumulate"),
    (lambda: fit_with(hook=lambda p: p.register_post_accumulate_grad_hook(lambda _: None)), "torch.optim.AdamW"),
    (lambda: fit_with(hook=lambda p: p.register_hook(lambda _: None)), "runner.accumulate"),
    (lambda: hook_late(lambda p: p.register_post_accumulate_grad_hook(lambda _: None)), "torch.optim.AdamW"),
    (lambda: make_runner(scaler=object()), "torch.amp.GradScaler"),
    (lambda: make_runner(keep=[object()]), "keep[0]", "state_dict()", "take()"),
    (lambda: make_runner(keep=nn.Linear(2, 2)), "keep=Linear", "keep=[...]"),
    (lambda: make_runner(scheduler=object()), "step()"),
    (accumulate_while_accelerate_does, "accumulate()", "accelerator.accumulate()"),
    (lambda: make_runner().step_over(make_batch(16)[0]), "step_over()", "step()"),
    (lambda: make_runner().step_over(make_batch(16)), "step_over()", "step()"),
    (lambda: make_runner(optimizer=False).run([]), "optimizer"),
    (lambda: fit(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters())), "model.parameters()"),
    (lambda: make_runner(max_grad_norm=0.0), "max_grad_norm=0.0"),
    (lambda: make_runner(optimizer=False, max_grad_norm=1.0), "max_grad_norm=", "runner.accumulate"),
    (
        lambda: make_runner(optimizer=False, scheduler=StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters()), 1)),
        "scheduler=",
    ),
    (lambda: run_step(optimizer=False), "accumulate(batch)"),
    (lambda: make_runner().step_over([make_batch(8), tuple(part[:0] for part in make_batch(8))]), "0", "2"),
    (lambda: make_runner().step_over([]), "step_over()"),
    (lambda: make_runner(cut=8), "cut=", "autobatch.by_length", "length_of"),
    (lambda: run_cut(None), "cut()", "NoneType"),
    (lambda: run_cut([*range(16)]), "cut()"),
    (lambda: run_cut([[0, 16]]), "cut()", "16"),
    (lambda: run_cut([range(16), [3]]), "cut()"),
    (lambda: run_cut([range(4), range(6, 16)]), "cut()", "16"),
    (lambda: fit().settings("keras"), "'keras'", "'huggingface'", "'lightning'"),
    (lambda: fit().settings("megatron", sequence_length=96), "'megatron'", "sequence_length="),
    (lambda: fit().model_copy(update={"world_size": 3}).settings("lightning"), "'lightning'", "16"),
    (lambda: fit(reuse="no"), "reuse='no'"),
    (lambda: fit(target_batch=10**400), "401", "100000000"),
    (lambda: fit(batch=5), "batch=5"),
    (lambda: fit(batch=iter([make_batch(4)])), "list_iterator"),
    (lambda: fit(batch={"x": deque([1, 2])}), "deque"),
    (lambda: fit(batch=torch.zeros(4, 6, device="meta")), "predict()"),
    (lambda: fit(step=lambda m, b: m(b[0]).mean() * 1j), "the step", "abs()"),
    (lambda: autobatch.batches.Samples("abc"), "autobatch.batches.Samples()"),
    (lambda: fit(device=FakeDevice(lambda n: -5, 100)), "FakeDevice"),
    (lambda: make_runner(scheduler=torch.optim.lr_scheduler.StepLR), "StepLR"),
    (lambda: autobatch.Plan.load(5), "Plan.load", "'plan.json'"),
    (lambda: autobatch.map(None, ROWS), "fn=None"),
    (lambda: autobatch.map(len, ROWS, on_result=3), "on_result=3"),
    (lambda: autobatch.map(len, ROWS, collate=list), "collate="),
    (lambda: autobatch.map(len, ROWS, to="the host"), "to='the host'", "'cpu'"),
    (lambda: autobatch.map(len, ROWS, max_piece=0), "max_piece=0"),
    (lambda: autobatch.map(len, ROWS, to="privateuseone"), "to='privateuseone'"),
    (lambda: autobatch.map(len, ROWS, device="privateuseone:0"), "device='privateuseone:0'"),
    (lambda: autobatch.map(len, ROWS, to="cuda:99"), "to='cuda:99'"),
    (lambda: autobatch.map(len, ROWS, to="meta"), "to='meta'", "'cpu'"),
    (lambda: autobatch.map(nn.Linear(2, 2, device="meta").forward, ROWS), "device="),
    (lambda: autobatch.map(torch.neg, torch.zeros(3, 4, device="meta")), "(3, 4)", "meta"),
    (lambda: autobatch.map(nn.Linear(4, 2, device="meta"), torch.zeros(3, 4), device="cpu"), "Linear", "meta"),
    (lambda: autobatch.map(lambda rows: {"x": rows.to_sparse()}, ROWS), "torch.sparse_coo", '["x"]'),
    (lambda: autobatch.map(torch.neg, ROWS, cut=autobatch.by_length([1, 2])), "by_length()"),
    (lambda: list(autobatch.map(torch.neg, iter(ROWS), cut=autobatch.by_length([1, 2]))), "by_length()"),
    (lambda: autobatch.map(torch.neg, ROWS, cut=autobatch.by_length(5)), "by_length"),
    (lambda: autobatch.map(torch.neg, ROWS, cut=autobatch.by_length(len)), "length_of()", '["attention_mask"]'),
    (
        lambda: next(autobatch.map(torch.neg, list(ROWS), cut=autobatch.by_length(lambda row: 0.5))),
        "length_of()",
        "0.5",
    ),
    (
        lambda: list(autobatch.map(torch.neg, list(ROWS), cut=autobatch.by_length(lambda row: next(iter(()))))),
        "length_of()",
        "StopIteration",
    ),
    (lambda: autobatch.map(torch.sum, ROWS), "shape ()", "2 samples"),
    (lambda: autobatch.map(lambda rows: rows.sum(1).expand(len(rows), -1), torch.zeros(5, 2)), "torch.float32"),
    (lambda: autobatch.map(lambda rows: (rows,) * len(rows), torch.zeros(5, 2)), "tuple of 3", "tuple of 2"),
    (
        lambda: autobatch.map(
            lambda rows: {"a": rows, "b": rows} if len(rows) == 2 else {"a": rows}, torch.zeros(5, 2)
        ),
        '["a"]',
        '["b"]',
    ),
    (lambda: autobatch.map(lambda rows: rows.add_(1), torch.zeros(5, 2)), "fn", "copy"),
    *(
        (lambda model=model: autobatch.predict(model, ROWS, gpu="L4"), shown, "torch.nn.Module")
        for model, shown in (
            (None, "model=None"),
            ("Linear", "model='Linear'"),
            (len, "model=a builtin_function_or_method"),
            (nn.Linear, "model=the class Linear"),
            ([nn.Linear(2, 2)], "model=a list"),
        )
    ),
]
OTHERS = [
    ("NeedsBatch", lambda: fit(model=nn.Sequential(nn.Conv2d(3, 8, 3)), batch=None, step=None), "0 (Conv2d)", "batch="),
    ("InexactSplit", lambda: fit(model=Everything(), max_micro_batch=8, check="raise"), "BatchNorm", "GroupNorm"),
    ("InexactSplit", lambda: fit(batch=make_batch(1), max_micro_batch=8, check="raise"), "check='warn'"),
    ("DoesNotFit", lambda: run_step(weigh=count_without_room), "weigh()", "OutOfMemoryError"),
    ("DoesNotFit", run_out_at_one, "OutOfMemoryError", "budget="),
    (
        "DoesNotFit",
        lambda: fit(model=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), target_batch=9, max_micro_batch=2),
        "max_micro_batch=2",
        "target_batch=9",
    ),
    ("DoesNotFit", run_odd_batch, "max_micro_batch", "BatchNorm", "max_micro_batch=3"),
    (
        "DoesNotFit",
        lambda: fit(device=FakeDevice(lambda n: 50 + 60 * n, total_bytes=100), headroom=0),
        "OutOfMemoryError",
        "budget=",
    ),
    (
        "DoesNotFit",
        lambda: autobatch.map(torch.neg, ROWS, device=FakeDevice(lambda n: 10 + 100 * n, total_bytes=100)),
        "OutOfMemoryError",
        "budget=",
    ),
]
TABLE = [*(("InvalidArgument", *row) for row in INVALID), *OTHERS]


@pytest.mark.parametrize("row", TABLE, ids=[f"{row[0]}-{row[2]}" for row in TABLE])
def test_an_error_names_what_was_passed_and_what_to_do(row):
    """One line, with the user's own inputs and the arguments or functions that help."""
    kind, call, *names = row
    with pytest.raises(errors.AutobatchError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value).__name__ == kind
    assert [name for name in names if name not in message] == []
    assert "\n" not in message
    assert len(message) <= ONE_LINE or kind == "DoesNotFit"


def test_cannot_retry_says_that_parameters_may_have_moved():
    """An OOM in the update: the message says that it was not retried, and names a remedy."""
    with pytest.raises(errors.CannotRetry) as caught:
        run_out_in_update()
    for said in ("20.00 MiB", "parameters may have moved", "step 0", "checkpoint", "headroom="):
        assert said in str(caught.value)


@pytest.mark.parametrize(("text", "place"), [("{}", "target_batch"), ("nonsense", "JSON")])
def test_a_bad_plan_file_names_the_first_thing_wrong(tmp_path, text, place):
    """The path, the field, and what to do."""
    with pytest.raises(errors.InvalidArgument) as caught:
        save_and_load(text, tmp_path)
    for said in (str(tmp_path / "plan.json"), place, "fit()"):
        assert said in str(caught.value)


def test_many_ranks_are_refused_before_anything_runs(monkeypatch):
    """Ranks that do not talk to each other must not begin."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for call in (fit, make_runner):
        with pytest.raises(errors.AutobatchError) as caught:
            call()
        for said in ("4 ranks", "Plain", "DistributedDataParallel(model)", "fully_shard(model)", "plan.settings()"):
            assert said in str(caught.value)


def test_a_wrong_first_guess_of_the_input_is_the_models_own_error():
    """The user sees the model's error, not ours, if the first layer misleads."""
    model = nn.Sequential(nn.Linear(6, 4))
    model.forward = lambda x: F.conv2d(x, torch.zeros(1, 1, 3, 3))
    with pytest.raises(RuntimeError, match="conv2d"):
        autobatch.fit(model, 4)
