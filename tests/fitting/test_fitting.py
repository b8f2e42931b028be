"""``fit``: from a model and a target to a plan that has run, with nothing left behind."""

from __future__ import annotations

import gc
import logging
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from workloads import (
    Everything,
    Plain,
    bits_of,
    differences,
    full_batch_gradient,
    gradients_of,
    make_batch,
    mean_step,
    relative_error,
)

import autobatch
from autobatch.errors import DoesNotFit
from autobatch.memory.cpu import CpuDevice
from autobatch.records import Tenant
from autobatch.step.workload import Workload
from autobatch.testing import FakeDevice


def fit_fake(curve, total, target, **options):
    """A fit of a tiny model on a fake device with this memory."""
    device = FakeDevice(
        curve, total, **{k: options.pop(k) for k in ("measures", "thrashes_from", "tenants") if k in options}
    )
    options.setdefault("headroom", 0)
    plan = autobatch.fit(Plain(), target, batch=make_batch(4, torch.float64), step=mean_step, device=device, **options)
    return plan, device


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (100, (86, 85, 85)),
        (256, (256,)),
        (1000, (256,)),
        (128, (128, 128)),
        (43, (43, 43, 43, 43, 42, 42)),
        (37, (37, 37, 37, 37, 36, 36, 36)),
        (2, (2,) * 128),
        (1, (1,) * 256),
    ],
)
def test_the_plan_has_the_fewest_steps_and_balanced_sizes(largest, sizes):
    """256 in micro-batches of at most so many: the fewest accumulation steps, then the lowest peak."""
    plan, _device = fit_fake(lambda n: 1000 + 10 * n, 1000 + 10 * largest, 256)
    assert plan.micro_batch_sizes == sizes
    assert plan.accumulation_steps == len(sizes)
    assert plan.micro_batch_size == sizes[0]
    assert plan.peak_bytes == 1000 + 10 * sizes[0]
    assert not plan.predicted


