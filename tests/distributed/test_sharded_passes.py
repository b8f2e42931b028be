"""Passes of a sharded model that are not what they were before: they are run again, and no rank waits for another."""

from contextlib import suppress
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of, wait_at_most
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import AutobatchError
from autobatch.testing import FakeDevice

pytestmark = needs_sharding

SHARES = (6, 6)


class Blocks(nn.Module):
    """Blocks of one shape, of which it runs those that it is given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.order = nn.Linear(6, 4), (0, 1, 2)
        self.double()

    def forward(self, inputs):
        for place in self.order:
            inputs = torch.tanh(self.blocks[place](inputs))
        return self.head(inputs)


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 4))
        self.double()


class Training:
    """A sharded model, this rank's part of a batch, and its runner."""

    def __init__(self, make_model=Blocks, shares=SHARES, size=3, **options):
        torch.manual_seed(0)
        self.model = _shard(make_model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        rank = dist.get_rank()
        plan = make_rank_plans(shares, size, **SMALL)[rank]
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(plan, self.model, mean_step, self.optimizer, device=device, **options)
        self.make_model, self.whole = make_model, make_batch(sum(shares), torch.float64)
        self.batch = tuple(part[sum(shares[:rank]) :][: shares[rank]] for part in self.whole)

    def accumulate(self):
        """Sizes, retries, and the error of the gradient; or the error's text and what is not as before."""
        before = bits_of(self.model, self.optimizer)
        try:
            result = self.runner.accumulate(self.batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}", differences(bits_of(self.model, self.optimizer), before)
        plain = self.make_model()
        plain.order = getattr(self.model, "order", ())
        plain.load_state_dict({name: _whole(tensor) for name, tensor in self.model.state_dict().items()})
        F.cross_entropy(plain(self.whole[0]), self.whole[1]).backward()
        pairs = [
            (mine.grad, other.grad) for mine, other in zip(self.model.parameters(), plain.parameters(), strict=True)
        ]
        assert all((mine is None) == (other is None) for mine, other in pairs)
        worst = max((_whole(mine) - other).abs().max().item() for mine, other in pairs if mine is not None)
        self.model.zero_grad()
        return result.micro_batch_sizes, result.retries, worst

    def count_exchanges(self):
        channel = self.runner._ranks.channel
        before = channel.exchanges
        self.runner.accumulate(self.batch)
        self.model.zero_grad()
        return channel.exchanges - before

    def fail_on(self, rank, calls=1):
        """Memory ends once, in a forward pass before the second block."""
        left = [calls if dist.get_rank() == rank else 0]

        def fail(*_):
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        self.model.blocks[1].register_forward_pre_hook(fail)


def _shard(model):
    """Each block alone: a list of modules cannot be sharded."""
    if not isinstance(model, Blocks):
        return shard(model)
    for module in (*model.blocks, model.head):
        fully_shard(module)
    return fully_shard(model)


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def evaluate(training):
    """Leaves the root's parameters gathered, and its modules in torch's list for the next backward pass."""
    training.model.eval()
    with torch.no_grad():
        training.model(training.whole[0])
    training.model.train()


def leave_gradients(model):
    model.set_requires_gradient_sync(False)
    mean_step(model, make_batch(2, torch.float64)).backward()
    model.set_requires_gradient_sync(True)


def use_own_gathers(model):
    (group,) = model.head._get_fsdp_state()._fsdp_param_groups
    model.head.set_custom_all_gather(group._all_gather_comm.inner)


SETTINGS = {
    "sync": lambda model: model.set_requires_gradient_sync(False),
    "factor": lambda model: model.head.set_gradient_divide_factor(3.0),
    "hook": lambda model: model.head.set_all_reduce_hook(lambda gradient: None),
    "gathered": lambda model: model.set_reshard_after_backward(False),
    "last": lambda model: model.set_is_last_backward(False),
    "collectives": use_own_gathers,
    "waiting": leave_gradients,
}
REFUSALS = """
sync: InvalidArgument: gradients are not summed over the ranks: call model.set_requires_gradient_sync(True) before
factor: InvalidArgument: set_gradient_divide_factor() was called after Runner() was made: call it before, with \
the same on each module
hook: InvalidArgument: set_all_reduce_hook() is not supported: leave it out
gathered: InvalidArgument: set_reshard_after_backward(False) is not supported: leave it out
last: InvalidArgument: backward passes are not finished (set_is_last_backward(False)): call \
model.set_is_last_backward(True) before
collectives: InvalidArgument: set_custom_all_gather() or set_custom_reduce_scatter() was called after Runner() was \
made: call it before
waiting: InvalidArgument: an earlier backward pass left gradients that are not summed over the ranks \
(set_requires_gradient_sync(False)): let the Runner accumulate, or call model.reset_iter_state() to drop them
"""


def change(name):
    """The outcome of a setting that is changed after a step."""
    training = Training()
    training.accumulate()
    SETTINGS[name](training.model)
    return training.accumulate()


def run_evaluation():
    """Exchanges of the steps before and after an evaluation."""
    training = Training()
    training.runner.accumulate(training.batch)
    before = training.count_exchanges()
    evaluate(training)
    return before, training.count_exchanges(), training.count_exchanges()


def run_orders():
    """A block is skipped from the third step on, and one rank runs out of memory in that very step."""
    training, found = Training(), []
    for number in range(6):
        training.model.order = (0, 1, 2) if number < 2 else (0, 1)
        if number == 2:
            training.fail_on(1)
        found.append(training.accumulate())
    exchanges = training.count_exchanges()
    training.model.order = (0, 2, 2)
    return [*found, training.accumulate()], exchanges


def run_late_shortage():
    """The failing rank runs more micro-batches than the other one, which runs one that counts for nothing."""
    training = Training(shares=(15, 6))
    training.accumulate()
    training.fail_on(1, calls=2)
    return training.accumulate()


def run_other_order():
    """Blocks of one shape, gathered in another order on one rank; in a pass that is known, and in one that is not."""
    found = []
    for earlier in (0, 1):
        training = Training()
        for _ in range(earlier):
            training.accumulate()
        training.model.order = (0, 1, 2) if dist.get_rank() == 0 else (1, 0, 2)
        found.append(training.accumulate())
        training.model.order = (0, 1, 2)
        found.append(training.accumulate())
    return found


def run_one_sample():
    """Each cut that leaves one sample on a rank; and a rank with none."""
    found = []
    for shares in ((4, 3), (3, 3), (3, 4)):
        training = Training(Normed, shares, 2)
        found.append([training.runner.step(training.batch).micro_batch_sizes for _ in range(2)])
    training = Training(Normed, (9, 9), 3)
    for samples in ((9, 9), (9, 3), (9, 0), (2, 9)):
        batch = make_batch(samples[dist.get_rank()] or 1, torch.float64)
        found.append(training.runner.step(batch if samples[dist.get_rank()] else None).micro_batch_sizes)
    training = Training(Normed, (4, 4), 2)
    training.batch = tuple(part[: 1 if dist.get_rank() else 4] for part in training.batch)
    found.append(training.accumulate())
    training.batch = tuple(part[:2] for part in training.whole)
    found.append(training.runner.step(training.batch).micro_batch_sizes)
    return found


def run_out_twice():
    """Memory ends in a pass, and again where the rank takes part in the rest of it."""
    wait_at_most(20.0)
    training = Training()
    training.accumulate()
    patches = []

    def fail(*_):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        patches.append(mock.patch.object(torch, "zeros", side_effect=error))
        patches[0].start()
        raise error

    if dist.get_rank() == 1:
        training.model.blocks[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(AutobatchError) as caught:
            training.runner.accumulate(training.batch)
    finally:
        for patch in patches:
            patch.stop()
    with suppress(AutobatchError):
        training.runner.accumulate(training.batch)
    return f"{type(caught.value).__name__}: {caught.value}"


def run_all():
    """By name; the last one breaks the channel."""
    return {
        "evaluation": run_evaluation(),
        "orders": run_orders(),
        "late": run_late_shortage(),
        "other order": run_other_order(),
        "one sample": run_one_sample(),
        **{name: change(name) for name in SETTINGS},
        "twice": run_out_twice(),
    }


@cache
def answers():
    return run_ranks(run_all, timeout_seconds=20, limit_seconds=160)


def results_of(name):
    return [value[name] for value in values_of(answers())]


def test_an_evaluation_between_two_steps_leaves_passes_known():
    """As many exchanges as before it."""
    for before, *after in results_of("evaluation"):
        assert after == [before, before]


def test_a_pass_that_differs_is_run_again_on_all_ranks():
    """Also if one of them ran out of memory before its pass could differ; in the end the pass is known again."""
    for (found, exchanges), (known, *_) in zip(results_of("orders"), results_of("evaluation"), strict=True):
        assert [retries for _, retries, _ in found] == [0, 0, 1, 0, 0, 0, 0]
        assert max(error for *_, error in found) < 1e-12
        assert exchanges == known


def test_a_rank_that_is_not_short_runs_its_micro_batches_again_as_they_were():
    """Their samples are taken from the batch once more."""
    first, second = results_of("late")
    assert first[:2] == ((3, 3, 3, 3, 3), 1)
    assert second[:2] == ((1, 1, 1, 1, 1, 1), 1)
    assert max(first[2], second[2]) < 1e-12


def test_blocks_of_one_shape_in_another_order_on_one_rank_are_refused():
    """One would compute with the other's parameters. The next step is exact."""
    for first, after_first, second, after_second in results_of("other order"):
        for text, changed in (first, second):
            assert text == (
                "RankFailed: the ranks' passes differ: run the same sharded modules in the same order on every rank"
            )
            assert changed == []
        for sizes, retries, error in (after_first, after_second):
            assert (sizes, retries) == ((3, 3), 0)
            assert error < 1e-12


def test_a_rank_whose_model_refuses_one_sample_goes_on_with_all():
    """The sizes are as if the plan had known it; passes that count for nothing have two samples."""
    first, second = results_of("one sample")
    assert first[:3] == [[(2, 2)] * 2, [(3,)] * 2, [(3,)] * 2]
    assert second[:3] == [[(3,)] * 2, [(3,)] * 2, [(2, 2)] * 2]
    assert first[3:7] == [(3, 3, 3), (3, 3, 3), (3, 3, 3), (2,)]
    assert second[3:7] == [(3, 3, 3), (3,), (), (3, 3, 3)]


def test_a_rank_that_has_only_one_sample_fails_with_its_own_error():
    """And all can continue."""
    first, second = results_of("one sample")
    assert second[7][0].startswith("ValueError: Expected more than 1 value per channel when training")
    assert first[7][0].startswith("RankFailed: accumulate 0 was undone on every rank, because it failed on one: ")
    assert first[7][1] == second[7][1] == []
    assert first[8] == second[8] == (2,)


@pytest.mark.parametrize(("name", "text"), [line.split(": ", 1) for line in REFUSALS.strip().splitlines()])
def test_settings_that_are_changed_after_the_runner_was_made_are_refused(name, text):
    """On every rank, before anything is run."""
    assert results_of(name) == [(text, [])] * 2


def test_a_rank_without_memory_for_zeros_says_so():
    """Itself at once, the others when they no longer wait."""
    for text in results_of("twice"):
        assert text.startswith(
            "RankLost: rank 1 of 2 could not continue: ran out of memory for the zeros of a pass that other ranks run: "
        )
