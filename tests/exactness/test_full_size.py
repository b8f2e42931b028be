"""The check at full size: steps that depend on their micro-batch only where it has more than a few samples."""

from __future__ import annotations

import pytest
import torch
from sampling import sample
from splits import RIGHT, small, token_mean, tokens
from texts import Reader, count_tokens, length_of, make_texts, read_step
from torch import nn
from torch.nn import functional as F
from workloads import (
    bits_of,
    differences,
    full_batch_gradient,
    gradients_of,
    limited,
    make_batch,
    mean_step,
    relative_error,
)

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import InexactSplit
from autobatch.exactness.comparison import SplitComparison
from autobatch.exactness.verification import Planned, compare_few, compare_many, verify
from autobatch.memory.cpu import CpuDevice
from autobatch.step.workload import Workload
from autobatch.testing import FakeDevice, oom_at


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def hardest(model, batch):
    """The 20 hardest samples."""
    losses = losses_of(model, batch)
    return losses.topk(min(20, len(losses))).values.mean()


def ohem(model, batch):
    """All losses above a threshold, and at least the 18 hardest."""
    losses = losses_of(model, batch).sort(descending=True).values
    least = losses[min(18, len(losses)) - 1].detach()
    return losses[losses >= torch.minimum(least, torch.tensor(9.0))].mean() if len(losses) > 18 else losses.mean()


def branching(model, batch):
    """Another loss for many samples than for few."""
    losses = losses_of(model, batch)
    return losses.square().mean() if len(losses) > 40 else losses.mean()


def centred(model, batch):
    """A statistic over the batch once it has enough samples for one."""
    out = model(batch[0])
    return F.cross_entropy(out - out.mean(0) if len(out) > 20 else out, batch[1])


def clipped(model, batch):
    """Losses above a quantile count less, where there are enough of them."""
    losses = losses_of(model, batch)
    return torch.minimum(losses, losses.detach().quantile(0.7)).mean() if len(losses) >= 30 else losses.mean()


class Queue(nn.Module):
    """Negatives from earlier micro-batches, once there are 32 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.held = small(), []

    def forward(self, inputs):
        out = self.body(inputs)
        seen = torch.cat(self.held) if self.held else out[:0].detach()
        self.held = [seen, out.detach()]
        return out - seen.mean(0) if len(seen) >= 32 else out


SIZED = {
    "hardest samples": (small, hardest),
    "OHEM": (small, ohem),
    "a branch on the size": (small, branching),
    "a statistic of many": (small, centred),
    "clipping by quantile": (small, clipped),
    "a queue": (Queue, mean_step),
}


@pytest.mark.parametrize("samples", [8, 64], ids=["repeated samples", "samples of its own"])
@pytest.mark.parametrize("name", SIZED)
def test_a_split_that_is_wrong_only_for_many_samples_is_found(name, samples):
    """The plan's own division is compared with the whole target, so it is not called exact."""
    make_model, step = SIZED[name]
    model = make_model()
    before = bits_of(model)
    plan = autobatch.fit(model, 64, batch=make_batch(samples), step=step, max_micro_batch=32)
    assert not plan.verdict.exact
    assert not plan.verdict.unchecked
    assert plan.verdict.relative_error > 1e-3
    assert plan.verdict.samples == 64
    assert plan.verdict.partitions == (plan.micro_batch_sizes,)
    assert str(plan.verdict) in plan.warnings
    assert differences(bits_of(model), before) == []
    with pytest.raises(InexactSplit, match="not exact"):
        autobatch.fit(model, 64, batch=make_batch(samples), step=step, max_micro_batch=32, check="raise")


@pytest.mark.parametrize("name", [name for name in SIZED if name != "a queue"])
def test_its_cause_names_the_sizes(name):
    """What is exact for few samples and not for many depends on how many there are."""
    make_model, step = SIZED[name]
    plan = autobatch.fit(make_model(), 64, batch=make_batch(64), step=step, max_micro_batch=32)
    [cause] = plan.verdict.causes
    assert "splitting 16 samples is exact and splitting 64 is not" in cause
    assert "how many samples" in cause


@pytest.mark.parametrize("name", SIZED)
def test_verify_compares_the_whole_batch(name):
    """All of the user's batch is compared, not 16 of its samples."""
    make_model, step = SIZED[name]
    verdict = verify(make_model(), make_batch(64), step)
    assert not verdict.exact
    assert verdict.samples == 64
    assert verify(make_model(), make_batch(16), step).exact


