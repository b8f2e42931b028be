"""What training_step returns and logs beside Lightning's own run of whole batches: outputs, sums, skipped batches."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from lightning_runs import TARGET, Made, apart, data, load, logs_apart, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import autobatch
from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.integrations.lightning import training

CHECKS = ["raise", "warn", None]


def returns_much(self, batch, batch_idx):
    """Returns constants of all kinds, means, rows and containers of these beside the loss."""
    inputs, classes = batch
    scores = self.net(inputs)
    right = scores.argmax(1) == classes
    return {
        "loss": F.cross_entropy(scores, classes),
        "int": 123,
        "float": 123.0,
        "bool": True,
        "text": "train",
        "none": None,
        "integer tensor": torch.tensor(123),
        "weights": torch.arange(3.0),
        "array": np.arange(5),
        "names": ["a", "b", "c"],
        "share": right.double().mean(),
        "share as a number": float(right.double().mean()),
        "scores": scores.detach(),
        "score array": scores.detach().numpy(),
        "list": classes.tolist(),
        "pair": (scores.detach(), classes),
        "nested": {"classes": classes, "epoch": 3},
    }


@pytest.mark.parametrize(("batch_size", "at_once"), [(31, 7), (4, 2), (2, 1), (8, 4)])
def test_hooks_get_what_the_whole_batch_returns(batch_size, at_once):
    """Also where all micro-batches have the same size."""
    options = {
        "made": Made(changes={"training_step": returns_much}),
        "batch_size": batch_size,
        "limit_train_batches": 2,
    }
    whole = train(**options)
    split = train(**options, attached={"max_micro_batch": at_once, "target_batch": batch_size})
    assert all(len(sizes) > 1 for sizes in split.sizes)
    for one, other in zip(whole.module.outputs, split.module.outputs, strict=True):
        assert sorted(one) == sorted(other)
        for name, value in one.items():
            assert type(other[name]) is type(value), name
            _assert_same(value, other[name])


def _assert_same(value, other):
    if isinstance(value, torch.Tensor):
        torch.testing.assert_close(other, value, rtol=1e-13, atol=1e-14)
    elif isinstance(value, np.ndarray):
        np.testing.assert_allclose(other, value, rtol=1e-13)
    elif isinstance(value, dict):
        assert value.keys() == other.keys()
        for key in value:
            _assert_same(value[key], other[key])
    elif isinstance(value, tuple):
        for one, two in zip(value, other, strict=True):
            _assert_same(one, two)
    else:
        assert other == (pytest.approx(value, rel=1e-13) if isinstance(value, float) else value)


def counts(self, batch, batch_idx):
    """Returns a number that is no mean beside the loss."""
    return {"loss": F.cross_entropy(self.net(batch[0]), batch[1]), "count": len(batch[0])}


def test_what_cannot_be_combined_is_a_list_of_each_value():
    """One entry a micro-batch."""
    split = train(made=Made(changes={"training_step": counts}), attached={}, limit_train_batches=1)
    assert split.module.outputs[0]["count"] == [*split.sizes[0]]


def averages(self, batch, batch_idx):
    """The mean over samples, logged for the step and the epoch."""
    loss = F.cross_entropy(self.net(batch[0]), batch[1])
    self.log("loss", loss, on_step=True, on_epoch=True)
    return loss


def sums(self, batch, batch_idx):
    return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


def logs_counts(self, batch, batch_idx):
    """Logs sums by ``reduce_fx=``, and a mean with ``batch_size=``."""
    scores = self.net(batch[0])
    right = (scores.argmax(1) == batch[1]).double().sum()
    loss = F.cross_entropy(scores, batch[1])
    self.log("right", right, on_step=True, on_epoch=True, reduce_fx="sum")
    self.log("by its size", loss, on_step=False, on_epoch=True, batch_size=len(scores))
    return loss


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("step", [averages, logs_counts])
def test_a_check_that_is_left_out_changes_no_training(step, check):
    """Weights, losses and what is logged are Lightning's own for each ``check=``; memory ends in a step."""
    options = {"made": Made(changes={"training_step": step}), "limit_train_batches": 4}
    whole, split = train(**options), train(**options, attached={"check": check}, faults={2: [80]})
    assert split.retries == 1
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12
    for one, other in zip(whole.module.outputs, split.module.outputs, strict=True):
        torch.testing.assert_close(other["loss"], one["loss"], rtol=1e-12, atol=0)


COUNTED = {
    "a constant": lambda self, inputs, classes: 8,
    "the loader's": lambda self, inputs, classes: self.trainer.train_dataloader.batch_size,
    "samples": lambda self, inputs, classes: len(inputs),
    "tokens, as many as the batch has samples": lambda self, inputs, classes: int((1 + 3 * (classes < 2)).sum()),
    "columns": lambda self, inputs, classes: inputs.shape[1],
}