@pytest.mark.quick
@given(
    base=st.integers(0, 5000),
    slope=st.integers(1, 300),
    largest=st.integers(2, 400),
    target=st.integers(1, 400),
)
def test_on_linear_memory_four_trials_and_no_oom(base, slope, largest, target):
    """On memory that grows linearly at most 4 trials, none out of memory, and the exact answer."""
    plan, _ = fit_fake(lambda n: base + slope * n, base + slope * largest, target)
    assert len(plan.trials) <= 4
    assert plan.out_of_memory_trials == 0
    assert plan.accumulation_steps == -(-target // min(largest, target))


@pytest.mark.quick
@given(st.data())
def test_the_plans_size_has_always_run(data):
    """Whatever memory does, the size in the plan is one of the trials that fit, or fit raises."""
    target = data.draw(st.integers(1, 60))
    fits = data.draw(st.lists(st.booleans(), min_size=61, max_size=61))
    try:
        plan, _ = fit_fake(lambda n: 10 if n == 0 or fits[n] else 10**6, 100, target, measures=data.draw(st.booleans()))
    except DoesNotFit:
        return
    assert plan.micro_batch_size in {t.micro_batch_size for t in plan.trials if t.outcome == "fits"}
    assert sum(plan.micro_batch_sizes) == target
    assert len({t.micro_batch_size for t in plan.trials}) == len(plan.trials)


def test_a_device_that_cannot_measure_is_searched_by_running_out():
    """Binary search by catching out-of-memory errors, with a plan that says what it does not know."""
    plan, _ = fit_fake(lambda n: n, 100, 256, measures=False)
    assert plan.micro_batch_sizes == (86, 85, 85)
    assert plan.out_of_memory_trials >= 1
    assert plan.curve is None
    assert "peak not measured" in str(plan)
    assert "does not report its memory" in plan.explain()


def test_a_sample_that_does_not_fit_says_what_was_needed_and_who_is_there():
    """DoesNotFit names the need, the limit, the other process and what would help."""
    tenant = Tenant(pid=4711, used_bytes=3 * 2**30, name="python train.py")
    with pytest.raises(DoesNotFit) as caught:
        fit_fake(lambda n: 2**30 + n * 2**30, 4 * 2**30, 256, tenants=[tenant])
    text = str(caught.value)
    for part in (
        "1 sample",
        "fake device",
        "1.0 GiB",
        "process 4711 (python train.py) holds 3.0 GiB",
        "what would help",
    ):
        assert part in text, part


@pytest.mark.parametrize("batch_form", ["tensors", "loader", "dataset"])
def test_a_real_budget_on_the_cpu_is_kept(batch_form):
    """Inside a budget in which the target does not fit, every step of the runner stays below it."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(512, 64), torch.randint(0, 4, (512,)))
    batch = {"tensors": data[:256], "loader": DataLoader(data, batch_size=32), "dataset": data}[batch_form]
    whole = data[:256]
    CpuDevice().watch(whole)
    gc.collect()
    budget = CpuDevice().usage().allocated + 2_250_000
    plan = autobatch.fit(model, 256, batch=batch, step=mean_step, optimizer=optimizer, budget=budget)
    assert 1 < plan.accumulation_steps < 128
    assert plan.peak_bytes <= plan.limit_bytes < plan.budget_bytes == budget
    runner = autobatch.Runner(plan, model, mean_step, optimizer)
    for _ in range(3):
        result = runner.step(whole)
        assert result.peak_bytes <= budget
        assert result.micro_batch_sizes == plan.micro_batch_sizes
        assert result.retries == 0


@pytest.mark.quick
@pytest.mark.parametrize("earlier_steps", [0, 2])
@pytest.mark.parametrize("budget", [None, "tight"])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, None, lambda p: torch.optim.SGD(p, lr=0.1)], ids=["adamw", "none", "sgd"]
)
def test_fit_leaves_no_trace(make, budget, earlier_steps):
    """Bit for bit as before: weights, all buffers, .grad, optimizer state and counters, generators, modes, hooks."""
    model = Everything()
    model.norm.eval()
    model.head.register_forward_hook(lambda *_: None)
    optimizer = make([p for p in model.parameters() if p.requires_grad]) if make else None
    for _ in range(earlier_steps):
        mean_step(model, make_batch(8)).backward()
        if optimizer is not None:
            optimizer.step()
    device = CpuDevice()
    device.watch(Workload(model, mean_step, None, optimizer).resident_tensors())
    limit = None if budget is None else device.usage().allocated + 60_000
    before = bits_of(model, optimizer)
    gc.collect()
    held = device.usage().allocated
    batch = make_batch(64)
    autobatch.fit(model, 64, batch=batch, step=mean_step, optimizer=optimizer, budget=limit)
    assert not differences(bits_of(model, optimizer), before)
    del batch
    gc.collect()
    assert device.usage().allocated == held


def test_fit_that_does_not_fit_leaves_no_trace_either():
    """A refusal restores as much as a success."""
    model = Everything()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = bits_of(model, optimizer)
    device = CpuDevice()
    device.watch([*model.parameters(), *model.buffers()])
    with pytest.raises(DoesNotFit, match="CPU out of memory"):
        autobatch.fit(
            model, 64, batch=make_batch(4), step=mean_step, optimizer=optimizer, budget=device.usage().allocated + 500
        )
    assert not differences(bits_of(model, optimizer), before)


def drop_own_gradients(model):
    """As ``zero_grad`` does, by hand."""
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("target", [8, 1], ids=["split", "one sample"])
@pytest.mark.parametrize("drop", [nn.Module.zero_grad, drop_own_gradients], ids=["zero_grad", "by hand"])
def test_a_step_that_drops_gradients_is_refused(drop, target):
    """The first micro-batch finds none, so only the second one of a trial, or of a check, shows it."""
    model, batch = Plain(), make_batch(8, torch.float64)

    def step(model, batch):
        drop(model)
        return mean_step(model, batch)

    refused = r"the step changed \.grad: return the loss only, and leave backward\(\) and zero_grad\(\) to autobatch"
    with pytest.raises(autobatch.InvalidArgument, match=refused):
        autobatch.fit(model, target, batch=batch, step=step, max_micro_batch=4, check=None, reuse=False)
    with pytest.raises(autobatch.InvalidArgument, match=refused):
        autobatch.verify(model, batch, step)


@pytest.mark.quick
def test_an_error_of_the_users_step_comes_out_unchanged():
    """A bug is not an OOM: it comes out as it was raised, and the state is restored."""
    model = Everything()
    before = bits_of(model)
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x6 and 7x8)")

    def step(model, batch):
        mean_step(model, batch)
        raise error

    with pytest.raises(RuntimeError) as caught:
        autobatch.fit(model, 64, batch=make_batch(4), step=step)
    assert caught.value is error
    assert not differences(bits_of(model), before)


def test_a_model_whose_first_layer_tells_needs_no_batch():
    """``fit(model, target_batch=256)`` with nothing else works, and says what it assumed."""
    plan = autobatch.fit(nn.Sequential(nn.Linear(12, 3), nn.Tanh()), target_batch=256)
    assert plan.micro_batch_sizes == (256,)
    text = plan.explain()
    assert "no batch= was given" in text
    assert "no step= was given" in text
    assert "no optimizer= was given" in text


def test_batch_norm_is_warned_of_only_when_the_batch_is_split():
    """The one common layer that no weighting makes exact is named in the plan."""
    model = Everything()
    split = autobatch.fit(model, 64, batch=make_batch(8), step=mean_step, max_micro_batch=16)
    [warning] = [w for w in split.warnings if "BatchNorm" in w]
    assert "(norm)" in warning
    assert warning == str(split.verdict)
    whole = autobatch.fit(model, 64, batch=make_batch(8), step=mean_step)
    assert not [w for w in whole.warnings if "BatchNorm" in w]


def test_a_batch_norm_that_refuses_one_sample_is_never_asked():
    """BatchNorm on single values raises at one sample: a search that tried it would report the user's error."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    plan = autobatch.fit(model, 64, batch=make_batch(8), step=mean_step)
    assert plan.micro_batch_sizes == (64,)


def test_a_model_in_eval_mode_is_tried_in_train_mode_and_put_back():
    """Training needs more memory than evaluation, so that is what is measured; the mode is as before afterwards."""
    model = Everything().eval()
    plan = autobatch.fit(model, 16, batch=make_batch(8), step=mean_step)
    assert any("eval mode" in warning for warning in plan.warnings)
    assert not any(module.training for module in model.modules())


def test_variable_lengths_are_tried_with_the_largest_samples():
    """A loader's largest samples are what every size is made from, so a longer batch is no surprise."""

    class Texts(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.randn(1 + 7 * index % 40, 6)

    widths = []

    def step(model, batch):
        widths.append(batch.shape[1])
        return model(batch.flatten(0, 1)).square().mean()

    def pad(samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    loader = DataLoader(Texts(), batch_size=4, collate_fn=pad)
    autobatch.fit(Plain(torch.float32), 32, batch=loader, step=step)
    assert set(widths) == {40}


def test_the_objective_memory_takes_the_smallest_size_that_is_as_fast():
    """With equal speed at every size, the smallest measured one is enough."""
    plan, _ = fit_fake(lambda n: 1000 + n, 10**6, 64, objective="memory")
    assert plan.micro_batch_size <= 64
    assert plan.micro_batch_size in {trial.micro_batch_size for trial in plan.trials}
    best = max(trial.samples_per_second for trial in plan.trials)
    [chosen] = [trial for trial in plan.trials if trial.micro_batch_size == plan.micro_batch_size]
    assert chosen.samples_per_second >= 0.98 * best


@pytest.mark.quick
def test_one_log_line_a_plan(caplog):
    """A fit logs its plan in one line, at INFO, and prints nothing."""
    with caplog.at_level(logging.INFO, logger="autobatch"):
        plan, _ = fit_fake(lambda n: 100 + n, 1000, 256)
    assert [record.getMessage() for record in caplog.records] == [str(plan).removeprefix("autobatch: ")]


def test_progress_is_one_line_a_trial_on_a_terminal(capsys, monkeypatch):
    """On a terminal each trial is a line on stderr; elsewhere there is silence."""
    fit_fake(lambda n: 100 + n, 180, 256)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    plan, _ = fit_fake(lambda n: 100 + n, 180, 256)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", printed.err).splitlines()
    lines = [line for line in lines if line.startswith("autobatch: ") and "━" not in line]  # without those of the bar
    assert len(lines) == len(plan.trials) + 1  # and one as the check begins
    fit_fake(lambda n: 100 + n, 180, 256, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "SGD"])
def test_memory_that_ends_in_the_first_update_is_an_outcome(name):
    """Half an optimizer state was made, on which the next trial's step would stumble; its hooks stay silent too."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    reported, ends = [], set()
    for kibibytes in range(200, 800, 100):
        optimizer = getattr(torch.optim, name)(model.parameters())
        optimizer.register_step_post_hook(lambda *_: reported.append("stepped"))
        try:
            autobatch.fit(model, 8, batch=torch.zeros(4, 64), optimizer=optimizer, budget=f"{kibibytes}KiB")
            ends.add("fits")
        except DoesNotFit:
            ends.add("does not fit")
        assert optimizer.state == {}
    assert ends == {"fits", "does not fit"}
    assert reported == []


class TwoParts(torch.optim.Optimizer):
    """Makes its state inside its step, in two parts, between which memory ends once."""

    def __init__(self, parameters, failures):
        super().__init__(parameters, {"lr": 0.1})
        self.fail = failures.pop

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            entry = self.state[parameter]
            if not entry:
                entry["first"] = torch.zeros_like(parameter)
                with suppress(IndexError):
                    raise self.fail()
                entry["second"] = torch.zeros_like(parameter)
            entry["second"].add_(parameter.grad)
            parameter.sub_(entry["second"], alpha=self.param_groups[0]["lr"])


def test_half_an_optimizers_state_is_dropped_before_the_next_trial():
    """Of an optimizer that would take the half for the whole, and fail with an error of its own."""
    model, failures = Plain(), [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")]
    optimizer = TwoParts(model.parameters(), failures)
    plan = autobatch.fit(model, 16, batch=make_batch(8, torch.float64), step=mean_step, optimizer=optimizer)
    assert not failures
    assert plan.trials
    assert not optimizer.state


def test_a_process_without_a_stderr_fits(monkeypatch):
    """A daemon has none, and ``progress`` is the default."""
    monkeypatch.setattr("sys.stderr", None)
    assert fit_fake(lambda n: 100 + n, 180, 256)[0].trials


def test_a_budget_above_what_is_there_is_cut_and_said():
    """A budget that the machine does not have cannot be promised."""
    plan = autobatch.fit(Plain(torch.float32), 16, batch=make_batch(4), step=mean_step, budget="4000GiB")
    assert plan.budget_bytes < 4000 * 2**30
    assert any("4000GiB" in warning for warning in plan.warnings)


def test_weights_are_not_trained_by_a_scheduler_or_a_hooked_optimizer():
    """A scheduler's wrapper around ``optimizer.step`` and the optimizer's hooks are as they were."""
    model = Plain(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    attributes = dict(vars(optimizer))
    autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, optimizer=optimizer)
    assert calls == []
    assert not optimizer.state
    assert dict(vars(optimizer)) == attributes
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert scheduler.last_epoch == 0


def test_frozen_models_name_the_loss_without_a_graph():
    """Nothing to train is the step's error, said plainly."""
    model = Plain(torch.float32).requires_grad_(False)
    with pytest.raises(autobatch.InvalidArgument, match="every parameter is frozen"):
        autobatch.fit(model, 16, batch=make_batch(4), step=mean_step)


def test_autocast_and_no_grad_of_the_caller_do_not_matter():
    """Trials need gradients whatever mode the caller is in."""
    with torch.no_grad():
        plan = autobatch.fit(Plain(torch.float32), 16, batch=make_batch(4), step=mean_step)
    assert plan.trials[0].outcome == "fits"


@pytest.mark.parametrize("heights", [(5, 5, 5, 5), (4, 5, 6, 7)])
@pytest.mark.parametrize("boxes", [(3, 3, 3, 3), (1, 2, 3, 1)])
@pytest.mark.parametrize("largest", [1, 2, 3, 8])
def test_detection_batches_are_tried_and_run_as_samples(heights, boxes, largest):
    """Lists of images and targets are samples at every size, also where their own sizes agree by chance."""
    model = nn.Linear(3, 4)
    images = [torch.randn(3, height, 6) for height in heights]
    targets = [{"boxes": torch.randn(count, 4)} for count in boxes]

    def step(model, batch):
        losses = [
            (model(image.mean(dim=(1, 2))) - target["boxes"].mean(dim=0)).square().mean()
            for image, target in zip(*batch, strict=True)
        ]
        return torch.stack(losses).mean()

    batch = (images, targets)
    if len(set(heights)) == 1 and len(set(boxes)) == 1:
        batch = (torch.stack(images), targets)
    expected = full_batch_gradient(model, step, batch)
    plan = autobatch.fit(model, 8, batch=batch, step=step, max_micro_batch=largest)
    runner = autobatch.Runner(plan, model, step, None)
    assert sum(runner.accumulate(batch).micro_batch_sizes) == 4
    assert relative_error(gradients_of(model), expected) <= 1e-5


def test_the_default_budget_counts_what_the_process_holds():
    """The model's own bytes are part of the budget from the first call on, as they are from the second."""
    model = nn.Linear(1000, 1000)
    held = []

    class Watches(CpuDevice):
        def available_bytes(self):
            held.append(self.usage().allocated)
            return super().available_bytes()

    device = Watches()
    device.reclaim()
    before = device.usage().allocated
    autobatch.fit(model, 4, batch=torch.zeros(4, 1000), step=lambda m, x: m(x).mean(), device=device)
    assert held[0] >= before + 4_000_000


def test_an_example_whose_first_samples_weigh_nothing_is_tried_all_the_same():
    """Memory does not depend on which labels count."""
    inputs, labels = make_batch(64)
    labels[:3] = -100

    def step(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100)

    plan = autobatch.fit(
        Plain(torch.float32), 64, batch=(inputs, labels), step=step, weigh=lambda b: (b[1] != -100).sum()
    )
    assert plan.micro_batch_sizes == (64,)


def test_what_a_step_returns_beside_the_loss_is_warned_of():
    """Trials hold two micro-batches' worth of it, a step that of all."""

    def step(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    plan = autobatch.fit(Plain(torch.float32), 64, batch=make_batch(64), step=step, max_micro_batch=8)
    assert any("128 bytes beside each loss" in warning and "8 x that" in warning for warning in plan.warnings)


def test_an_inexact_split_is_a_warning_in_the_log(caplog):
    """Nobody reads plan.warnings unasked: the plan's log line carries what makes the split inexact."""
    with caplog.at_level(logging.INFO, logger="autobatch"):
        plan = autobatch.fit(Everything(), 64, batch=make_batch(8), step=mean_step, max_micro_batch=16)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(str(plan).removeprefix("autobatch: "))
    assert "BatchNorm" in record.getMessage()


def test_a_fit_called_while_an_oom_is_handled_tells_a_bug_from_an_oom():
    """That OOM is in the context of every later error, and none of them is one for it."""

    def step(model, batch):
        raise ValueError("shape bug")

    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="shape bug"):
            autobatch.fit(Plain(torch.float32), 8, batch=make_batch(8), step=step)


def test_the_runner_reads_lists_as_the_plans_example_was_read():
    """Texts of unequal lengths are samples; a batch in which all lengths agree by chance is read the same way."""
    model = nn.Linear(6, 1)

    def step(model, batch):
        return torch.stack([model(text).square().mean() for text in batch["texts"]]).mean()

    example = {"texts": [torch.randn(length, 6) for length in (3, 9, 5, 7)]}
    plan = autobatch.fit(model, 11, batch=example, step=step, max_micro_batch=4)
    plan = autobatch.Plan.model_validate_json(plan.model_dump_json())
    batch = {"texts": [torch.randn(9, 6) for _ in range(11)]}
    expected = full_batch_gradient(model, step, batch)
    result = autobatch.Runner(plan, model, step, None).accumulate(batch)
    assert sum(result.micro_batch_sizes) == 11
    assert relative_error(gradients_of(model), expected) <= 1e-5


def test_an_expensive_whole_batch_is_left_out_and_said():
    """A batch that would fill the device by itself is not held whole in the trials, and the plan says what to do."""
    device = CpuDevice()
    gc.collect()
    model = nn.Linear(1000, 2)
    device.watch(model.parameters())
    budget = device.usage().allocated + 3_000_000
    plan = autobatch.fit(
        model, 1000, batch=torch.zeros(2, 1000), step=lambda m, x: m(x).mean(), budget=budget, optimizer=None
    )
    assert any("runner.step_over()" in warning for warning in plan.warnings)
    assert plan.accumulation_steps > 1
