"""``prediction.tracing.failures``: each thing that cannot be traced is said in the user's own terms."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from nets import ConvNet, images, step
from sampling import sample
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException
from torch.nn import functional as F

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.trace import trace
from autobatch.step.default_step import default_step
from autobatch.step.losses import Sum
from autobatch.step.workload import Workload

pytestmark = [pytest.mark.apart, pytest.mark.predicts]


def _trace(run, model=None, batch=None):
    return trace(Workload(model or nn.Linear(16, 16), run), describe(torch.zeros(2, 16) if batch is None else batch), 2)


def _item(model, batch):
    loss = model(batch).mean()
    loss.detach().item()
    return loss


def _as_float(model, batch):
    loss = model(batch).mean()
    float(loss.detach())
    return loss


def _formatted(model, batch):
    loss = model(batch).mean()
    f"{loss:.3f}"
    return loss


def _as_array(model, batch):
    loss = model(batch).mean()
    loss.detach().cpu().numpy()
    return loss


def _as_list(model, batch):
    loss = model(batch).mean()
    batch.tolist()
    return loss


def _branch(model, batch):
    if batch.sum() > 0:
        return model(batch).mean()
    return model(batch).sum()


@pytest.mark.parametrize(
    ("run", "source"),
    [
        (_item, "loss.detach().item()"),
        (_as_float, "float(loss.detach())"),
        (_formatted, 'f"{loss:.3f}"'),
        (_as_array, "loss.detach().cpu().numpy()"),
        (_as_list, "batch.tolist()"),
        (_branch, "if batch.sum() > 0:"),
    ],
)
def test_a_value_that_is_read_is_told_as_that(run, source):
    """However it is read: one sentence, behind the line that reads it."""
    with pytest.raises(InvalidArgument) as caught:
        _trace(run)
    message = f"`{source}` needs a tensor's value, and there are none: leave it out of the step, or run fit() on a GPU"
    assert str(caught.value).endswith(message)
    assert re.match(rf"{re.escape(__file__)}:\d+: ", str(caught.value))


class Experts(nn.Module):
    """A mixture of two, in the way that libraries write it: each expert gets the tokens that chose it."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens):
        weights, chosen = self.gate(tokens).softmax(-1).topk(1)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == index)
            mixed.index_add_(0, rows, expert(tokens[rows]) * weights[rows])
        return mixed


def test_a_size_that_values_decide_is_told_with_the_operator():
    """A mixture of experts: the line that asks who chose whom, and what torch calls it."""
    with pytest.raises(InvalidArgument) as caught:
        _trace(lambda model, batch: model(batch).mean(), Experts())
    message = str(caught.value)
    line = "`rows, _ = torch.where(chosen == index)`"
    assert f"{line} makes a tensor whose size depends on values (aten.nonzero" in message


def test_a_librarys_own_line_is_told_beside_the_users(tmp_path, monkeypatch):
    """The user's line says which call it is, the library's what it does there."""
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "counting_library.py").write_text("def count(rows):\n    return rows.nonzero()\n")
    monkeypatch.syspath_prepend(package)
    import counting_library

    def run(model, batch):
        counting_library.count(batch)
        return model(batch).mean()

    with pytest.raises(InvalidArgument) as caught:
        _trace(run)
    message = str(caught.value)
    assert message.startswith(f"{__file__}:")
    assert "`counting_library.count(batch)` (in " in message
    assert "counting_library.py:2: `return rows.nonzero()`) makes a tensor whose size depends on values" in message


_MISPLACED = [
    lambda model, batch: (model(batch) + torch.arange(16)).mean(),
    lambda model, batch: (model(batch) * 2).add_(torch.arange(16)).mean(),
    lambda model, batch: torch.where(torch.ones(16, dtype=torch.bool), model(batch), 0.0).mean(),
]


@pytest.mark.parametrize("run", _MISPLACED)
def test_tensors_of_the_host_that_the_step_makes_raise_as_on_a_card(run):
    """In torch's words, with the user's line; on a laptop everything is on one device."""
    with pytest.raises(InvalidArgument, match=r"would raise on a card: Expected all tensors to be on the same device"):
        _trace(run)


def _index_and_scale(model, batch):
    hidden = model(batch) * torch.tensor(2.0)
    hidden[:, torch.arange(3)] = 0
    hidden.mul_(torch.tensor(2.0))
    hidden[:, :4].copy_(torch.ones(4))
    return hidden[:, torch.arange(3)].mean()


