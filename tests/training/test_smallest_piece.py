"""The fewest samples that a model can run: no plan, retry or ragged batch is cut into fewer."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import sample
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.plan import Plan
from autobatch.planning.division import balance, least_size
from autobatch.records import DeviceInfo
from autobatch.testing import FakeDevice


class Functional(nn.Module):
    """Normalises by the batch's statistics with no module that says so."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, inputs):
        return F.batch_norm(self.first(inputs), None, None, training=True)


class Squeezes(nn.Module):
    """Loses its batch dimension where it is 1; BatchNorm makes it one that is asked."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.GroupNorm(8, 8)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)[:, :, None].expand(-1, -1, 2)).mean(2)
        return hidden.squeeze().unflatten(1, (2, 4)).flatten(1)


class Fills(nn.Module):
    """Holds so many bytes of each sample until the backward pass."""

    def __init__(self, byte_count):
        super().__init__()
        self.width = byte_count // 4

    def forward(self, inputs):
        rows = inputs.flatten(1).mean(1, keepdim=True)
        return (rows.expand(-1, self.width) * 2).sin().mean(1, keepdim=True)


def flat(norm):
    """One value per channel: the norm cannot run one sample."""
    return lambda: nn.Sequential(nn.Linear(6, 8), norm(), nn.Linear(8, 4))


def spatial(norm):
    """Several values per channel in one sample: any number of samples runs."""
    return lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), norm(), nn.Flatten())


REFUSING = {
    "BatchNorm1d": flat(lambda: nn.BatchNorm1d(8)),
    "without running statistics": flat(lambda: nn.BatchNorm1d(8, track_running_stats=False)),
    "SyncBatchNorm": flat(lambda: nn.SyncBatchNorm(8)),
    "GroupNorm of one channel": flat(lambda: nn.GroupNorm(8, 8)),
    "after pooling": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.AdaptiveAvgPool1d(1), nn.BatchNorm1d(8), nn.Flatten()
    ),
    "functional": Functional,
    "squeeze": Squeezes,
}
RUNNING = {
    "BatchNorm1d over positions": spatial(lambda: nn.BatchNorm1d(8)),
    "InstanceNorm": spatial(lambda: nn.InstanceNorm1d(8)),
    "GroupNorm": flat(lambda: nn.GroupNorm(2, 8)),
    "LayerNorm": flat(lambda: nn.LayerNorm(8)),
    "frozen BatchNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval()),
}


def step(model, batch):
    return model(batch).flatten(1).square().mean(1).mean()


def samples(count):
    return torch.linspace(-1, 1, 6 * count).view(count, 6)


def fit(model, target, *, optimizer=None, **options):
    """A plan on a device with room for all, unless another is given."""
    options = {"device": FakeDevice(lambda n: 10 + n, 10**6), "check": None, **options}
    return autobatch.fit(model, target, batch=samples(2), step=step, optimizer=optimizer, **options)


def make_runner(model, plan, device=None, **options):
    """With SGD, on a device with room for all unless another is given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = device or FakeDevice(lambda n: 10 + n, 10**6)
    return autobatch.Runner(plan, model, step, optimizer, device=device, **options)


def hand_made(target, size):
    sizes = balance(target, size)
    return Plan(
        target_batch=target,
        world_size=1,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=10**6,
        headroom_bytes=0,
        peak_bytes=0,
        curve=None,
        trials=(),
        device=DeviceInfo(kind="fake", name="fake device", total_bytes=10**6),
        version="0.1.0",
    )


totals, smallests = st.integers(1, 300), st.integers(1, 9)


@given(totals, st.integers(1, 300), smallests)
def test_a_division_has_no_part_below_the_smallest(total, largest, smallest):
    """It is the fewest parts, as equal as can be, and it is refused exactly where none is possible."""
    if largest < least_size(total, smallest) or total < smallest:
        with pytest.raises(InvalidArgument, match=f"{total} samples cannot be divided"):
            balance(total, largest, smallest)
        return
    parts = balance(total, largest, smallest)
    assert parts == balance(total, largest)
    assert smallest <= min(parts) <= max(parts) <= largest


@given(st.integers(1, 60), st.integers(1, 6))
def test_the_least_size_is_the_least_that_allows_a_division(total, smallest):
    """Found by counting: some number of parts can all be from the smallest to that size, and not to one less."""

    def divisible(size):
        return any(parts * smallest <= total <= parts * size for parts in range(1, total + 1))

    least = least_size(total, smallest)
    assert least == (next(size for size in range(1, total + 1) if divisible(size)) if total >= smallest else total)


