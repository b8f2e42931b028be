"""``verify`` on steps that split exactly and on steps that do not, by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moving_models import Hidden, KeyEncoder, Normalised
from sampling import sample
from splits import (
    NOT_DETERMINISTIC,
    RIGHT,
    WRONG,
    Squeezes,
    class_weighted,
    info_nce,
    small,
    sum_loss,
    token_mean,
    tokens,
    with_batch_norm,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import Everything, Plain, bits_of, differences, limited, make_batch, mean_step

from autobatch.exactness.verification import verify


def of_losses(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A step that does this with the losses of its samples."""
    return lambda model, batch: function(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


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


@pytest.mark.parametrize("seed", sample(range(3), 4))
@pytest.mark.parametrize("samples", [16, 40])
@pytest.mark.parametrize("name", sample(NO_MEANS, 3))
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


def pulled_together(model, batch):
    """Two rows with the same number are drawn to each other, as two views, or a chosen and a rejected answer."""
    outputs = model(batch[0])
    is_pair = (batch[2][:, None] == batch[2][None, :]).triu(1)
    return F.cross_entropy(outputs, batch[1]) + (torch.cdist(outputs, outputs).square() * is_pair).sum() / len(outputs)


@pytest.mark.parametrize("samples", [8, 16, 18, 50, 64, 100, 256])
def test_neighbours_that_belong_together_are_named(samples):
    """Of few samples and of many, where the compared ones are spread over the batch and every planned cut is even."""
    batch = (*make_batch(samples), torch.arange(samples) // 2)
    verdict = verify(small(), batch, pulled_together)
    assert not verdict.exact, str(verdict)
    assert ["in rows 2i and 2i + 1" in cause for cause in verdict.causes] == [True]


@pytest.mark.parametrize("samples", [8, 16, 18, 22, 50, 64, 100, 250, 256])
def test_halves_that_belong_together_are_called_dependent(samples):
    """Row i and row i + n/2: cut after two rows it is as wrong as after one."""
    batch = (*make_batch(samples), torch.arange(samples) % (samples // 2))
    verdict = verify(small(), batch, pulled_together)
    assert ["depends on the others" in cause for cause in verdict.causes] == [True]


@pytest.mark.parametrize("samples", [8, 16, 18, 64])
def test_pairs_are_found_where_one_sample_cannot_run(samples):
    """Not every cut may be after an even number of samples, or it is never between the two of a pair."""
    batch = (*make_batch(samples), torch.arange(samples) // 2)
    verdict = verify(Squeezes(), batch, pulled_together)
    assert not verdict.exact, str(verdict)
    assert ["in rows 2i and 2i + 1" in cause for cause in verdict.causes] == [True]


def interleaved(model, batch):
    """Bradley-Terry of chosen and rejected rows in turn: an odd number of rows is an error."""
    scores = model(batch[0])[:, 0]
    return -F.logsigmoid(scores[0::2] - scores[1::2]).mean()


@pytest.mark.parametrize("samples", [6, 16, 66, 128])
def test_a_part_that_raises_where_all_samples_run_is_not_checked(samples):
    """It is no sample that cannot run by itself, so what the other parts say is no proof."""
    verdict = verify(small(), make_batch(samples), interleaved)
    assert not verdict.exact
    assert verdict.unchecked.startswith(f"the step raised an error at {min(samples, 16) - 1} samples (RuntimeError")


@pytest.mark.parametrize("refused", [0, 5, 15])
def test_a_single_sample_that_cannot_run_is_never_by_itself(refused):
    """As a graph without edges: parts of two samples and more are compared."""

    def step(model, batch):
        if batch[2].tolist() == [refused]:
            raise ValueError("nothing to do")
        return mean_step(model, batch[:2])

    verdict = verify(small(), (*make_batch(16), torch.arange(16)), step)
    assert verdict.exact, str(verdict)
    assert refused or verdict.partitions[0] == (2, 14)


def against_own_group(model, batch):
    """Each answer's reward less the mean reward of its prompt's answers, as GRPO and RLOO have it."""
    inputs, labels, prompts, rewards = batch
    chosen = model(inputs).log_softmax(1).gather(1, labels[:, None])[:, 0]
    same = (prompts[:, None] == prompts[None, :]).to(chosen.dtype)
    return -((rewards - same @ rewards.to(chosen.dtype) / same.sum(1)) * chosen).mean()


@pytest.mark.parametrize(("samples", "answers"), [(16, 2), (32, 4), (64, 2), (64, 8), (256, 8)])
def test_groups_of_which_those_at_the_ends_are_without_effect_are_found(samples, answers):
    """Where all answers of the first prompt and of the last are as good, only cuts between can show the groups."""
    prompts = torch.arange(samples) // answers
    rewards = torch.arange(samples).remainder(2).float()
    rewards[(prompts == 0) | (prompts == prompts[-1])] = 1.0
    verdict = verify(small(), (*make_batch(samples), prompts, rewards), against_own_group)
    assert not verdict.exact
    assert not verdict.unchecked


@pytest.mark.parametrize(("samples", "counts"), [(16, (4, 2, 6, 4)), (64, (4, 2, 6, 4)), (4096, (6, 6, 2, 2))])
def test_counts_that_are_level_at_many_cuts_are_found(samples, counts):
    """As many labels in each half, quarter and end as in any other: single samples differ."""
    labels = torch.full((samples, 6), -100)
    for row in range(samples):
        labels[row, : counts[row % len(counts)]] = row % 4
    inputs = torch.randn(samples, 6, 6, generator=torch.Generator().manual_seed(1))
    verdict = verify(small(), {"x": inputs, "labels": labels}, token_mean)
    assert not verdict.exact
    assert '(batch["labels"] != -100).sum()' in str(verdict)


class Recomputes(nn.Module):
    """Drops out inside reentrant checkpoints that are left to draw as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.drop, hidden, use_reentrant=True, preserve_rng_state=False)
        return self.last(hidden)

    def drop(self, hidden):
        return F.dropout(hidden.tanh(), 0.5, self.training)


@pytest.mark.parametrize("samples", [6, 8, 11, 16])
def test_what_a_backward_pass_draws_again_is_the_same_draw(samples):
    """Frames of the forward pass are gone by then, and others may have got their ids."""
    unused = [[object() for _ in range(37 * number)] for number in range(samples)]  # so that ids are others each time
    verdict = verify(Recomputes(), make_batch(samples), mean_step)
    assert verdict.exact, str(verdict)
    assert unused


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
    assert "memory ran out" in verify(small(), make_batch(16), limited(1)).unchecked


@pytest.mark.parametrize("layers", [small, with_batch_norm], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("package", ["Python's random", "numpy.random"])
def test_what_draws_outside_torch_gives_no_verdict(package, layers):
    """Noise that cannot be controlled explains any difference, so no cause is made up for it.

    A function that the step holds by a name of its own is not replaced.
    """
    import random

    import numpy as np

    draw = random.random if package == "Python's random" else np.random.rand

    def step(model, batch):
        return mean_step(model, batch) * draw()

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


def test_a_step_that_refuses_few_samples_is_named_for_it():
    """Nothing is said of determinism, with which it has nothing to do."""

    def step(model, batch):
        if len(batch[0]) < 5:
            raise ValueError("too small")
        return mean_step(model, batch)

    verdict = verify(small(), make_batch(16), step)
    assert verdict.unchecked == "the step raised an error at 2 samples (ValueError: too small)"


@pytest.mark.parametrize("name", NOT_DETERMINISTIC)
def test_a_step_that_runs_and_cannot_be_held_still_gives_no_verdict(name):
    """It is not the step's fault, so it is not raised, and the verdict says so."""
    make_model, step, weigh, batch, reason = NOT_DETERMINISTIC[name]
    verdict = verify(make_model(), batch, step, weigh)
    assert "the step cannot be made deterministic" in verdict.unchecked
    assert reason in verdict.unchecked


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
