"""Lightning's Trainer with autobatch beside its own run of whole batches: weights, logs, rates, hooks."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from launches import ROOT, launch, torchrun
from lightning_runs import (
    NAMES,
    TARGET,
    Made,
    apart,
    bit_for_bit,
    data,
    load,
    logs_apart,
    module_of,
    small_device,
    train,
)
from sampling import sample
from torch import nn
from torch.nn import functional as F


def whole_only(self, batch, batch_idx):
    """Logs counts, constants, extremes, a mean with its own size, and a name twice."""
    inputs, classes = batch
    scores = self.net(inputs)
    self.log("count", len(classes), reduce_fx="sum", on_step=True, on_epoch=True)
    self.log("right", (scores.argmax(1) == classes).double().sum(), reduce_fx=torch.sum)
    self.log("constant", 3.0, batch_size=31, on_step=True, on_epoch=True)
    self.log("largest", scores.max(), reduce_fx=max, on_step=True, on_epoch=True)
    self.log("smallest", scores.min().item(), reduce_fx="min", on_step=True, on_epoch=True)
    loss = F.cross_entropy(scores, classes)
    self.log("by its size", loss, batch_size=len(classes), on_step=False, on_epoch=True)
    for half in scores.chunk(2, dim=1):
        self.log("twice", half.mean(), on_step=False, on_epoch=True)
    return loss


def without_batch_idx(self, batch):
    """Takes a batch and nothing else, and returns a tensor."""
    return F.cross_entropy(self.net(batch[0]), batch[1])


def warm_up(self, epoch, batch_idx, optimizer, closure):
    """``optimizer_step`` as people write it for a warm-up."""
    optimizer.step(closure=closure)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (self.trainer.global_step + 1)


def clip_by_hand(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
    """``configure_gradient_clipping`` that clips values."""
    self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


def plateau(self):
    """A scheduler that looks at what is logged."""
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}


CASES = {
    "the module of the builders": {},
    "reduce_fx and batch_size": {"made": Made(changes={"training_step": whole_only})},
    "without batch_idx": {"made": Made(changes={"training_step": without_batch_idx})},
    "AdamW": {"made": Made(optimizer=partial(torch.optim.AdamW, lr=1e-2))},
    "no clipping": {"clip": None},
    "clipping by value": {"gradient_clip_algorithm": "value", "clip": 0.01},
    "configure_gradient_clipping": {"clip": None, "made": Made(changes={"configure_gradient_clipping": clip_by_hand})},
    "optimizer_step": {"made": Made(changes={"optimizer_step": warm_up})},
    "ReduceLROnPlateau": {"made": Made(changes={"configure_optimizers": plateau}), "epochs": 2},
    "a last batch that is not full": {"batch_size": 100, "limit_train_batches": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_lightning_ends_where_its_whole_batches_end(name):
    """Weights, everything logged, learning rates, counts of steps, and which hooks are called with which gradients."""
    fit = partial(train, **{"limit_train_batches": 4, **CASES[name]})
    whole, split = fit(), fit(attached={})
    assert all(len(sizes) > 1 for sizes in split.sizes)
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12
    assert split.module.calls == whole.module.calls


def test_hooks_get_the_outputs_of_the_whole_batch():
    """Rows end to end, numbers as a mean, the loss."""
    whole, split = train(limit_train_batches=2), train(limit_train_batches=2, attached={})
    for one, other in zip(whole.module.outputs, split.module.outputs, strict=True):
        assert sorted(one) == sorted(other)
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-13, atol=1e-15)


def log_metrics(self, batch, batch_idx):
    """Logs metrics at each step and over the epoch, alone and in a collection."""
    inputs, classes = batch
    scores = self.net(inputs)
    self.f1(scores, classes)
    self.log("f1", self.f1, on_step=True, on_epoch=True)
    self.log_dict(self.both(scores, classes) and self.both, on_step=True, on_epoch=True)
    return F.cross_entropy(scores, classes)


def with_metrics(training_step=log_metrics, **metrics):
    torch.manual_seed(3)
    module = module_of(load(), Made(changes={"training_step": training_step}))
    for name, metric in metrics.items():
        setattr(module, name, metric)
    return module


def test_metrics_have_the_value_of_the_whole_step():
    """F1 and the area under a curve are no means over micro-batches; memory ends in two of the steps."""
    kinds = torchmetrics.classification

    def make():
        both = torchmetrics.MetricCollection(
            {"precision": kinds.MulticlassPrecision(4), "auc": kinds.MulticlassAUROC(4)}
        )
        return with_metrics(f1=kinds.MulticlassF1Score(4), both=both)

    whole, split = train(module=make()), train(module=make(), attached={}, faults={2: [60], 4: [500]})
    assert split.retries == 2
    assert logs_apart(whole, split) < 1e-12


def log_running(self, batch, batch_idx):
    """Logs what its metric computed of all samples so far, and of one that is reset, as tensors and numbers."""
    inputs, classes = batch
    scores = self.net(inputs)
    self.accuracy.update(scores, classes)
    self.log("running", self.accuracy.compute())
    self.log("number", self.accuracy.compute().item())
    self.own.reset()
    self.own.update(scores, classes)
    self.log("own", self.own.compute())
    return F.cross_entropy(scores, classes)


def test_a_running_value_is_that_of_the_whole_step():
    """No mean over micro-batches, also where the first samples are all classified alike; memory ends in two steps."""
    own = partial(torchmetrics.classification.MulticlassAccuracy, 4, average="micro")

    def make():
        return with_metrics(log_running, own=own())

    right = make().net(torch.stack([x for x, _ in data()])).argmax(1) == torch.stack([y for _, y in data()])
    order = torch.argsort(right.long(), stable=True)[[*range(5), *torch.randperm(8 * TARGET - 5) + 5]].tolist()
    whole = train(module=make(), order=order)
    split = train(module=make(), order=order, attached={}, faults={2: [60], 4: [150]})
    assert split.retries == 2
    names = ("running", "number", "own")
    for log, its in zip(whole.logs, split.logs, strict=True):
        assert {name: its[name] for name in names} == pytest.approx({name: log[name] for name in names}, rel=1e-6)


def log_later(self, batch, batch_idx):
    """Logs nothing of this in the first batch."""
    scores = self.net(batch[0])
    if batch_idx > 0:
        self.log("squares", (scores**2).sum(), reduce_fx="sum")
        self.f1(scores, batch[1])
        self.log("f1", self.f1)
    return F.cross_entropy(scores, batch[1])


def test_what_a_later_batch_logs_first_has_the_value_of_the_whole_batch():
    """A sum, and a metric that has a value for each step."""
    whole, split = (
        train(module=with_metrics(log_later, f1=torchmetrics.classification.MulticlassF1Score(4)), attached=attached)
        for attached in (None, {})
    )
    assert apart(whole, split) < 1e-12
    for log, its in zip(whole.logs, split.logs, strict=True):
        assert its == pytest.approx(log, rel=1e-6)
    assert split.module.calls == whole.module.calls


CLEARS = {
    "in place": lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False),
    "never": lambda *_: None,
}


@pytest.mark.parametrize("name", CLEARS)
def test_gradients_are_cleared_as_the_module_does(name, caplog):
    """``optimizer_zero_grad`` may set them to zero, or leave them to add up."""
    made = Made(changes={"optimizer_zero_grad": CLEARS[name]})
    whole, split = train(made=made), train(made=made, attached={})
    assert apart(whole, split) < 1e-12
    assert "gradients from before" not in caplog.text


def test_bfloat16_is_lightnings():
    """Autocast of ``bf16-mixed``: as far apart as roundings, and the loss is logged in float32."""
    whole, split = train(precision="bf16-mixed"), train(precision="bf16-mixed", attached={})
    assert apart(whole, split) < 1e-2
    assert split.logs[0]["loss"] == pytest.approx(whole.logs[0]["loss"], rel=1e-2)


def test_losses_are_scaled():
    """GradScaler of ``16-mixed``, unscaled before it is clipped, also where memory ends while it is."""
    scale = 2.0**10

    def plugins():
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return [load().plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]

    def fit(**given):
        return train(made=Made(body=nn.Tanh), precision=None, plugins=plugins(), **given)

    whole, split = fit(), fit(attached={}, faults={2: [40], 4: [330]})
    assert apart(whole, split) < 1e-2
    assert split.trainer.precision_plugin.scaler.get_scale() == scale
    assert split.trainer.global_step == whole.trainer.global_step == 8


def test_a_checkpoint_carries_plan_and_size(tmp_path):
    """With dropout: a run that is resumed after a shortage ends bit for bit where the undisturbed one ends."""
    made = Made(dropout=0.1, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    path = str(tmp_path / "first.ckpt")

    class Saves(load().Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                torch.manual_seed(11)
                trainer.save_checkpoint(path)

        def on_train_epoch_start(self, trainer, module):
            torch.manual_seed(12)

    class Seeds(load().Callback):
        def on_train_epoch_start(self, trainer, module):
            torch.manual_seed(12)

    fit = partial(train, made=made, attached={"check": None}, epochs=2, order=[*range(8 * TARGET)])
    first = fit(callbacks=(Saves(),), faults={7: [40]})
    resumed = fit(callbacks=(Seeds(),), resume=path)
    assert first.retries == 1
    assert resumed.sizes == first.sizes[8:]
    assert resumed.callback.plan == first.callback.plan
    assert bit_for_bit(first, resumed)


def test_a_trainer_that_fits_again():
    """The callback serves a second module, and afterwards the Trainer is as it was."""
    trained = train(attached={}, limit_train_batches=2)
    loop = trained.trainer.fit_loop.epoch_loop.automatic_optimization
    assert "run" not in vars(loop)
    assert "_after_closure" not in vars(trained.trainer.precision_plugin)
    assert "log" not in vars(trained.module)
    again = train(attached={}, limit_train_batches=2)
    assert bit_for_bit(trained, again)


@pytest.mark.parametrize("package", sample(NAMES, 2))
@pytest.mark.timeout(300)
def test_two_ranks_end_where_one_process_ends(package, tmp_path):
    """Under DDPStrategy: one rank runs more micro-batches, the other runs out of memory twice."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "builders")))
    script = ROOT / "tests" / "builders" / "lightning_on_ranks.py"
    (ran,) = launch(torchrun(str(script), package, str(tmp_path)), PYTHONPATH=paths)
    assert ran.code == 0, ran.errors[-3000:]
    assert ran.left_behind == []
    (sizes, retries, logs), (its_sizes, its_retries, its_logs) = json.loads(
        (tmp_path / "found.json").read_text("utf-8")
    )
    assert sizes[0] != its_sizes[0]
    assert (retries, its_retries) == (0, 2)
    order = torch.randperm(8 * TARGET, generator=torch.Generator().manual_seed(0)).tolist()  # as DistributedSampler's
    whole = train(package, batch_size=32, order=order)
    weights = torch.load(tmp_path / "weights.pt")
    assert apart(whole, SimpleNamespace(module=SimpleNamespace(state_dict=lambda: weights))) < 1e-12
    assert [log["norm"] for log in logs] == pytest.approx([log["norm"] for log in whole.logs], rel=1e-12)
    for log, its, expected in zip(logs[:-1], its_logs[:-1], whole.logs[:-1], strict=True):
        assert log["synced"] == its["synced"] == pytest.approx(expected["loss_step"], rel=1e-12)


