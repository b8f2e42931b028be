"""A step with sharded parameters is the step of one process with the whole target, in float64 to rounding."""

import itertools
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.rank_losses import (
    count_some,
    mean_of_some,
    state_mean,
    state_sum,
    weigh_classes,
    weighted_classes,
)
from builders.ranks import run_ranks, values_of
from sampling import IN_PROOF, sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.planning.division import spread
from autobatch.records import IN_EACH, SUMMINGS
from autobatch.testing import FakeDevice

pytestmark = needs_sharding

DIVISIONS = {
    2: [(8, 8), (11, 5), (1, 15), (16, 0), (0, 16)],
    3: [(6, 5, 5), (14, 1, 1), (0, 13, 3), (0, 0, 16)],
    4: [(4, 4, 4, 4), (9, 0, 6, 1)],
}
SAMPLES = 16
NORM = 0.05


def mean_of_states(model, batch):
    """A sum and its count, which is 0 in some micro-batches."""
    chosen = (batch[1] == 1).double()
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return autobatch.Sum((losses * chosen).sum(), chosen.sum())


def whole_mean_of_states(model, batch):
    return F.cross_entropy(model(batch[0])[batch[1] == 1], batch[1][batch[1] == 1])


def run_backward(loss):
    """A framework's, in passes that count for nothing, too."""
    loss.backward()


class Deep(nn.Sequential):
    """More layers than ranks, of which one has fewer rows than there are ranks."""

    def __init__(self):
        super().__init__(
            nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4)
        )
        self.double()


class Checkpointed(Plain):
    """Its passes gather again while they are recomputed."""

    def __init__(self):
        super().__init__(checkpointed=True)


class Reentrant(Deep):
    """Its backward pass runs forward passes inside, and others of its own."""

    def forward(self, inputs):
        """The recomputed part needs an input with a gradient."""
        inputs = inputs.clone().requires_grad_()
        *layers, last = self
        for first, second in zip(layers[::2], layers[1::2], strict=True):
            inputs = checkpoint(lambda rows, pair=(first, second): pair[1](pair[0](rows)), inputs, use_reentrant=True)
        return last(inputs)


class Compiled(Deep):
    """Each layer alone, as fully_shard is used with compilation."""

    def __init__(self):
        super().__init__()
        for layer in self:
            layer.compile(backend="eager")


class Described(Deep):
    def describe(self, inputs):
        """As ``forward``."""
        return super().forward(inputs)


def step_by_method(model, batch):
    """Not through ``forward``."""
    return mean_step(model.describe, batch)


def divide_before(model, batch):
    share = len(batch[0]) / SAMPLES
    return autobatch.Sum(mean_step(model, batch) * share, count=share)


CASES = {
    "samples": (mean_step, None, mean_step, Plain, {}),
    "divided before": (divide_before, None, mean_step, Deep, {}),
    "deep": (mean_step, None, mean_step, Deep, {}),
    "tokens": (mean_of_some, count_some, mean_of_some, Deep, {}),
    "class weights": (weighted_classes, weigh_classes, weighted_classes, Deep, {}),
    "stated mean": (state_mean, None, mean_of_some, Deep, {}),
    "stated sum": (state_sum, None, mean_of_some, Plain, {}),
    "counts of zero": (mean_of_states, None, whole_mean_of_states, Deep, {}),
    "checkpointed": (mean_step, None, mean_step, Checkpointed, {}),
    "reentrant": (mean_step, None, mean_step, Reentrant, {}),
    "compiled": (mean_step, None, mean_step, Compiled, {}),
    "another method": (step_by_method, None, step_by_method, Described, {}),
    "summed in float64": (
        mean_step,
        None,
        mean_step,
        Deep,
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    ),
    "kept after forward": (mean_step, None, mean_step, Deep, {"reshard_after_forward": False}),
}


REPLICATED = sample(["deep", "tokens", "counts of zero", "reentrant", "kept after forward"], 3)


def divisions_of(name, size):
    """All of them in ``make proof``; else some, by turns from case to case."""
    first = [*CASES].index(name) % len(DIVISIONS[size])
    return sample(DIVISIONS[size][first:] + DIVISIONS[size][:first], 4)