SIZE_COUNTED = [(name, attached) for name in COUNTED for attached in ({}, {"max_micro_batch": 3})]
# If all parts that run have one size, only these numbers tell what they count.
SIZE_COUNTED += [(name, {"check": None}) for name in ("a constant", "the loader's", "samples")]


@pytest.mark.parametrize(("name", "attached"), SIZE_COUNTED)
def test_batch_size_counts_what_it_counts_without_autobatch(name, attached):
    """Twice 8 samples, of which the first 8 have 4 tokens each, and a last batch of 4."""

    def step(self, batch, batch_idx):
        inputs, classes = batch
        self.log("mean", classes.double().mean(), on_epoch=True, on_step=True, batch_size=COUNTED[name](self, *batch))
        return F.cross_entropy(self.net(inputs), classes)

    dataset = TensorDataset(data().tensors[0][:20], torch.tensor([0, 1] * 4 + [2, 3] * 4 + [3] * 4))
    options = {"made": Made(changes={"training_step": step}), "batch_size": 8, "dataset": dataset}
    options["order"] = [*range(20)]
    whole, split = train(**options), train(**options, attached={"target_batch": 8, "max_micro_batch": 2, **attached})
    assert all(len(sizes) > 1 for sizes in split.sizes)
    assert logs_apart(whole, split) < 1e-6


@pytest.mark.parametrize("number", [1, 2, 8])
def test_a_batch_size_that_counts_neither_is_warned_of_once(number, caplog):
    """Without a comparison and with equal parts nothing shows whether a constant is the micro-batch's own count."""

    def step(self, batch, batch_idx):
        self.log("mean", batch[1].double().mean(), batch_size=number)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    attached = {"target_batch": 8, "max_micro_batch": 2, "check": None}
    train(made=Made(changes={"training_step": step}), batch_size=8, limit_train_batches=3, attached=attached)
    warned = [record.message for record in caplog.records if "batch_size=" in record.message]
    assert len(warned) == (number == 1)
    assert all("self.log('mean', batch_size=1)" in message and "check=" in message for message in warned)


def counted(self, batch, batch_idx, stated):
    """The mean over labels, of which some are ignored: what ``stated`` makes of losses and their number."""
    inputs, classes = batch
    labels = torch.where(inputs[:, 0] > 0, classes, -100)
    losses = F.cross_entropy(self.net(inputs), labels, reduction="none")
    loss = stated(losses, int((labels != -100).sum()))
    self.log("share", (labels != -100).double().mean(), batch_size=len(labels))
    return {"loss": loss} if batch_idx % 2 else loss


STATED = {
    "Sum": lambda losses, count: autobatch.Sum(losses.sum(), count),
    "Mean": lambda losses, count: autobatch.Mean(losses.sum() / count, count),
}


@pytest.mark.parametrize("name", STATED)
def test_a_training_step_may_say_what_its_loss_was_divided_by(name):
    """By ``Sum`` or ``Mean``, alone or in a dict; memory ends in a step."""
    mean = partial_method(counted, lambda losses, count: losses.sum() / count)
    whole = train(made=Made(changes={"training_step": mean}))
    said = partial_method(counted, STATED[name])
    split = train(made=Made(changes={"training_step": said}), attached={}, faults={2: [80]})
    assert split.retries == 1
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12
    for one, other in zip(whole.module.outputs, split.module.outputs, strict=True):
        torch.testing.assert_close(other["loss"], one["loss"], rtol=1e-12, atol=0)


def test_a_loss_that_is_a_sum_is_refused_in_words():
    """It says what to return instead."""
    with pytest.raises(InexactSplit, match=r"sum.*autobatch\.Sum") as raised:
        train(made=Made(changes={"training_step": sums}), attached={}, limit_train_batches=1)
    assert "\n" not in str(raised.value)


def ignores_later(self, batch, batch_idx):
    """A mean over labels, all of which count in the first batch."""
    labels = torch.where((batch_idx > 0) & (batch[0][:, 0] > 0), -100, batch[1])
    return F.cross_entropy(self.net(batch[0]), labels)


def test_a_loss_that_is_no_mean_in_later_batches_is_refused_there():
    """The second batch is compared too, and the eighth."""
    with pytest.raises(InexactSplit, match="not exact"):
        train(made=Made(changes={"training_step": ignores_later}), attached={})


def skips(self, batch, batch_idx, when):
    """Skips a batch as a whole, where ``when`` says so; logs something first."""
    scores = self.net(batch[0])
    loss = F.cross_entropy(scores, batch[1])
    self.log("largest", scores.max(), reduce_fx="max", on_step=True)
    return None if when(self, batch, batch_idx, loss) else loss


def count_only(self, optimizer):
    """``on_before_optimizer_step`` that needs no gradients."""
    self.calls.append("before_optimizer_step")


SKIPPED = {
    "the first": lambda _, batch, batch_idx, loss: batch_idx == 0,
    "all but the last": lambda _, batch, batch_idx, loss: batch_idx < 3,
    "every second": lambda _, batch, batch_idx, loss: batch_idx % 2 == 1,
    "where one sample shows it": lambda _, batch, batch_idx, loss: bool((batch[0] > 3.0).any()),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SKIPPED)