def test_arguments_reach_fit_and_the_runner():
    """A smaller ``max_micro_batch``, a hook that hears of each step, and a plan that can be read afterwards."""
    events = []
    trained = train(attached={"max_micro_batch": 5, "hooks": [events.append], "device": small_device()})
    assert max(map(max, trained.sizes)) == 5
    assert trained.callback.plan.target_batch == TARGET
    assert trained.callback.runner.steps == 8
    assert len(events) >= 8


@pytest.mark.timeout(300)
def test_the_example_ends_on_the_weights_of_whole_batches(tmp_path):
    """Under both names of the package: at most forty lines, of which one is autobatch's beside the import."""
    text = (ROOT / "examples" / "with_lightning_callback.py").read_text("utf-8")
    assert len(text.splitlines()) <= 40
    ends = []
    for package, callbacks in sample([(NAMES[0], "[]"), (NAMES[0], "[callback]"), (NAMES[1], "[callback]")], 2):
        script = tmp_path / "train.py"
        changed = text.replace("callbacks=[callback]", f"callbacks={callbacks}")
        script.write_text(changed.replace(f"from {NAMES[0]}", f"from {package}"), encoding="utf-8")
        (ran,) = launch([sys.executable, str(script)], limit_seconds=100.0, CUDA_VISIBLE_DEVICES="")
        ends.append((ran.line("loss "), ran.line("micro-batches ")))
    (expected, _), *others = ends
    assert others == [(expected, "micro-batches (128, 128)")] * len(others)