def choose_pairs(name, size):
    """Divisions, and how often gradients are summed: all pairs in ``make proof``; else two by turns."""
    divisions, first = divisions_of(name, size), [*CASES].index(name)
    if IN_PROOF:
        return [*itertools.product(divisions, SUMMINGS)]
    return [(division, SUMMINGS[(first + turn) % 3]) for turn, division in enumerate(divisions)]


def whole_step(name):
    _, _, step, make_model, _ = CASES[name]
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = step(model, make_batch(SAMPLES, torch.float64))
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    nn.utils.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    return gradients, dict(model.named_parameters()), loss.item()


def error_of(found, expected):
    wholes = {key: tensor.full_tensor() for key, tensor in found.items()}
    assert wholes.keys() == expected.keys()
    return max(
        ((wholes[key] - tensor).norm() / tensor.norm().clamp(min=1e-30)).item() for key, tensor in expected.items()
    )


def make_runner(name, summing=IN_EACH, mesh=None, **options):
    step, weigh, _, make_model, shards = CASES[name]
    torch.manual_seed(0)
    model = shard(make_model(), mesh=mesh, **shards)
    if isinstance(model, Described):
        register_fsdp_forward_method(model, "describe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    size, rank = dist.get_world_size(), dist.get_rank()
    plan = make_rank_plans(spread(SAMPLES, size), 3, weighed=weigh is not None, summing=summing, **SMALL)[rank]
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    options.setdefault("backward", run_backward if name == "divided before" else None)
    runner = autobatch.Runner(plan, model, step, optimizer, weigh=weigh, device=device, max_grad_norm=NORM, **options)
    return model, optimizer, runner


def step_on_a_rank(name, mesh=None):
    """Errors of gradient, weights and loss of every division, and the sizes of the micro-batches."""
    rank, errors = dist.get_rank(), []
    gradients, weights, loss = whole_step(name)
    whole = make_batch(SAMPLES, torch.float64)
    for division, summing in choose_pairs(name, dist.get_world_size()):
        model, _, runner = make_runner(name, summing, mesh)
        start = sum(division[:rank])
        batch = tuple(part[start : start + division[rank]] for part in whole)
        if 0 in division:  # each rank has run the model once
            runner.accumulate(tuple(part[:1] for part in whole))
            model.zero_grad()
        result = runner.accumulate(batch if len(batch[0]) else None)
        found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        errors.append((error_of(found, gradients), abs(result.loss.item() / loss - 1)))
        assert sum(result.micro_batch_sizes) == division[rank]
        model.zero_grad()
        runner.step(batch if len(batch[0]) else None)
        errors.append((error_of(dict(model.named_parameters()), weights), 0.0))
    return errors


def step_through_all():
    return {name: step_on_a_rank(name) for name in CASES}


def step_on_replicas():
    """Two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {name: step_on_a_rank(name, mesh) for name in REPLICATED}


@pytest.mark.timeout(400)
def test_replicas_of_shards_are_summed_too():
    """A mesh of two dimensions (HSDP): gradient, norm and weights are those of the whole target."""
    for errors in values_of(run_ranks(step_on_replicas, size=4, limit_seconds=300)):
        assert {name: found for name, found in errors.items() if max(map(max, found)) >= 1e-12} == {}


@cache
def errors_of(size):
    return run_ranks(step_through_all, size=size, limit_seconds=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", sample([2, 3, 4], 3))
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_and_the_weights_are_those_of_the_whole_target(name, size):
    """However the samples are divided, also where a rank has none; clipped by the norm of all ranks."""
    for errors in values_of(errors_of(size)):
        assert max(error for pair in errors[name] for error in pair) < 1e-12


def train_alone():
    """A model that is sharded over one rank."""
    gradients, weights, _ = whole_step("deep")
    model, _, runner = make_runner("deep")
    runner.accumulate(make_batch(SAMPLES, torch.float64))
    errors = [error_of({key: p.grad for key, p in model.named_parameters()}, gradients)]
    model.zero_grad()
    result = runner.step(make_batch(SAMPLES, torch.float64))
    return [*errors, error_of(dict(model.named_parameters()), weights)], result.micro_batch_sizes


def test_one_rank_is_a_group_too():
    """Nothing is scattered there, and passes that break off are cleared all the same."""
    ((errors, sizes),) = values_of(run_ranks(train_alone, size=1))
    assert max(errors) < 1e-12
    assert sizes == (3, 3, 3, 3, 2, 2)


def use_narrow():
    """bfloat16 parameters, added up over many micro-batches; and mixed precision of fully_shard."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, dtype, options in [
        ("narrow", torch.bfloat16, {}),
        (
            "mixed",
            torch.float32,
            {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        ),
    ]:
        torch.manual_seed(0)
        plain = nn.Linear(6, 4)
        model = shard(nn.Sequential(nn.Linear(6, 4)).to(dtype), **options)
        plain = plain.to(dtype)
        with torch.no_grad():
            for target, source in zip(plain.parameters(), model.parameters(), strict=True):
                target.copy_(source.full_tensor())
        whole = make_batch(512, torch.float32)
        plan = make_rank_plans(spread(512, size), 1, **SMALL)[rank]
        device = FakeDevice(lambda n: 10 + n, total_bytes=10000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runner = autobatch.Runner(plan, model, narrow_step, optimizer, device=device)
        runner.accumulate(tuple(part[rank::size] for part in whole))
        oracle = nn.Linear(6, 4).double()
        oracle.load_state_dict({key: value.double() for key, value in plain.state_dict().items()})
        narrow_step(oracle, whole).backward()
        weight = next(model.parameters())
        exact = oracle.weight.grad
        found[name] = ((weight.grad.full_tensor().double() - exact).norm() / exact.norm()).item()
        assert weight.grad.dtype is dtype
    return found


def narrow_step(model, batch):
    weight = next(model.parameters())
    return F.cross_entropy(model(batch[0].to(weight.dtype)).float(), batch[1])


def test_narrow_gradients_are_added_up_in_float32():
    """256 micro-batches on each rank: a sum in bfloat16 loses most of them."""
    for found in values_of(run_ranks(use_narrow, size=2)):
        assert found["narrow"] < 0.02
        assert found["mixed"] < 0.02


def begin_without_samples():
    """The first step of a rank that has nothing to run the model with."""
    _, _, runner = make_runner("deep")
    batch = make_batch(8, torch.float64) if dist.get_rank() == 0 else None
    with pytest.raises(autobatch.errors.AutobatchError) as caught:
        runner.step(batch)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_without_samples_in_its_first_step_is_told_so():
    """It has to run the model with something."""
    first, second = values_of(run_ranks(begin_without_samples, size=2))
    assert second.startswith("InvalidArgument: this rank has had no samples yet, but with sharded parameters")
    assert first.startswith("RankFailed: step 0 was undone on every rank, because it failed on one: rank 1: Inv")


class Moving(nn.Module):
    """Draws and moves statistics in each forward pass."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)

    def forward(self, inputs):
        return self.head(self.drop(self.norm(inputs)))


def run_more_passes():
    """The second rank has one micro-batch where the first has three."""
    torch.manual_seed(0)
    model = shard(Moving())
    rank = dist.get_rank()
    plan = make_rank_plans((8, 8), 2, smallest_micro_batch=2, **SMALL)[rank]
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autobatch.Runner(plan, model, mean_step, optimizer, device=device)
    batch, passes, found = make_batch(2 if rank else 6), 1 if rank else 3, []
    for number in range(3):  # in the first step writes are recorded, in the third not
        torch.manual_seed(number)
        runner.step(batch)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        for _ in range(passes):
            nn.functional.dropout(batch[0][:2], 0.5)
        found.append((bool(torch.equal(state, torch.get_rng_state())), model.norm.num_batches_tracked.item() / passes))
    return found


def test_a_pass_that_counts_for_nothing_leaves_no_trace():
    """Generator and statistics are those of the rank's own micro-batches."""
    assert values_of(run_ranks(run_more_passes, size=2)) == [[(True, 1), (True, 2), (True, 3)]] * 2