def test_a_batch_without_a_loss_is_skipped_as_lightning_does(name, check):
    """Weights, logs, counts of steps and calls of hooks; some are skipped and some are not."""
    changes = {"training_step": partial_method(skips, SKIPPED[name]), "on_before_optimizer_step": count_only}
    options = {"made": Made(changes=changes), "limit_train_batches": 4, "clip": None}
    whole, split = train(**options), train(**options, attached={"check": check})
    assert 0 < sum(not outputs for outputs in whole.module.outputs) < 4
    assert [not outputs for outputs in split.module.outputs] == [not outputs for outputs in whole.module.outputs]
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12
    assert split.module.calls == whole.module.calls
    assert split.trainer.global_step == whole.trainer.global_step


def partial_method(step, when):
    """A ``training_step`` that is bound to its rule; Lightning looks at its arguments."""

    def training_step(self, batch, batch_idx):
        return step(self, batch, batch_idx, when)

    return training_step


def test_a_whole_batch_that_does_not_fit_cannot_be_skipped():
    """It decides whether there is a loss: refused in one line."""

    def step(self, batch, batch_idx):
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    with pytest.raises(InvalidArgument, match="None for a part") as raised:
        train(made=Made(changes={"training_step": step}), attached={"max_micro_batch": 8}, limit_train_batches=1)
    assert "\n" not in str(raised.value)


def steps_in_hooks(self):
    """As tutorials write it: each parameter has an optimizer, which steps when its gradient is there."""
    own = {one: torch.optim.SGD([one], lr=0.1) for one in self.parameters()}
    for parameter in self.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: own[one].step())
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def steps_in_backward(self):
    """As torch's own helper does it, on nodes of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own module uses what torch has deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, self.parameters(), {"lr": 0.1})
    return torch.optim.SGD(self.parameters(), lr=0.0)


def fuses_its_update(self):
    """As LOMO does it: hooks on gradients update each parameter."""
    for parameter in self.parameters():
        parameter.register_hook(lambda gradient: gradient)
    return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("configure", [steps_in_hooks, steps_in_backward, fuses_its_update])
def test_optimizers_that_step_inside_the_backward_pass_are_refused(configure):
    """Before the first batch, in one line that names the parameter."""
    batches = []
    started = type("Started", (load().Callback,), {"on_train_start": lambda *_: batches.append(0)})()
    with pytest.raises(InvalidArgument, match=r"parameter net\.0\.weight has a") as raised:
        train(made=Made(changes={"configure_optimizers": configure}), attached={}, callbacks=(started,), clip=None)
    assert "\n" not in str(raised.value)
    assert not batches


def compares(self, batch, batch_idx):
    """A loss of each pair of samples, which samples that are all alike do not show."""
    scores = F.normalize(self.net(batch[0]), dim=1)
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def alike(batches, different=0):
    """So many batches of one sample, and then some of samples that differ."""
    inputs, classes = data().tensors
    same = batches * TARGET
    return TensorDataset(
        torch.cat([inputs[:1].expand(same, 16), inputs[: different * TARGET]]),
        torch.cat([classes[:1].expand(same), classes[: different * TARGET]]),
    )


@pytest.mark.parametrize("check", CHECKS)
def test_samples_that_are_all_alike_are_trained_on(check):
    """Nothing can be compared in any batch; weights and logs are those of whole batches."""
    made = Made(changes={"training_step": averages})
    whole = train(made=made, dataset=alike(8))
    split = train(made=made, dataset=alike(8), attached={"check": check})
    assert all(len(sizes) > 1 for sizes in split.sizes)
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12


@pytest.mark.parametrize("check", CHECKS)
def test_the_first_batch_asked_whose_samples_differ_is_compared(check, caplog):
    """Batches 2, 4 and 8 are asked: one of those that follow six alike shows that the loss compares samples."""
    dataset = alike(6, different=2)
    options = {
        "made": Made(changes={"training_step": compares}),
        "dataset": dataset,
        "order": [*range(len(dataset))],
        "attached": {"check": check},
    }
    if check == "raise":
        with pytest.raises(InexactSplit, match="not exact") as raised:
            train(**options)
        assert "\n" not in str(raised.value)
        return
    train(**options)
    assert caplog.text.count("splitting is not exact") == (check == "warn")


def test_later_batches_of_a_loss_that_splits_change_nothing(monkeypatch):
    """The comparison in a later batch leaves no trace: weights and logs are those of whole batches."""
    dataset = alike(1, different=3)
    options = {"dataset": dataset, "order": [*range(len(dataset))]}
    compared, inner = [], training.verify_in_training
    monkeypatch.setattr(
        training, "verify_in_training", lambda *given, **named: compared.append(0) or inner(*given, **named)
    )
    whole, split = train(**options), train(**options, attached={})
    assert len(compared) == 2
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12
    assert split.module.calls == whole.module.calls
