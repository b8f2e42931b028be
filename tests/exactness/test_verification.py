"""``verify`` on steps that split exactly and on steps that do not, by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moving_models import Hidden, KeyEncoder, Normalised
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from workloads import Everything, Plain, bits_of, differences, limited, make_batch, mean_step

from autobatch.exactness.verification import verify
from autobatch.records import Verdict
from autobatch.step.losses import Mean, PerStep, Sum

CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.2, 7.0])


def small(*, seed: int = 0) -> nn.Module:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def of_losses(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A step that does this with the losses of its samples."""
    return lambda model, batch: function(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def with_batch_norm() -> nn.Module:
    """Coupled by statistics."""
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 4))


def with_bare_batch_norm() -> nn.Module:
    """Coupled by statistics in eval mode too."""
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, track_running_stats=False), nn.Tanh(), nn.Linear(10, 4))


def with_spectral_norm() -> nn.Module:
    """Its estimate moves with every forward pass."""
    return nn.Sequential(spectral_norm(nn.Linear(6, 10)), nn.Tanh(), nn.Linear(10, 4))


def tokens(samples: int = 16, *, filler: int = -100) -> dict[str, torch.Tensor]:
    """Rows with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(2, 4, (samples, 5), generator=generator)
    for row in range(samples):
        labels[row, 1 + row % 5 :] = filler
    return {"x": torch.randn(samples, 5, 6, generator=generator), "labels": labels}


def token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over labels."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def shifted_token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the labels of a language model."""
    return F.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def sum_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """A sum."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def class_weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the weights of the classes."""
    return F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


def info_nce(model: nn.Module, batch: Any) -> torch.Tensor:
    """Other samples are the negatives."""
    hidden = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(hidden @ F.normalize(batch[0][:, :4], dim=1).T, torch.arange(len(hidden)))


def soft_dice(model: nn.Module, batch: Any) -> torch.Tensor:
    """A ratio of sums over the batch."""
    chance, truth = model(batch[0]).softmax(1), F.one_hot(batch[1], 4)
    return 1 - 2 * (chance * truth).sum() / (chance.sum() + truth.sum() + (chance**2).sum())


def balanced_experts(model: nn.Module, batch: Any) -> torch.Tensor:
    """A product of means over the batch."""
    chance = model(batch[0]).softmax(1)
    share = F.one_hot(chance.argmax(1), 4).float().mean(0)
    return F.cross_entropy(model(batch[0]), batch[1]) + 4 * (share * chance.mean(0)).sum()


def two_tasks(model: nn.Module, batch: Any) -> torch.Tensor:
    """Two means with different counts."""
    out, labels = model(batch[0]), batch[1]
    sparse = labels.masked_fill(batch[0][:, 0] > 0.5, -100)
    return F.cross_entropy(out, labels) + F.cross_entropy(out.flip(1), sparse)


def mixup(model: nn.Module, batch: Any) -> torch.Tensor:
    """Samples mixed with each other."""
    order = torch.randperm(len(batch[0]))
    return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


class Complex(nn.Module):
    """A complex weight, whose imaginary part has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 1 + 1j, dtype=torch.complex64))


def half_wrong(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean for the real part and a sum for the imaginary part."""
    return (batch[0] @ model.weight.real).square().mean() + (batch[0] @ model.weight.imag).square().sum()


def regulariser(model: nn.Module) -> torch.Tensor:
    """It does not depend on the samples."""
    return sum(parameter.square().sum() for parameter in model.parameters())