def test_the_error_is_the_true_one():
    """It is that of the plan's division against the naive gradient of the whole batch."""
    model, batch = Plain64(), make_batch(64, torch.float64)
    plan = autobatch.fit(model, 64, batch=batch, step=hardest, max_micro_batch=32)
    expected = full_batch_gradient(model, hardest, batch)
    autobatch.Runner(plan, model, hardest, None).accumulate(batch)
    found = gradients_of(model)
    worst = max(relative_error({name: found[name]}, {name: expected[name]}) for name in expected)
    assert plan.verdict.relative_error == pytest.approx(worst, rel=1e-6)


def Plain64():
    """In float64."""
    return small().double()


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("samples", sample([200, 40], 2))
def test_a_right_step_is_exact_at_full_size(name, samples):
    """No false alarm of rounding, dropout or random draws of many samples, by fit or by verify."""
    make_model, step, weigh, batch = RIGHT[name]
    torch.manual_seed(0)
    many = tokens(samples) if isinstance(batch, dict) else make_batch(samples, batch[0].dtype)
    if name == "at its optimum":
        many = batch
    verdict = verify(make_model(), many, step, weigh)
    assert verdict.exact, str(verdict)
    plan = autobatch.fit(make_model(), samples, batch=many, step=step, weigh=weigh, max_micro_batch=18, check="raise")
    assert plan.verdict.larger_partition == plan.micro_batch_sizes
    assert not plan.verdict.not_compared


def test_counts_that_differ_only_among_many_samples_are_advised():
    """Rows without padding among the first 16 hide that the mean is over tokens; the whole batch shows it."""
    batch = tokens(128)
    batch["labels"] = torch.randint(2, 4, (128, 5), generator=torch.Generator().manual_seed(0))
    batch["labels"][1:40:8, 2:] = -100  # between those that are taken evenly
    assert verify(small(), {name: rows[::8] for name, rows in batch.items()}, token_mean).exact
    verdict = verify(small(), batch, token_mean)
    assert not verdict.exact
    assert any('weigh=lambda batch: (batch["labels"] != -100).sum()' in cause for cause in verdict.causes)


@pytest.mark.parametrize("capacity", [40, 63, 100])
def test_the_largest_part_that_fits_is_compared(capacity):
    """Where memory is what limits the size, as much as fits is compared, never more, and the verdict says how much."""
    for step, exact in ((hardest, False), (mean_step, True)):
        device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=100 + 10 * capacity)
        plan = autobatch.fit(small(), 256, batch=make_batch(64), step=step, device=device, headroom=0)
        assert plan.verdict.exact == exact
        compared = sum(plan.verdict.larger_partition) or plan.verdict.samples
        assert 32 <= compared <= capacity
        fitting = device.ran_sizes[len(device.ran_sizes) - 1 - device.ran_sizes[::-1].index(2) :]
        assert max(fitting) <= capacity
        if exact:
            assert f"at most {compared} of 256 samples were compared at once" in plan.verdict.not_compared
            assert plan.verdict.not_compared in str(plan.verdict)
            assert plan.verdict.not_compared in " ".join(plan.explain().split())


def test_several_micro_batches_are_compared_where_they_fit_at_once():
    """Of a target that does not fit, as many planned micro-batches as do."""
    device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=100 + 10 * 150)
    plan = autobatch.fit(
        small(), 256, batch=make_batch(64), step=mean_step, device=device, headroom=0, max_micro_batch=32
    )
    assert plan.verdict.larger_partition == (32, 32, 32, 32)
    assert "at most 128 of 256" in plan.verdict.not_compared


@pytest.mark.parametrize("most", [20, 32, 63])
def test_memory_that_ends_in_the_comparison_does_not_end_fit(most):
    """Fewer samples are compared then, down to those of the first comparison; the verdict says how many."""
    plan = autobatch.fit(small(), 64, batch=make_batch(64), step=limited(most), max_micro_batch=20, check="raise")
    assert plan.verdict.exact
    assert "of 64 samples were compared at once" in plan.verdict.not_compared
    assert (sum(plan.verdict.larger_partition) or 16) <= most


@pytest.mark.parametrize("most", [16, 20, 32])
def test_memory_that_ends_in_verify_leaves_fewer_samples(most):
    """As in fit."""
    verdict = verify(small(), make_batch(64), limited(most))
    assert verdict.exact
    assert "of 64 samples were compared at once" in verdict.not_compared
    assert (sum(verdict.larger_partition) or 16) <= most