@pytest.mark.parametrize("model", REFUSING.values(), ids=REFUSING)
@pytest.mark.parametrize(("target", "bound"), [(9, 3), (9, 4), (8, 2), (5, 3), (7, 7), (3, 3)])
def test_the_first_step_of_every_plan_runs(model, target, bound):
    """An odd batch and any bound: no piece of one sample is in the plan, nor in what runs."""
    model = model()
    plan = fit(model, target, max_micro_batch=bound)
    assert min(plan.micro_batch_sizes) >= 2
    assert max(plan.micro_batch_sizes) <= bound
    assert make_runner(model, plan).step(samples(target)).micro_batch_sizes == plan.micro_batch_sizes


@pytest.mark.parametrize("model", [*REFUSING.values()][:-1], ids=[*REFUSING][:-1])
@pytest.mark.parametrize(("target", "bound", "least"), [(9, 2, 3), (9, 1, 3), (8, 1, 2), (3, 2, 3)])
@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_a_bound_that_leaves_one_sample_alone_is_refused(model, target, bound, least, objective):
    """The message says which bound would do."""
    with pytest.raises(DoesNotFit, match=rf"cannot run one sample: pass max_micro_batch={least} or more"):
        fit(model(), target, max_micro_batch=bound, objective=objective)


@pytest.mark.parametrize("model", RUNNING.values(), ids=RUNNING)
def test_a_model_that_runs_one_sample_is_given_one(model):
    """Its plan may have pieces of one, and a retry goes down to one."""
    model, device = model(), FakeDevice(lambda n: 10 + n, 13)
    plan = fit(model, 9, max_micro_batch=2, device=device, headroom=0)
    assert plan.micro_batch_sizes == (2, 2, 2, 2, 1)
    assert plan.smallest_micro_batch == 1
    device.curve = lambda n: 12 + n
    assert make_runner(model, plan, device).step(samples(9)).micro_batch_sizes == (1,) * 9


@pytest.mark.parametrize("model", REFUSING.values(), ids=REFUSING)
def test_a_whole_batch_of_one_sample_is_the_users_own(model):
    """Nothing is divided, so the model's own error comes out, from ``fit`` as from a step."""
    with pytest.raises((ValueError, IndexError)):
        fit(model(), 1)
    model = model()
    runner = make_runner(model, fit(model, 8, max_micro_batch=4))
    with pytest.raises((ValueError, IndexError)):
        runner.step(samples(1))
    assert runner.step_over([samples(4), samples(1)]).micro_batch_sizes == (3, 2)
    assert sum(runner.step_over([samples(4), samples(5)]).micro_batch_sizes) == 9


def test_memory_for_two_samples_is_too_little_for_an_odd_batch():
    """The next division needs three: ``DoesNotFit`` names BatchNorm; an even batch runs."""
    device = FakeDevice(lambda n: 10 + n, 12)
    with pytest.raises(DoesNotFit, match=r"BatchNorm in train mode \(1\) cannot run one sample"):
        fit(REFUSING["BatchNorm1d"](), 9, device=device, headroom=0)
    assert fit(REFUSING["BatchNorm1d"](), 8, device=device, headroom=0).micro_batch_sizes == (2, 2, 2, 2)


def run_until_short(runner, batch, later):
    """As many steps as it takes until one runs out of memory."""
    for _ in range(later + 1):
        runner.step(batch)


@given(target=st.integers(2, 24), size=st.integers(2, 24), most=st.integers(1, 24), later=st.integers(0, 8))
def test_no_retry_runs_one_sample(target, size, most, later):
    """Memory ends at any size and any piece: pieces of two at least, no larger than what failed, or ``DoesNotFit``."""
    model = REFUSING["BatchNorm1d"]()
    plan = fit(model, target, max_micro_batch=max(size, least_size(target, 2)))
    calls = []

    def curve(n):
        calls.append(n)
        return 10 + n if len([c for c in calls if c]) <= later or n <= most else 10**9

    device = FakeDevice(curve, 10**6, measures=False)
    runner = make_runner(model, plan, device)
    if most < least_size(target, 2):
        with pytest.raises(DoesNotFit, match=r"BatchNorm in train mode \(1\) cannot run one sample"):
            run_until_short(runner, samples(target), later)
    else:
        sizes = runner.step(samples(target)).micro_batch_sizes
        assert (sum(sizes), min(sizes) >= 2) == (target, True)
    assert min(device.ran_sizes) >= 2