WRONG: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "a sum read as a mean": (small, sum_loss, None, make_batch(16), "autobatch.Sum(loss, count)"),
    "a token mean by rows": (small, token_mean, None, tokens(), 'weigh=lambda batch: (batch["labels"] != -100).sum()'),
    "shifted labels by rows": (
        small,
        shifted_token_mean,
        None,
        tokens(),
        'weigh=lambda batch: (batch["labels"][:, 1:] != -100).sum()',
    ),
    "a row mean by tokens": (
        small,
        lambda model, batch: model(batch["x"]).square().mean(),
        lambda batch: (batch["labels"] != -100).sum(),
        tokens(),
        "mean over samples, and is counted otherwise",
    ),
    "class weights": (small, class_weighted, None, make_batch(16), "such as class weights"),
    "in-batch negatives": (small, info_nce, None, make_batch(16), "depends on the others"),
    "BatchNorm": (with_batch_norm, mean_step, None, make_batch(16), "BatchNorm in train mode (1)"),
    "BatchNorm without running statistics": (
        with_bare_batch_norm,
        mean_step,
        None,
        make_batch(16),
        "BatchNorm in train mode (1)",
    ),
    "soft Dice over the batch": (small, soft_dice, None, make_batch(16), "depends on the others"),
    "balance of experts": (small, balanced_experts, None, make_batch(16), "depends on the others"),
    "two tasks, sparse labels": (small, two_tasks, None, make_batch(16), "several terms with counts of their own"),
    "mixup by randperm": (small, mixup, None, make_batch(16), "shuffled among themselves"),
    "spectral norm": (with_spectral_norm, mean_step, None, make_batch(16), "moves with every forward pass (0;"),
    "a regulariser in a Sum": (
        small,
        lambda model, batch: Sum(sum_loss(model, batch) + regulariser(model), len(batch[0])),
        None,
        make_batch(16),
        "return it as autobatch.PerStep",
    ),
    "a complex weight's imaginary part": (Complex, half_wrong, None, make_batch(16), "depends on the others"),
    "a mean stated with count 1": (
        small,
        lambda model, batch: Mean(mean_step(model, batch), over=1),
        None,
        make_batch(16),
        "mean over samples, and is counted otherwise",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_inexact_split_is_caught_and_its_one_cause_named(name):
    """Every way known to split a step wrongly is caught, with the cause that is to be mended and no other."""
    make_model, step, weigh, batch, cause = WRONG[name]
    torch.manual_seed(0)
    verdict = verify(make_model(), batch, step, weigh)
    assert not verdict.exact
    assert not verdict.unchecked
    assert verdict.relative_error > 1e-3
    assert len(verdict.causes) == 1
    assert cause in verdict.causes[0]
    assert cause in str(verdict)


NO_MEANS = {
    "maximum": torch.max,
    "minimum": torch.amin,
    "median": torch.median,
    "quantile": lambda losses: losses.quantile(0.7),
    "hardest": lambda losses: losses.topk(min(3, len(losses))).values.mean(),
    "logsumexp": lambda losses: losses.logsumexp(0),
    "logmeanexp": lambda losses: losses.logsumexp(0) - math.log(len(losses)),
    "sharp logmeanexp": lambda losses: ((9 * losses).logsumexp(0) - math.log(len(losses))) / 9,
    "root of the mean square": lambda losses: losses.square().mean().sqrt(),
    "norm": torch.norm,
    "logarithm of the mean": lambda losses: losses.mean().log(),
    "geometric mean": lambda losses: losses.log().mean().exp(),
    "product": torch.prod,
    "weights from the losses": lambda losses: (losses * losses.detach().softmax(0)).sum(),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("samples", [16, 40])
@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_over_samples_is_called_that(name, samples, seed):
    """Its gradient may be a sum of its parts' with weights; no weigh= can give them, so none is advised."""
    model = small(seed=seed)
    before = bits_of(model)
    verdict = verify(model, make_batch(samples, seed=seed), of_losses(NO_MEANS[name]))
    assert not verdict.exact
    [cause] = verdict.causes
    assert "the loss is not a mean over samples" in cause
    assert "pass weigh=" not in cause
    assert differences(bits_of(model), before) == []


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_the_data_are_not_taken_for_weights_of_the_losses(seed):
    """A weight of its own for each sample, or class, is one that weigh= can sum, whatever the parameters are."""
    batch = (*make_batch(16, seed=seed), torch.rand(16, generator=torch.Generator().manual_seed(seed)) + 0.05)

    def weighted(model, part):
        losses = F.cross_entropy(model(part[0]), part[1], reduction="none")
        return (losses * part[2]).sum() / part[2].sum()

    for step in (weighted, class_weighted):
        [cause] = verify(small(seed=seed), batch, step).causes
        assert "weigh=" in cause
        assert "is not a mean" not in cause


class Grows(nn.Module):
    """Makes its head in its first forward pass, in torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, inputs):
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 4)
        return self.head(self.body(inputs))


class GrowsAmplified(Grows):
    """Whose last bits become visible, so that float64 has to decide."""

    def forward(self, inputs):
        return torch.sin(1e6 * super().forward(inputs))


@pytest.mark.parametrize("samples", [8, 40])
@pytest.mark.parametrize(
    ("make_model", "step", "cause"),
    [
        (Grows, mean_step, ""),
        (GrowsAmplified, mean_step, ""),
        (Grows, sum_loss, "autobatch.Sum(loss, count)"),
        (Grows, info_nce, "depends on the others"),
    ],
    ids=["exact", "amplified rounding", "a sum", "in-batch negatives"],
)
def test_a_module_that_the_step_makes_is_judged_in_float64_too(make_model, step, cause, samples, caplog):
    """It is made anew in each comparison, in that comparison's dtype, and does not stay."""
    caplog.set_level("INFO", "autobatch")
    model = make_model()
    verdict = verify(model, make_batch(samples), step)
    assert verdict.exact == (not cause), str(verdict)
    assert [cause in found for found in verdict.causes] == ([True] if cause else [])
    assert "not repeated in float64" not in caplog.text
    assert not hasattr(model, "head")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs):
        return self.head(self.layer(inputs.unsqueeze(1).repeat(1, 3, 1) * torch.arange(1, 4)[:, None]).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 8, 2, dropout=0.6, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs.unsqueeze(1).repeat(1, 3, 1))[0][:, -1])


