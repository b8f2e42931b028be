"""``Runner``: one exact optimizer step after another, also when the device runs out of memory."""

import gc
import logging
import os
import signal
import sys
from contextlib import nullcontext

import plans
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
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
from autobatch.errors import CannotRetry, DoesNotFit, InvalidArgument
from autobatch.events import Retried, SizeChanged, StepFailed, StepFinished
from autobatch.memory.cpu import CpuDevice
from autobatch.testing import FakeDevice, oom_at, tenant
from autobatch.undo.gradients import EarlierGradients, Float32Sums
from autobatch.undo.undo import Undo


def make_plan(model, target, largest, *, step=mean_step, optimizer=None, dtype=torch.float32):
    """A plan with micro-batches of at most so many."""
    return autobatch.fit(
        model, target, batch=make_batch(8, dtype), step=step, optimizer=optimizer, max_micro_batch=largest, check=None
    )


def make_runner(target, largest, *, make_model=Plain, dtype=torch.float64, lr=0.1, **options):
    """Model, optimizer and a runner with a plan of this form."""
    model = make_model(dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    plan = make_plan(model, target, largest, optimizer=optimizer, dtype=dtype)
    return model, optimizer, autobatch.Runner(plan, model, mean_step, optimizer, **options)


@given(target=st.integers(1, 40), largest=st.integers(1, 40))
def test_accumulate_gives_the_full_batchs_gradient(target, largest):
    """For any target and micro-batch size ``.grad`` is the oracle's, and nothing is updated."""
    model, optimizer, runner = make_runner(target, largest)
    batch = make_batch(target, torch.float64)
    expected = full_batch_gradient(model, mean_step, batch)
    result = runner.accumulate(batch)
    assert relative_error(gradients_of(model), expected) <= 1e-12
    assert result.micro_batch_sizes == runner.plan.micro_batch_sizes
    assert not optimizer.state
    assert float(result.loss) == pytest.approx(mean_step(model, batch).item(), rel=1e-12)


@pytest.mark.parametrize("with_oom", [False, True])
def test_a_step_is_the_full_batchs_step(with_oom):
    """Three steps move the parameters as three full-batch steps do, also with memory ending in one of them."""
    torch.manual_seed(0)
    model, _, runner = make_runner(24, 7)
    reference = Plain()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        batch = make_batch(24, torch.float64, seed)
        optimizer.zero_grad()
        mean_step(reference, batch).backward()
        optimizer.step()
        if with_oom and seed == 1:
            with oom_at(25):
                assert runner.step(batch).retries == 1
        else:
            assert runner.step(batch).retries == 0
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.quick
def test_the_optimizer_steps_exactly_once_and_gradients_are_gone():
    """One ``optimizer.step()`` and one ``scheduler.step()`` a step, whatever the retries; ``.grad`` is None after."""
    calls = []
    model, optimizer, _ = make_runner(16, 4)
    optimizer.register_step_post_hook(lambda *_: calls.append("optimizer"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    plan = make_plan(model, 16, 4, optimizer=optimizer, dtype=torch.float64)
    runner = autobatch.Runner(plan, model, mean_step, optimizer, scheduler=scheduler)
    with oom_at(20):
        result = runner.step(make_batch(16, torch.float64))
    assert result.retries == 1
    assert calls == ["optimizer"]
    assert scheduler.last_epoch == 1
    assert all(gradient is None for gradient in gradients_of(model).values())


def test_the_smaller_size_is_kept_for_one_clean_step_and_told():
    """After a retry the next step begins with the size that ran, the one after it with the plan's; each an event."""
    events = []
    _model, _, runner = make_runner(16, 8, hooks=[events.append])
    with oom_at(15):
        runner.step(make_batch(16, torch.float64))
    [retry] = [event for event in events if isinstance(event, Retried)]
    assert (retry.step, retry.failed_size) == (0, 8)
    assert retry.new_size == runner.micro_batch_size < 8
    assert "planned out of memory" in retry.reason
    result = runner.step(make_batch(16, torch.float64))
    assert max(result.micro_batch_sizes) <= retry.new_size
    assert runner.micro_batch_size == 8
    assert max(runner.step(make_batch(16, torch.float64)).micro_batch_sizes) == 8
    assert [event.step for event in events if isinstance(event, StepFinished)] == [0, 1, 2]
    assert [(event.step, event.new_size) for event in events if isinstance(event, SizeChanged)] == [(2, 8)]


@pytest.mark.quick
def test_one_log_line_a_retry(caplog):
    """A retry is one line at WARNING with sizes, bytes and reason; steps are DEBUG."""
    _, _, runner = make_runner(16, 8)
    with caplog.at_level(logging.INFO, logger="autobatch"), oom_at(15):
        runner.step(make_batch(16, torch.float64))
    [line] = [record for record in caplog.records if record.name == "autobatch"]
    assert line.levelno == logging.WARNING
    assert "ran out of memory at 8 samples" in line.getMessage()


def make_tight_runner(events, **options):
    """A runner whose budget divides its batch of 256, that batch, and the budget."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(256, 64), torch.randint(0, 4, (256,)))
    CpuDevice().watch([*model.parameters(), *batch])
    gc.collect()
    budget = CpuDevice().usage().allocated + 1_250_000
    step = options.pop("step", mean_step)
    plan = autobatch.fit(model, 256, batch=batch, step=mean_step, optimizer=optimizer, budget=budget)
    return autobatch.Runner(plan, model, step, optimizer, hooks=[events.append], **options), batch, budget


def test_the_curve_chooses_the_next_size():
    """When somebody takes memory in the middle of a step, what the curve says still fits is tried, not half."""
    events, held = [], []

    def step(model, part):
        if not held:
            held.append(torch.empty(320_000, dtype=torch.uint8))
        return mean_step(model, part)

    runner, batch, budget = make_tight_runner(events, step=step)
    results = [runner.step(batch) for _ in range(3)]
    retries = [event for event in events if isinstance(event, Retried)]
    assert len(retries) == 1
    assert runner.plan.micro_batch_size // 2 <= retries[0].new_size < runner.plan.micro_batch_size
    assert all(result.peak_bytes <= budget for result in results)
    assert [sum(result.micro_batch_sizes) for result in results] == [256] * 3


def test_a_step_shrinks_first_when_less_is_free_and_grows_back_later():
    """A tenant between two steps costs no OOM; when it has gone, the plan's size is back in the next step."""
    events = []
    runner, batch, budget = make_tight_runner(events)
    runner.step(batch)
    with tenant(320_000):
        results = [runner.step(batch) for _ in range(3)]
    assert [result.retries for result in results] == [0, 0, 0]
    assert all(result.peak_bytes <= budget for result in results)
    [change] = [event for event in events if isinstance(event, SizeChanged)]
    assert (change.step, change.old_size, change.reason) == (1, runner.plan.micro_batch_size, "less is free")
    assert max(results[0].micro_batch_sizes) <= change.new_size == runner.micro_batch_size
    assert runner.step(batch).micro_batch_sizes == runner.plan.micro_batch_sizes
    grown = [event for event in events if isinstance(event, SizeChanged)][1:]
    assert {event.reason for event in grown} == {"grown back"}
    assert not any(isinstance(event, Retried) for event in events)


def test_thrash_in_two_steps_running_shrinks_the_next_one():
    """The step that crawled is not run again: each batch is one update, and the third has smaller pieces."""
    events = []
    model, optimizer, _ = make_runner(16, 8)
    gpu = FakeDevice(lambda n: 100 + n, "1KiB", thrashes_from=10**9)
    plan = autobatch.fit(
        model,
        16,
        batch=make_batch(8, torch.float64),
        step=mean_step,
        optimizer=optimizer,
        device=gpu,
        max_micro_batch=8,
        check=None,
    )
    runner = autobatch.Runner(plan, model, mean_step, optimizer, device=gpu, hooks=[events.append])
    gpu.thrashes_from = 8
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    results = [runner.step(make_batch(16, torch.float64)) for _ in range(3)]
    assert [max(result.micro_batch_sizes) for result in results][:2] == [8, 8]
    assert max(results[2].micro_batch_sizes) < 8
    assert len(steps) == 3
    assert [event.reason for event in events if isinstance(event, SizeChanged)] == ["thrash"]


def test_a_batch_with_nothing_to_count_is_skipped_and_said(caplog):
    """No update, no scheduler step, no change, earlier gradients included: a result that says so and one warning."""
    model, optimizer, _ = make_runner(8, 4)
    mean_step(model, make_batch(5, torch.float64)).backward()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    plan = make_plan(model, 8, 4, optimizer=optimizer, dtype=torch.float64)
    runner = autobatch.Runner(plan, model, mean_step, optimizer, weigh=lambda batch: 0.0, scheduler=scheduler)
    before = bits_of(model, optimizer)
    with caplog.at_level(logging.INFO, logger="autobatch"):
        result = runner.step(make_batch(8, torch.float64))
    assert result.skipped
    assert torch.isnan(result.loss)
    assert (result.micro_batch_sizes, runner.steps, scheduler.last_epoch) == ((), 0, 0)
    assert not differences(bits_of(model, optimizer), before)
    assert "step 0 was skipped: nothing counts in its 8 samples" in caplog.text


def make_update(*, scaled, plan=None):
    """A model with gradients from before, its optimizer, and a runner that clips and may scale."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    plan = plan or make_plan(model, 8, 4, optimizer=optimizer)
    runner = autobatch.Runner(plan, model, mean_step, optimizer, scaler=scaler, max_grad_norm=0.1)
    model.unused.weight.grad = torch.ones(3, 3)
    mean_step(model, make_batch(5)).backward()
    return model, optimizer, runner


@pytest.mark.quick
@pytest.mark.parametrize("scaled", [False, True])
def test_an_oom_before_the_optimizers_step_undoes_the_step(scaled):
    """State, room, unscaling and clipping can still be undone, and a scaler can be used again at once."""
    model, optimizer, runner = make_update(scaled=scaled)
    passes, ends = [], []
    with oom_at(10**9) as counted:
        note = lambda _: passes.append(counted.operations)  # noqa: E731 - one line of a list
        model.head.register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(note) and None)
        optimizer.register_step_pre_hook(lambda *_: ends.append(counted.operations))
        runner.step(make_batch(8))
    model, optimizer, runner = make_update(scaled=scaled, plan=runner.plan)
    before, undone = bits_of(model, optimizer), 0
    for position in range(passes[-1] + 1, ends[0] + 1, 2):  # tests/training/test_faults.py tries all, without a scaler
        with oom_at(position):
            try:
                runner.step(make_batch(8))
            except DoesNotFit:
                undone += 1
            except CannotRetry:  # GradScaler.step() reads whether there were infinities before it calls the optimizer
                assert scaled
                model, optimizer, runner = make_update(scaled=scaled, plan=runner.plan)
            else:  # the first layers' backward pass comes after that of the head
                model, optimizer, runner = make_update(scaled=scaled, plan=runner.plan)
        assert not differences(forget_objects(bits_of(model, optimizer)), forget_objects(before))
    assert undone >= 8
    assert runner.step(make_batch(8)).retries == 0


def forget_objects(bits):
    """Without the identity of gradients, which another model of the same seed does not share."""
    return {key: value for key, value in bits.items() if not key.startswith("gradient object")}


def test_a_loop_inside_autocast_trains_as_one_that_enters_it_each_step():
    """Autocast keeps the weights' casts to the end of its block: after an update they are those of old weights."""
    losses = []
    for around in ("loop", "step"):
        torch.manual_seed(0)
        model = Plain(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        runner = autobatch.Runner(make_plan(model, 8, 4, optimizer=optimizer), model, mean_step, optimizer)
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "loop"):
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(float(runner.step(make_batch(8)).loss))
    assert losses[:4] == losses[4:]
    assert losses[3] < losses[0]


@pytest.mark.quick
def test_a_step_that_never_fits_restores_all_and_raises():
    """Out of memory at the fewest samples: DoesNotFit, and parameters, buffers, gradients, generators are as before."""
    model = Everything()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    device = FakeDevice(lambda n: 10 + n, total_bytes=100)
    plan = autobatch.fit(
        model, 32, batch=make_batch(8), step=mean_step, optimizer=optimizer, device=device, max_micro_batch=8
    )
    runner = autobatch.Runner(plan, model, mean_step, optimizer, device=device)
    runner.step(make_batch(32))
    mean_step(model, make_batch(3)).backward()
    before = bits_of(model, optimizer)
    device.curve = lambda n: 101
    with pytest.raises(DoesNotFit, match="at a micro-batch of 2 samples, the fewest it can have") as caught:
        runner.step(make_batch(32))
    assert not differences(bits_of(model, optimizer), before)  # no forward pass ran: the device refused before it
    assert runner.micro_batch_size == 8
    assert "budget" in str(caught.value)
    device.curve = lambda n: 10 + n
    assert runner.step(make_batch(32)).retries == 0


def test_an_oom_inside_the_update_says_that_parameters_may_have_moved():
    """Nothing after the optimizer's first operation is retried: CannotRetry says so plainly, and once."""

    class EndsInStep(torch.optim.SGD):
        armed = False
        calls = 0

        def step(self, closure=None):
            type(self).calls += self.armed
            super().step(closure)
            if self.armed:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    model = Plain()
    optimizer = EndsInStep(model.parameters(), lr=0.1)
    runner = autobatch.Runner(
        make_plan(model, 8, 4, optimizer=optimizer, dtype=torch.float64), model, mean_step, optimizer
    )
    EndsInStep.armed = True
    with pytest.raises(CannotRetry, match="parameters may have moved"):
        runner.step(make_batch(8, torch.float64))
    assert EndsInStep.calls == 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["optimizer", "scheduler"])
def test_a_gradient_that_was_in_an_update_is_in_no_other(where, scaled):
    """Whatever the update raises once it has begun: the step after it is that of its own batch alone."""
    torch.manual_seed(0)
    model = Plain(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    plan = make_plan(model, 8, 4, optimizer=optimizer)
    runner = autobatch.Runner(plan, model, mean_step, optimizer, scheduler=scheduler, scaler=scaler)
    batch, kept = make_batch(8), {name: value.clone() for name, value in model.state_dict().items()}
    runner.step(batch)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    broken, error = {"optimizer": (optimizer, torch.OutOfMemoryError), "scheduler": (scheduler, ValueError)}[where]
    model.load_state_dict(kept)
    broken.step = fail_with(error("planned"))
    with pytest.raises(CannotRetry if where == "optimizer" else ValueError, match="planned"):
        runner.step(batch)
    del broken.step
    assert all(gradient is None for gradient in gradients_of(model).values())
    model.load_state_dict(kept)
    runner.step(batch)
    assert not differences(dict(model.state_dict()), expected)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("where", ["optimizer", "scheduler"])
def test_an_interrupt_in_the_update_says_that_it_had_begun(where):
    """A program that catches it and continues has to know that parameters may have moved."""
    model, optimizer, runner = make_runner(8, 4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    runner = autobatch.Runner(runner.plan, model, mean_step, optimizer, scheduler=scheduler)
    {"optimizer": optimizer, "scheduler": scheduler}[where].step = fail_with(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        runner.step(make_batch(8, torch.float64))
    assert [note for note in caught.value.__notes__ if note.startswith("the update had begun: ")]


@pytest.mark.parametrize("where", ["before the optimizer", "inside the optimizer", "after the optimizer"])
@pytest.mark.parametrize("update", [True, False], ids=["step", "accumulate"])
def test_ctrl_c_after_the_commit_finds_a_step_that_is_made_and_counted(monkeypatch, where, update):
    """A loop that catches it and continues, or saves a checkpoint, has neither half an update nor one too many."""

    def send_then_run(function):
        return lambda *arguments, **options: (os.kill(os.getpid(), signal.SIGINT), function(*arguments, **options))[1]

    runs = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model, optimizer, runner = make_runner(8, 4)
        do = runner.step if update else runner.accumulate
        do(make_batch(8, torch.float64))
        with monkeypatch.context() as patched:
            if is_interrupted:
                owner, name = {
                    "before the optimizer": (Undo, "release"),
                    "inside the optimizer": (optimizer, "step") if update else (EarlierGradients, "settle"),
                    "after the optimizer": (torch, "clear_autocast_cache") if update else (Float32Sums, "end"),
                }[where]
                patched.setattr(owner, name, send_then_run(getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
                do(make_batch(8, torch.float64, seed=1))
        assert runner.steps == 2
        do(make_batch(8, torch.float64, seed=2))
        runs.append(bits_of(model, optimizer))
    assert not [name for name in differences(*runs) if "object" not in name]  # other models, other objects


def fail_with(error):
    """A function that raises, whatever it is given."""

    def fail(*arguments, **options):
        raise error

    return fail


def test_clipping_is_of_the_whole_gradient():
    """The norm is that of the full batch's gradient, taken once, not of each micro-batch's."""
    model, _, _ = make_runner(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = make_plan(model, 16, 4, optimizer=optimizer, dtype=torch.float64)
    batch = make_batch(16, torch.float64)
    gradient = {k: v for k, v in full_batch_gradient(model, mean_step, batch).items() if v is not None}
    norm = sum(float(v.square().sum()) for v in gradient.values()) ** 0.5
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    autobatch.Runner(plan, model, mean_step, optimizer, max_grad_norm=norm / 3).step(batch)
    for name, value in gradient.items():
        torch.testing.assert_close(dict(model.named_parameters())[name], before[name] - value / 3, rtol=1e-4, atol=1e-9)


def test_a_scaler_scales_each_loss_and_updates_once():
    """Scaled per micro-batch, unscaled, clipped, stepped and updated once: the update is that without a scaler."""
    updates = []

    class Counts(torch.amp.GradScaler):
        def update(self, new_scale=None):
            updates.append(self.get_scale())
            super().update(new_scale)

    model, _, plain = make_runner(16, 4, dtype=torch.float32, make_model=Plain)
    twin = Plain(torch.float32)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    plan = make_plan(twin, 16, 4, optimizer=optimizer)
    scaled = autobatch.Runner(plan, twin, mean_step, optimizer, scaler=Counts("cpu", init_scale=1024.0))
    batch = make_batch(16)
    first, second = plain.step(batch), scaled.step(batch)
    assert float(first.loss) == pytest.approx(float(second.loss), rel=1e-6)
    for found, expected in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert updates == [1024.0]


@pytest.mark.parametrize("kind", [autobatch.Mean, autobatch.Sum])
def test_a_first_micro_batch_with_few_tokens_does_not_overflow_every_step(kind):
    """Its count says little of the others': losses in float16 were multiplied by 400."""
    inputs, labels = 3 * torch.randn(40, 6), torch.randint(3, (40, 200))
    labels[:10] = -100
    labels[0, 0] = 1

    def step(model, batch):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(batch[0])[:, :, None].expand(-1, -1, 200)
        count = (batch[1] != -100).sum()
        loss = F.cross_entropy(logits.float(), batch[1], reduction="mean" if kind is autobatch.Mean else "sum")
        return kind(loss, count)

    model, scaler = nn.Linear(6, 3), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    plan = plans.make_plan(40, 10, **{**plans.SMALL, "budget_bytes": 2**30})
    runner = autobatch.Runner(plan, model, step, torch.optim.SGD(model.parameters(), 1e-3), scaler=scaler)
    scales = []
    for _ in range(6):
        runner.step((inputs, labels))
        scales.append(scaler.get_scale())
    assert scales[0] == scales[-1]


def test_a_step_skipped_by_the_scaler_does_not_advance_the_scheduler():
    """Infinite gradients skip the update; then the learning rate must not move on."""
    model = Plain(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_plan(model, 8, 4, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model, batch):
        return mean_step(model, batch) * float("inf")

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    runner = autobatch.Runner(plan, model, step, optimizer, scaler=scaler, scheduler=scheduler)
    before = [p.detach().clone() for p in model.parameters()]
    runner.step(make_batch(8))
    assert scheduler.last_epoch == 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 512.0


def test_the_result_says_what_was_done():
    """Loss detached on the device, sizes, peak, seconds, aux; metrics are plain numbers under autobatch/."""
    model, _, runner = make_runner(16, 5)

    def step(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), {"right": (logits.argmax(1) == batch[1]).sum()}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = autobatch.Runner(runner.plan, model, step, optimizer).step(make_batch(16, torch.float64))
    assert result.loss.shape == ()
    assert not result.loss.requires_grad
    assert [int(entry["right"]) <= size for entry, size in zip(result.aux, result.micro_batch_sizes, strict=True)]
    assert result.peak_bytes > 0
    assert result.seconds > 0
    metrics = result.metrics()
    assert metrics["autobatch/samples"] == 16
    assert metrics["autobatch/micro_batch_size"] == 4
    assert metrics["autobatch/accumulation_steps"] == 4
    assert metrics.pop("autobatch/loss") is result.loss
    assert all(name.startswith("autobatch/") and isinstance(value, int | float) for name, value in metrics.items())


class Reads(TorchDispatchMode):
    """Counts values that are read from tensors: on a GPU each waits for it."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_loss_and_norm_are_reported_and_nobody_reads_them():
    """By the result, its metrics and the event; JSON leaves them out."""
    events = []
    model, _, runner = make_runner(12, 5, max_grad_norm=0.01, hooks=[events.append])
    _, _, plain = make_runner(12, 5)
    batch = make_batch(12, torch.float64)
    for _ in range(3):  # the first steps are looked over
        runner.step(batch)
        plain.step(batch)
    with Reads() as without:
        plain.step(batch)
    expected = full_batch_gradient(model, mean_step, batch)
    norm = sum(gradient.square().sum() for gradient in expected.values() if gradient is not None).sqrt()
    with Reads() as reads:
        result = runner.step(batch)
        metrics = result.metrics()
    assert reads.reads == without.reads
    assert result.gradient_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    assert metrics["autobatch/gradient_norm"] is events[-1].gradient_norm is result.gradient_norm
    assert metrics["autobatch/loss"] is events[-1].loss is result.loss
    assert not result.gradient_norm.requires_grad
    assert not {"loss", "gradient_norm"} & events[-1].model_dump(mode="json").keys()
    assert plain.step(batch).gradient_norm is None
    assert runner.accumulate(batch).gradient_norm is None


def test_a_hook_that_raises_costs_a_log_line_not_a_step(caplog):
    """Whoever listens cannot break training."""

    def broken(event):
        raise RuntimeError("tracker is down")

    _, _, runner = make_runner(8, 4, hooks=[broken])
    with caplog.at_level(logging.ERROR, logger="autobatch"):
        runner.step(make_batch(8, torch.float64))
    assert "failed on StepFinished; its further failures are not logged" in caplog.text


def test_an_interrupt_while_a_step_is_told_leaves_it_a_step_that_was_done():
    """A hook that writes may take long enough for Ctrl-C: the step is committed, and counted."""
    events, stops = [], [KeyboardInterrupt]

    def stop_once(event):
        events.append(event)
        if isinstance(event, StepFinished) and stops:
            raise stops.pop()

    _, _, runner = make_runner(4, 2, dtype=torch.float32, hooks=[stop_once])
    with pytest.raises(KeyboardInterrupt):
        runner.step(make_batch(4))
    assert runner.steps == 1
    runner.step(make_batch(4))
    reported = [(type(event).__name__, event.step) for event in events if isinstance(event, StepFinished | StepFailed)]
    assert reported == [("StepFinished", 0), ("StepFinished", 1)]


def test_the_batch_stays_where_it_is_and_unchanged():
    """Only micro-batches go to the device; the batch given is neither moved nor written."""
    _, _, runner = make_runner(8, 3)
    inputs, labels = make_batch(8, torch.float64)
    pointers, version, values = (inputs.data_ptr(), labels.data_ptr()), inputs._version, inputs.clone()
    runner.step((inputs, labels))
    assert (inputs.data_ptr(), labels.data_ptr()) == pointers
    assert inputs._version == version
    assert torch.equal(inputs, values)


def test_a_runner_without_an_optimizer_accumulates_only():
    """``accumulate`` needs none; ``step`` says so."""
    model = Plain()
    plan = make_plan(model, 8, 4, dtype=torch.float64)
    runner = autobatch.Runner(plan, model, mean_step, None)
    runner.accumulate(make_batch(8, torch.float64))
    with pytest.raises(InvalidArgument, match="use accumulate"):
        runner.step(make_batch(8, torch.float64))


def test_clipping_with_a_scaler_is_of_what_the_scaler_divided():
    """With only a part of the model in the optimizer the norm must not contain gradients that are still scaled."""
    moved = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        torch.manual_seed(0)
        model = Plain(torch.float32)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        before = model.head.weight.detach().clone()
        plan = make_plan(model, 16, 4, optimizer=optimizer)
        runner = autobatch.Runner(plan, model, mean_step, optimizer, scaler=scaler, max_grad_norm=0.1)
        runner.step(make_batch(16))
        moved.append(model.head.weight.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-8)


def test_an_update_without_room_is_undone_before_it_begins():
    """When others took what the optimizer's step needs, the step is undone: nothing has moved, no half state."""
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    inputs = torch.randn(2, 100)

    def step(model, part):
        return model(part).square().mean()

    device = CpuDevice()
    device.reclaim()
    device.watch([*model.parameters(), inputs])
    plan = autobatch.fit(model, 2, batch=inputs, step=step, optimizer=optimizer)
    [trial] = plan.trials[-1:]
    assert trial.optimizer_peak > trial.backward_allocated
    plan = plan.model_copy(update={"budget_bytes": trial.optimizer_peak + 1000, "headroom_bytes": 0})
    runner = autobatch.Runner(plan, model, step, optimizer)
    before = bits_of(model, optimizer)
    with tenant(2000), pytest.raises(DoesNotFit, match="the update does not fit"):
        runner.step(inputs)
    assert not differences(bits_of(model, optimizer), before)
    assert not optimizer.state
    runner.step(inputs)


def test_gradients_from_before_are_told_once(caplog):
    """They become part of the update, which most loops do not mean: a warning says so, once."""
    model, _, runner = make_runner(8, 4)
    batch = make_batch(8, torch.float64)
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        for _ in range(2):
            mean_step(model, batch).backward()
            runner.step(batch)
    [line] = caplog.records
    assert "began with gradients from before" in line.getMessage()


def test_an_update_inside_the_backward_pass_is_refused():
    """It would move parameters at every micro-batch, and no retry could undo it."""
    model = Plain()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(InvalidArgument, match=r"parameter head\.weight has a post-accumulate-grad hook"):
        make_plan(model, 8, 4, dtype=torch.float64)


def test_a_plan_made_with_weigh_needs_it_in_training():
    """A Runner without it would weigh by samples."""
    model = Plain(torch.float32)
    plan = autobatch.fit(model, 8, batch=make_batch(8), step=mean_step, weigh=lambda b: len(b[0]))
    with pytest.raises(InvalidArgument, match="pass the same weigh= to both"):
        autobatch.Runner(plan, model, mean_step, None)


def test_a_scheduler_that_wants_a_metric_is_refused_before_any_update():
    """ReduceLROnPlateau cannot be stepped without the user's metric."""
    _, optimizer, runner = make_runner(8, 4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InvalidArgument, match="ReduceLROnPlateau needs a metric"):
        autobatch.Runner(runner.plan, Plain(), mean_step, optimizer, scheduler=scheduler)


@pytest.mark.parametrize("call", ["step", "accumulate", "step_over"])
@pytest.mark.parametrize("kind", ["DataLoader", "TensorDataset"])
def test_a_loader_in_the_place_of_a_batch_is_named(call, kind):
    """The message says what runs a loader, not how to register a type; nothing has run."""
    _, _, runner = make_runner(16, 4)
    dataset = torch.utils.data.TensorDataset(*make_batch(16, torch.float64))
    given = torch.utils.data.DataLoader(dataset, batch_size=4) if kind == "DataLoader" else dataset
    with pytest.raises(InvalidArgument, match=rf"{kind}.*runner\.run\(loader\)") as caught:
        getattr(runner, call)([given] if call == "step_over" else given)
    assert "register" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert runner.steps == 0


@pytest.mark.quick
def test_the_target_is_never_changed_in_silence(caplog):
    """After any number of retries all samples of the batch are in the update."""
    _, _, runner = make_runner(37, 37)
    with oom_at(20, 40, 70):
        result = runner.step(make_batch(37, torch.float64))
    assert result.retries == 3
    assert sum(result.micro_batch_sizes) == 37


class Unspeakable(autobatch.AutobatchError):
    """An error that cannot be printed."""

    def __str__(self):
        raise TypeError("no words")


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (RuntimeError("a secret in the data"), ["RuntimeError"]),
        (InvalidArgument("no room\nfor one"), ["InvalidArgument: no room"]),
        (Unspeakable(), []),
    ],
    ids=["user", "ours", "unspeakable"],
)
def test_a_failed_step_is_reported_without_the_users_words_and_raises_its_error(error, reasons):
    """Of the user's errors the type is reported; a report that fails takes no error's place."""
    events = []
    model, _, runner = make_runner(8, 4)
    runner = autobatch.Runner(runner.plan, model, fail_with(error), None, hooks=[events.append])
    with pytest.raises(type(error)) as caught:
        runner.accumulate(make_batch(8, torch.float64))
    assert caught.value is error
    assert [event.reason for event in events if isinstance(event, StepFailed)] == reasons