def test_tensors_of_the_host_that_cuda_takes_are_taken():
    """Single values, indices, and what is copied."""
    assert _trace(_index_and_scale).samples == 2


_LOSSES = [
    lambda model, batch: step(model, batch).detach(),
    lambda _model, _batch: None,
    lambda model, batch: model(batch[0]),
    lambda _model, _batch: {},
    lambda model, batch: {"a": step(model, batch), "b": 3.0},
    lambda model, batch: (step(model, batch), step(model, batch)),
    lambda model, batch: Sum(step(model, batch).detach(), count=3),
]


@pytest.mark.parametrize("run", sample(_LOSSES, 3))
def test_a_loss_that_fit_refuses_is_refused_in_the_same_words(run):
    """One class and one text, wherever the mistake is met."""
    model = ConvNet()
    with pytest.raises(InvalidArgument) as in_fit:
        autobatch.fit(model, 2, batch=images(), step=run)
    with pytest.raises(InvalidArgument) as predicted:
        _trace(run, model, images())
    assert str(predicted.value) == str(in_fit.value)


def test_a_models_output_with_a_loss_is_a_step_of_its_own():
    """Hugging Face's models return mappings with ``.loss``: nothing needs to be written."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    batch = {
        "input_ids": torch.ones(2, 16, dtype=torch.long),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
        "labels": torch.zeros(2, dtype=torch.long),
    }
    model = transformers.BertForSequenceClassification(config)
    assert _trace(default_step, model, batch).samples == 2


class OwnError(Exception):
    """An error whose constructor wants other arguments than it keeps."""

    def __init__(self, sample, reason):
        super().__init__(f"sample {sample}: {reason}")
        self.sample = sample


def raise_in_forward(error):
    """Make a step that raises it after its forward pass."""

    def run(model, batch):
        model(batch)
        raise error

    return run


def raise_in_backward(error):
    """Make a step that raises it in its backward pass."""

    def fail(_):
        raise error

    def run(model, batch):
        output = model(batch)
        output.register_hook(fail)
        return output.mean()

    return run


_ERRORS = [ValueError("labels"), OwnError(3, "damaged"), FileNotFoundError(2, "none", "a.png"), KeyboardInterrupt("k")]


@pytest.mark.skipif(sys.platform != "linux", reason="traces fork on Linux only")
@pytest.mark.parametrize("raise_in", [raise_in_forward, raise_in_backward])
@pytest.mark.parametrize("error", [*_ERRORS, SystemExit(3)], ids=lambda error: type(error).__name__)
def test_errors_of_the_users_step_come_out_as_they_were_raised(error, raise_in):
    """Class, text and attributes, through the process that traces; a note names the line."""
    with pytest.raises(type(error)) as caught:
        autobatch.predict(nn.Linear(16, 16), torch.zeros(2, 16), raise_in(error), gpu="1GiB")
    assert type(caught.value) is type(error)
    assert (str(caught.value), caught.value.args) == (str(error), error.args)
    own = {name: value for name, value in vars(error).items() if name != "__notes__"}
    assert {name: vars(caught.value)[name] for name in own} == own
    assert getattr(caught.value, "filename", None) == getattr(error, "filename", None)
    (note,) = caught.value.__notes__
    assert re.search(rf"predict.* on tensors without memory; {re.escape(__file__)}:\d+: `raise error`$", note)


def test_torchs_own_errors_come_out_as_they_were_raised():
    """A wrong shape is the user's, whoever raises it."""

    def run(model, batch):
        return F.cross_entropy(model(batch), torch.zeros(3, dtype=torch.long, device=batch.device))

    with pytest.raises(ValueError, match=r"^Expected input batch_size") as caught:
        _trace(run)
    assert not isinstance(caught.value, InvalidArgument)


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedFakeTensorException("quantized tensors"),
        NotImplementedError("Could not run 'own::count' with arguments from the 'Meta' backend."),
        RuntimeError("Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor)."),
    ],
)
def test_what_only_tensors_without_memory_raise_is_explained(error):
    """On a card the step would not raise it."""
    with pytest.raises(InvalidArgument, match=rf"`raise error` failed on .* without memory \({type(error).__name__}: "):
        _trace(raise_in_forward(error))