class Path(nn.Module):
    """What surrounds a small model with a change of its input or output."""

    def __init__(self, change) -> None:
        super().__init__()
        self.body, self.change = small(), change

    def forward(self, inputs):
        return self.change(self.body, inputs)


def drop_path(body, inputs):
    """Whole samples are dropped."""
    return body(inputs) * torch.empty(len(inputs), 1).bernoulli_(0.2) / 0.2


def convolutional() -> nn.Module:
    """Normalised within a sample."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )


class Recomputed(nn.Module):
    """A transformer layer whose dropouts run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(6, 2, 8, 0.3, batch_first=True), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layer, inputs[:, None], use_reentrant=False)[:, 0])


def tied() -> nn.Module:
    """One weight used twice."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
    model[2].weight = model[0].weight
    return model


def in_bfloat16(model: nn.Module, batch: Any) -> torch.Tensor:
    """Autocast in the step."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


def cast_by_hand(model: nn.Module, batch: Any) -> torch.Tensor:
    """A cast in the step."""
    return F.cross_entropy(model(batch[0].to(torch.bfloat16)).float(), batch[1])


def at_its_optimum() -> nn.Module:
    """Where the gradient of the whole is nothing, and that of its parts is not."""
    inputs, labels = make_batch(16, torch.float64)
    solution = torch.linalg.lstsq(torch.cat([inputs, torch.ones(16, 1)], 1), labels.double().unsqueeze(1)).solution
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.copy_(solution[:6].T)
        model.bias.copy_(solution[6])
    return model


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    """Least squares."""
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1].float())


def flat(model: nn.Module, batch: Any) -> torch.Tensor:
    """The length of what has length 1."""
    return F.normalize(model(batch[0]), dim=1).square().sum(1).mean()


def amplify(body, inputs):
    """The last bits of float32 become visible, as behind the kinks of a quantised network."""
    return torch.sin(1e6 * body(inputs))


def state_of_zeros(body, inputs):
    """A state that begins with zeros of the default dtype, amplified too."""
    return torch.sin(1e6 * body(inputs) + torch.addmm(torch.zeros(4), inputs[:, :4], torch.eye(4)))