@pytest.mark.parametrize("model", [*REFUSING.values()][:-1], ids=[*REFUSING][:-1])
@pytest.mark.parametrize(("target", "size", "sizes"), [(9, 2, (3, 3, 3)), (9, 4, (3, 3, 3)), (5, 1, (3, 2))])
def test_a_plan_without_trials_finds_out_and_leaves_no_damage(model, target, size, sizes):
    """The step ends bit for bit as one whose plan knew it from the start."""
    torch.manual_seed(0)
    model = model()
    reference = copy.deepcopy(model)
    knowing = hand_made(target, max(size, 3)).model_copy(update={"smallest_micro_batch": 2})
    runner = make_runner(model, hand_made(target, size))
    other = make_runner(reference, knowing)
    for _ in range(2):
        assert runner.step(samples(target)).micro_batch_sizes == sizes
        assert other.step(samples(target)).micro_batch_sizes == sizes
    for found, expected in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(found, expected)


def test_ragged_batches_of_a_loader_have_no_piece_of_one():
    """Joined in ``step_over`` or alone, and ``weigh`` counts the same."""
    model = REFUSING["BatchNorm1d"]()
    plan = fit(model, 8, max_micro_batch=3)
    runner = make_runner(model, plan, weigh=lambda batch: 2.0 * len(batch))
    assert runner.step_over([samples(4), samples(5), samples(3)]).micro_batch_sizes == (3, 3, 3, 3)
    assert runner.step_over([samples(4), samples(1), samples(5)]).micro_batch_sizes == (3, 3, 2, 2)
    assert runner.accumulate(samples(5)).micro_batch_sizes == (3, 2)


@pytest.mark.parametrize("model", [*REFUSING.values()][:-1], ids=[*REFUSING][:-1])
@pytest.mark.parametrize("knows", [True, False], ids=["fit", "by hand"])
@pytest.mark.parametrize("count", [3, 5, 9])
def test_no_piece_is_larger_than_max_micro_batch(model, knows, count):
    """It is the user's word: an odd batch that needs a piece of three is refused, and nothing has changed."""
    model = model()
    by_hand = hand_made(8, 2).model_copy(update={"max_micro_batch": 2})
    plan = fit(model, 8, max_micro_batch=2) if knows else by_hand
    device = FakeDevice(lambda n: 10 + n, 10**6)
    runner = make_runner(model, plan, device)
    before = copy.deepcopy(model.state_dict())
    joined = lambda odd: runner.step_over([odd[:2], odd[2:]])  # noqa: E731 - one more way to run it
    for run in (runner.step, runner.accumulate, joined):
        with pytest.raises(DoesNotFit, match=rf"{count} samples in micro-batches of at most 2 .*max_micro_batch=3\)"):
            run(samples(count))
    assert device.ran_sizes == [] or plan.smallest_micro_batch == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert runner.step(samples(8)).micro_batch_sizes == (2, 2, 2, 2)


@pytest.mark.parametrize("count", [3, 5, 9])
def test_a_bound_that_nobody_asked_for_refuses_no_batch(count):
    """A plan for two samples never tried three; a later odd batch runs all the same."""
    model = REFUSING["BatchNorm1d"]()
    sizes = make_runner(model, fit(model, 2)).step(samples(count)).micro_batch_sizes
    assert (sum(sizes), min(sizes)) == (count, 3 if count in (3, 9) else 2)


@pytest.mark.predicts
@pytest.mark.parametrize("name", sample(REFUSING, 4))
def test_a_prediction_finds_the_smallest_piece_as_fit_does(name):
    """Nine samples on a card with memory for one or two at a time: no division has no piece of one, as ``fit`` says."""
    model = nn.Sequential(REFUSING[name](), Fills(2**28))
    odd, even = (autobatch.predict(model, samples(2), step, gpu="3.75GiB", target_batch=count) for count in (9, 8))
    assert (odd.plan, odd.judged_size) == (None, 3)
    assert "not even 3 samples fit" in str(odd)
    assert even.plan.micro_batch_sizes == (2, 2, 2, 2)
    assert even.plan.smallest_micro_batch == 2 or not isinstance(model[0], nn.Sequential)


def test_a_compiled_model_has_no_piece_of_one():
    """Its few sizes are halved down to two, and an odd rest is three."""
    model = REFUSING["BatchNorm1d"]()
    plan = fit(model, 10, max_micro_batch=5)
    device = FakeDevice(lambda n: 10 + n, 10**6, measures=False)
    compiled = torch.compile(model, backend="eager")
    runner = make_runner(compiled, plan, device)
    device.curve = lambda n: 10 if n <= 3 else 10**9
    assert runner.step(samples(10)).micro_batch_sizes == (2,) * 5
