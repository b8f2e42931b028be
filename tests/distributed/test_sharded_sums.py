"""Gradients of sharded parameters that are summed once a step: fewer collectives, the same step, and a way back."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from workloads import make_batch, mean_step

import autobatch
from autobatch.events import Retried
from autobatch.records import SUMMINGS
from autobatch.testing import FakeDevice

pytestmark = needs_sharding

SHARES = (9, 9)


class Network(nn.Module):
    """Two layers, of which the first may be left out."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.skips = nn.Linear(6, 6), nn.Linear(6, 4), ()
        self.calls = 0
        self.double()

    def forward(self, inputs):
        self.calls += 1
        return self.head(inputs if self.calls in self.skips else torch.tanh(self.body(inputs)))


class Counting:
    """Does what torch does, and counts."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def allocate(self, *arguments, **options):
        return self.inner.allocate(*arguments, **options)

    def __call__(self, *arguments, **options):
        self.calls += 1
        return self.inner(*arguments, **options)


class Training:
    def __init__(self, summing, dtype=torch.float64, **options):
        torch.manual_seed(0)
        self.model = shard(Network().to(dtype), **options)
        self.gathers, self.scatters = [], []
        for module in (self.model.body, self.model.head):
            (group,) = module._get_fsdp_state()._fsdp_param_groups
            self.gathers.append(Counting(group._all_gather_comm))
            self.scatters.append(Counting(group._reduce_scatter_comm))
            module.set_custom_all_gather(self.gathers[-1])
            module.set_custom_reduce_scatter(self.scatters[-1])
        self.optimizer, self.events = torch.optim.SGD(self.model.parameters(), lr=0.1), []
        rank = dist.get_rank()
        plan = make_rank_plans(SHARES, 3, summing=summing, **SMALL)[rank]
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(
            plan, self.model, mean_step, self.optimizer, device=device, hooks=[self.events.append]
        )
        self.whole = make_batch(sum(SHARES), dtype)
        self.batch = tuple(part[sum(SHARES[:rank]) :][: SHARES[rank]] for part in self.whole)

    def count(self, run=None):
        """Gathers and scatters of one step."""
        before = self._calls()
        (run or self.runner.step)(self.batch)
        return tuple(now - earlier for now, earlier in zip(self._calls(), before, strict=True))

    def run_outside(self, batch):
        mean_step(self.model, batch).backward()

    def bits(self):
        return [parameter.to_local().clone() for parameter in self.model.parameters()]

    def _calls(self):
        return sum(one.calls for one in self.gathers), sum(one.calls for one in self.scatters)


def count_collectives():
    """Of the second step; the model's own outside a step; and in bfloat16."""
    found = {}
    for summing in SUMMINGS:
        training = Training(summing)
        training.runner.step(training.batch)
        found[summing] = training.count()
        found[f"outside, {summing}"] = training.count(training.run_outside)
    for name, options in {
        "narrow": {"dtype": torch.bfloat16},
        "mixed": {"dtype": torch.float32, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "wide sums": {
            "dtype": torch.float32,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        },
    }.items():
        training = Training(SUMMINGS[-1], **options)
        training.runner.step(training.batch)
        found[name] = training.count()
    return found


def run_out_of_memory(place):
    """One rank runs out of memory once, in its second step; the following steps' scatters, and equality bit for bit."""
    training, other = Training(SUMMINGS[-1]), Training(SUMMINGS[-1])
    training.runner.step(training.batch)
    other.runner.step(other.batch)
    left = [2]  # in the second micro-batch

    def fail(*_):
        left[0] -= 1
        if left[0] == 0 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    layer = training.model.head
    handle = layer.register_forward_pre_hook(fail) if place == "forward" else layer.register_full_backward_hook(fail)
    result = training.runner.step(training.batch)
    handle.remove()
    memory = other.runner._memory
    memory.summing = memory.summing.after_shortage()
    other.runner.step(other.batch)
    same = all(map(torch.equal, training.bits(), other.bits()))
    retried = [event.sums_in_each for event in training.events if isinstance(event, Retried)]
    scatters = [training.count()[1] for _ in range(21)]
    return result.micro_batch_sizes, result.retries, same, retried, scatters


def leave_out_a_layer():
    """A layer runs only in the first micro-batch, or only in the last: the error of its gradient."""
    errors = []
    for skips in ((2, 3), (1, 2), (1, 3)):
        for summing in SUMMINGS:
            training = Training(summing)
            training.runner.accumulate(training.batch)
            training.optimizer.zero_grad()
            training.model.calls, training.model.skips = 0, skips
            training.runner.accumulate(training.batch)
            plain = Network()
            plain.load_state_dict({name: part.full_tensor() for name, part in training.model.state_dict().items()})
            for rank in range(2):
                plain.calls, plain.skips = 0, skips
                for start in range(9 * rank, 9 * rank + 9, 3):
                    inputs, labels = (part[start : start + 3] for part in training.whole)
                    (F.cross_entropy(plain(inputs), labels, reduction="sum") / sum(SHARES)).backward()
            pairs = zip(training.model.parameters(), plain.parameters(), strict=True)
            errors.append(max((mine.grad.full_tensor() - other.grad).abs().max().item() for mine, other in pairs))
    return errors


def run_all():
    return {
        "collectives": count_collectives(),
        "forward": run_out_of_memory("forward"),
        "backward": run_out_of_memory("backward"),
        "left out": leave_out_a_layer(),
    }


@cache
def answers():
    return run_ranks(run_all, timeout_seconds=30, limit_seconds=160)


def results_of(name):
    return [value[name] for value in values_of(answers())]


def test_gradients_are_summed_once_and_parameters_gathered_as_rarely_as_planned():
    """Two layers and three micro-batches; outside a step torch's own settings hold."""
    for found in results_of("collectives"):
        assert [found[summing] for summing in SUMMINGS] == [(12, 6), (12, 2), (8, 2)]
        assert {found[f"outside, {summing}"] for summing in SUMMINGS} == {(4, 2)}


def test_sums_that_would_lose_small_numbers_are_made_in_each_micro_batch():
    """Torch would add up in 16 bits; not if its policy says to reduce in 32."""
    for found in results_of("collectives"):
        assert [found[name][1] for name in ("narrow", "mixed", "wide sums")] == [6, 6, 2]


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_after_a_shortage_the_same_sizes_run_with_sums_in_each_micro_batch(place):
    """Bit for bit as if they had been from the start; the plan's sums are back after twenty steps."""
    for rank, (sizes, retries, same, retried, scatters) in enumerate(results_of(place)):
        assert (sizes, retries) == ((3, 3, 3), 1)
        assert same
        assert retried == [True] * rank
        assert scatters == [6] * 19 + [2] * 2


def test_a_layer_may_run_in_some_micro_batches_only():
    """Its gradient is summed with the last one, also if it did not run there."""
    for errors in results_of("left out"):
        assert max(errors) < 1e-12