RIGHT: dict[str, tuple[Any, Any, Any, Any]] = {
    "plain": (small, mean_step, None, make_batch(16)),
    "float64": (Plain, mean_step, None, make_batch(16, torch.float64)),
    "checkpointed": (lambda: Plain(checkpointed=True), mean_step, None, make_batch(16, torch.float64)),
    "reentrant checkpoint": (
        lambda: Path(lambda body, inputs: checkpoint(body, inputs.clone().requires_grad_(), use_reentrant=True)),
        mean_step,
        None,
        make_batch(16),
    ),
    "tokens": (small, token_mean, lambda batch: (batch["labels"] != -100).sum(), tokens()),
    "class weights": (small, class_weighted, lambda batch: CLASS_WEIGHTS[batch[1]].sum(), make_batch(16)),
    "transformer layer": (Encoder, mean_step, None, make_batch(16)),
    "LSTM with dropout": (Recurrent, mean_step, None, make_batch(16)),
    "functional dropout": (
        lambda: Path(lambda body, inputs: F.dropout(body(inputs), 0.7)),
        mean_step,
        None,
        make_batch(16),
    ),
    "drop path": (lambda: Path(drop_path), mean_step, None, make_batch(16)),
    "noise": (
        lambda: Path(lambda body, inputs: body(inputs + torch.randn_like(inputs))),
        mean_step,
        None,
        make_batch(16),
    ),
    "dropout that is recomputed": (Recomputed, mean_step, None, make_batch(16)),
    "tied weights": (tied, mean_step, None, make_batch(16)),
    "GroupNorm": (convolutional, mean_step, None, make_batch(16)),
    "bfloat16 autocast": (small, in_bfloat16, None, make_batch(16)),
    "bfloat16 model": (lambda: small().bfloat16(), mean_step, None, make_batch(16, torch.bfloat16)),
    "bfloat16 by hand": (lambda: small().bfloat16(), cast_by_hand, None, make_batch(16)),
    "Sum": (small, lambda model, batch: Sum(sum_loss(model, batch), len(batch[0])), None, make_batch(16)),
    "PerStep": (
        small,
        lambda model, batch: {"loss": mean_step(model, batch), "decay": PerStep(regulariser(model))},
        None,
        make_batch(16),
    ),
    "complex": (
        Complex,
        lambda model, batch: (batch[0] @ model.weight.real).square().mean() + (batch[0] @ model.weight.imag).mean(),
        None,
        make_batch(16),
    ),
    "at its optimum": (at_its_optimum, squared_error, None, make_batch(16)),
    "flat in its parameters": (small, flat, None, make_batch(16)),
    "amplified rounding": (lambda: Path(amplify), mean_step, None, make_batch(16)),
    "amplified rounding and new tensors": (lambda: Path(state_of_zeros), mean_step, None, make_batch(16)),
    "ragged": (small, mean_step, None, make_batch(7)),
    "two samples": (small, mean_step, None, make_batch(2)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_exact_split_is_exact_to_rounding(name):
    """Steps that split exactly measure at least ten times less than what would be called inexact."""
    make_model, step, weigh, batch = RIGHT[name]
    torch.manual_seed(0)
    verdict = verify(make_model(), batch, step, weigh)
    assert verdict.exact, str(verdict)
    assert verdict.relative_error <= 1e-5
    assert verdict.causes == ()


@pytest.mark.quick
def test_a_verdict_leaves_no_trace():
    """Parameters, gradients, buffers, generators, modes, hooks and counters are bit for bit as before."""
    model = Everything().bfloat16()
    mean_step(model, make_batch(8, torch.bfloat16)).backward()
    before = bits_of(model)
    verdict = verify(model, make_batch(8, torch.bfloat16), mean_step)
    assert not verdict.exact
    assert differences(bits_of(model), before) == []
    assert model.drop.p == 0.3


@pytest.mark.quick
def test_the_batch_is_left_alone():
    """A step that writes into its batch is refused, and the user's batch has not been written into."""
    batch = make_batch(8)
    kept = batch[0].clone()

    def write(model, part):
        part[0].mul_(2)
        return mean_step(model, part)

    with pytest.raises(Exception, match="in place"):
        verify(small(), batch, write)
    assert torch.equal(batch[0], kept)


def test_samples_that_are_alike_give_no_verdict():
    """Nothing is promised from samples that cannot show whether they depend on each other."""
    verdict = verify(small(), (torch.ones(8, 6), torch.zeros(8, dtype=torch.long)), info_nce)
    assert not verdict.exact
    assert "all alike" in verdict.unchecked
    assert "not checked" in str(verdict)


def test_one_sample_gives_no_verdict():
    """One sample cannot be split."""
    assert "one sample" in verify(small(), make_batch(1), mean_step).unchecked


def test_memory_that_ends_with_many_samples_leaves_fewer():
    """Where 16 samples do not fit at once, fewer are compared; where two do not, it says so."""
    assert verify(small(), make_batch(16), limited(4)).samples == 4
    assert "memory ended" in verify(small(), make_batch(16), limited(1)).unchecked


@pytest.mark.parametrize("layers", [small, with_batch_norm], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("package", ["Python's random", "numpy.random"])
def test_what_draws_outside_torch_gives_no_verdict(package, layers):
    """Noise that cannot be controlled explains any difference, so no cause is made up for it."""
    import random

    import numpy as np

    def step(model, batch):
        return mean_step(model, batch) * (random.random() if package == "Python's random" else np.random.rand())

    verdict = verify(layers(), make_batch(16), step)
    assert not verdict.exact
    assert verdict.causes == ()
    assert f"draws from {package}, which cannot be controlled" in verdict.unchecked


def test_what_is_drawn_and_does_not_matter_does_no_harm():
    """A generator may move where the gradient does not depend on it."""
    import random

    verdict = verify(small(), make_batch(16), lambda model, batch: (mean_step(model, batch), random.random())[0])
    assert verdict.exact


def test_an_error_of_the_steps_own_comes_out():
    """An error that the step also raises by itself comes out unchanged."""

    def step(model, batch):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        verify(small(), make_batch(16), step)


HALF = small().bfloat16()


def with_half_teacher(model: nn.Module, batch: Any) -> torch.Tensor:
    """A frozen model in half precision, which is not the one that is trained."""
    with torch.no_grad():
        target = HALF(batch[0].bfloat16()).float()
    return F.mse_loss(model(batch[0]), target)


def insists_on_half(model: nn.Module, batch: Any) -> torch.Tensor:
    """As a kernel of another package does."""
    hidden = model(batch[0].bfloat16())
    assert hidden.dtype == torch.bfloat16
    return F.cross_entropy(hidden.float(), batch[1])


NOT_DETERMINISTIC: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "half teacher": (small, with_half_teacher, None, make_batch(16), "same dtype"),
    "insists on half": (lambda: small().bfloat16(), insists_on_half, None, make_batch(16), "AssertionError"),
}


@pytest.mark.parametrize("name", NOT_DETERMINISTIC)
def test_a_step_that_runs_and_cannot_be_held_still_gives_no_verdict(name):
    """It is not the step's fault, so it is not raised, and the verdict says so."""
    make_model, step, weigh, batch, reason = NOT_DETERMINISTIC[name]
    verdict = verify(make_model(), batch, step, weigh)
    assert "the step cannot be made deterministic" in verdict.unchecked
    assert reason in verdict.unchecked


class Squeezes(nn.Module):
    """Does not know what to do with one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs).squeeze())


def test_a_step_that_cannot_run_one_sample_is_divided_otherwise():
    """Parts of two samples are compared then."""
    verdict = verify(Squeezes(), make_batch(16), mean_step)
    assert verdict.exact, str(verdict)
    assert verdict.partitions[0] == (2, 14)


class Opaque:
    """Says of each number whether it is equal, as data frames do."""

    def __init__(self, start: int) -> None:
        self.values = torch.arange(3) + start

    def __eq__(self, other):
        return self.values == other.values

    __hash__ = None


def test_samples_that_cannot_be_compared_count_as_different():
    """No error comes of asking whether they are alike."""
    batch = (torch.ones(16, 6), [Opaque(index) for index in range(16)], torch.zeros(16, dtype=torch.long))
    assert verify(small(), batch, lambda model, part: F.cross_entropy(model(part[0]), part[2])).exact


def test_the_modes_are_the_users():
    """BatchNorm couples samples in train mode only, and the mode is not changed for the check."""
    assert verify(with_batch_norm().eval(), make_batch(16), mean_step).exact
    assert not verify(with_batch_norm(), make_batch(16), mean_step).exact


def test_a_part_without_labels_is_not_exact():
    """A part in which there is nothing to count does not keep the count from being named."""
    batch = tokens()
    batch["labels"][0] = -100
    verdict = verify(small(), batch, token_mean)
    assert not verdict.exact
    assert "!= -100" in verdict.causes[0]


@pytest.mark.quick
def test_two_causes_are_both_named():
    """BatchNorm does not hide that the loss is a sum."""
    verdict = verify(with_batch_norm(), make_batch(16), sum_loss)
    assert "BatchNorm" in verdict.causes[0]
    assert "autobatch.Sum" in verdict.causes[1]


def test_a_verdict_is_one_line():
    """Whatever it says, it fits a log."""
    verdict = Verdict(exact=True, relative_error=1e-7, samples=16, partitions=((1, 15),))
    assert str(verdict) == "splitting is exact: 16 samples in 1 division, relative error 1.0e-07"


@pytest.mark.parametrize(
    ("make_model", "modules"),
    [
        (lambda: KeyEncoder(way="in place"), "KeyEncoder, key"),
        (lambda: KeyEncoder(way="data in place"), "KeyEncoder, key"),
        (lambda: KeyEncoder(way="data assigned"), "KeyEncoder"),
        (Normalised, "body, head"),
        (Hidden, "Hidden"),
    ],
    ids=["in place", "data in place", "data assigned", "trained weights", "attributes"],
)
def test_state_that_moves_in_forward_is_found_and_put_back(make_model, modules):
    """Each run begins from the same state, wherever that is; its drift is neither rounding nor a wrong count."""
    torch.manual_seed(0)
    model = make_model()
    before = bits_of(model)
    verdict = verify(model, make_batch(8), mean_step)
    assert not verdict.exact
    assert any(f"state that moves with every forward pass ({modules};" in cause for cause in verdict.causes)
    assert not differences(bits_of(model), before)


@pytest.mark.parametrize("drift", [1e-3, 0.05, 1.0])
def test_state_that_cannot_be_put_back_does_not_pass_for_rounding(drift):
    """A step whose own counter changes the loss: no two runs agree, and no split is called exact for it."""
    calls = itertools.count(1)

    def step(model, batch):
        return mean_step(model, batch) * (1 + drift * next(calls))

    verdict = verify(Plain(torch.float32), make_batch(8), step)
    assert not verdict.exact
    assert any("the same samples give another gradient each time" in cause for cause in verdict.causes)