def test_memory_may_end_anywhere_in_the_comparison():
    """Wherever it ends, the verdict of few samples stands or is extended, and no error comes out."""
    workload, device = Workload(small(), mean_step), CpuDevice()
    comparison = SplitComparison(workload, describe(make_batch(40)), device, after_trials=True)
    few = compare_few(comparison, 16)
    with oom_at(10**9) as counted:
        assert not compare_many(comparison, few, Planned(40, 20, 40)).not_compared
    compared = set()
    for position in range(1, counted.operations, 7):
        with oom_at(position):
            found = compare_many(comparison, few, Planned(40, 20, 40))
        assert found.exact
        assert bool(found.not_compared) == (sum(found.larger_partition) < 40)
        compared.add(sum(found.larger_partition))
    assert 20 in compared


def test_a_step_that_refuses_many_samples_is_planned_all_the_same():
    """What the whole target raises at once is not raised by fit, whose plan never runs it so."""

    def step(model, batch):
        if len(batch[0]) > 32:
            raise ValueError("at most 32")
        return mean_step(model, batch)

    plan = autobatch.fit(small(), 64, batch=make_batch(64), step=step, max_micro_batch=20)
    assert plan.verdict.exact
    assert "ValueError" in plan.verdict.not_compared


def make_pairs(pairs=32):
    """Texts, chosen and rejected in neighbouring rows, of unlike lengths."""
    generator = torch.Generator().manual_seed(1)
    batch = make_texts([24, *torch.randint(2, 25, (2 * pairs - 1,), generator=generator).tolist()])
    return {**batch, "pair": torch.arange(2 * pairs) // 2, "chosen": torch.arange(2 * pairs) % 2 == 0}


def prefer(model, batch):
    """Chosen against rejected text of each pair that is there, and a mean over texts."""
    mask = batch["mask"]
    words = model(batch["tokens"], mask).log_softmax(-1).gather(2, batch["tokens"][..., None])[..., 0]
    scores, chosen = (words * mask).sum(1), batch["chosen"]
    pairs = (batch["pair"][:, None] == batch["pair"]) & chosen[:, None] & ~chosen
    return -(F.logsigmoid(0.1 * (scores[:, None] - scores)) * pairs).sum() / len(scores) + scores.square().mean() / 100


def test_pairs_that_lengths_tears_apart_are_found():
    """Samples are compared in the order in which they would run: neighbours of the batch are none of its lengths."""
    batch, given = make_pairs(), {"step": prefer, "cut": autobatch.by_length(length_of)}
    model = Reader()
    before = bits_of(model)
    verdict = verify(model, batch, **given)
    assert not verdict.exact
    assert verdict.relative_error > 1e-3
    with pytest.raises(InexactSplit, match="two samples in a row belong together"):
        autobatch.fit(model, 64, batch=batch, max_micro_batch=16, check="raise", reuse=False, **given)
    assert differences(bits_of(model), before) == []


@pytest.mark.parametrize("target", [64, 100])
def test_a_right_step_on_samples_in_order_of_length_is_exact_at_full_size(target):
    """Of the batch's own samples, and of those repeated."""
    batch, given = make_pairs(), {"step": read_step, "weigh": count_tokens, "cut": autobatch.by_length(length_of)}
    assert verify(Reader(), batch, **given).larger_partition == (32, 16, 16)
    plan = autobatch.fit(Reader(), target, batch=batch, max_micro_batch=16, check="raise", reuse=False, **given)
    assert sum(plan.verdict.larger_partition) == target


def rows_run(target, **options):
    """How many rows a fit runs through its step."""
    seen = []

    def step(model, batch):
        seen.append(len(batch[0]))
        return mean_step(model, batch)

    torch.manual_seed(0)
    autobatch.fit(small(), target, batch=make_batch(64), step=step, max_micro_batch=16, reuse=False, **options)
    return sum(seen)


def test_it_costs_one_whole_batch_and_one_accumulated():
    """Not more than two steps, however large the target."""
    first = rows_run(256) - rows_run(256, check=None) - 2 * 256
    assert first == rows_run(512) - rows_run(512, check=None) - 2 * 512
    assert first <= 16 * 16


def test_a_plan_that_does_not_split_is_compared_with_what_a_retry_would_run():
    """The whole target fits, so a retry is what divides it first."""
    plan = autobatch.fit(small(), 64, batch=make_batch(64), step=hardest)
    assert plan.micro_batch_sizes == (64,)
    assert not plan.verdict.exact
    assert not [warning for warning in plan.warnings if "exact" in warning]
