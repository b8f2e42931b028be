"""``fit`` on several ranks: each finds its own size, and all get the plan of one target."""

import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import make_rank_plans
from builders.rank_clock import CLOCK
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import AutobatchError
from autobatch.fitting import probe
from autobatch.testing import FakeDevice

TARGET = 40


def slow_step(model, batch):
    """Takes 1 ms a sample on the first rank and 4 on the others."""
    CLOCK.advance(len(batch[0]) * (0.001 if dist.get_rank() == 0 else 0.004))
    return mean_step(model, batch)


def fit_by_the_clock(model):
    """A plan by speed, on a clock of the test's."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(probe, "time", CLOCK)
        return describe(fit(model, step=slow_step, share="speed"))


def make_device(rank=None):
    """16 samples fit the first rank, 4 the others."""
    rank = dist.get_rank() if rank is None else rank
    return FakeDevice(lambda n: 10 + n, total_bytes=26 if rank == 0 else 14)


def fit(model, **changes):
    options = {"batch": make_batch(4, torch.float64), "step": mean_step, "device": make_device(), "headroom": 0}
    return autobatch.fit(model, **{"target_batch": TARGET, "optimizer": None, "check": None, **options, **changes})


def describe(plan):
    assert plan.micro_batch_size in {trial.micro_batch_size for trial in plan.trials if trial.outcome == "fits"}
    return plan.rank, plan.world_size, plan.shares, plan.micro_batch_sizes, str(plan).partition(";")[0]


def with_late_layer(layer):
    model = DistributedDataParallel(nn.Sequential(Plain()))
    model.module.append(layer)
    return model


def with_ignored(*names):
    model = Plain()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))
    return DistributedDataParallel(model)


def with_parallel_head():
    """A layer of which each rank has a part, as in tensor parallelism."""
    model, mesh = Plain(), init_device_mesh("cpu", (dist.get_world_size(),))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    return model


def with_hook():
    model = DistributedDataParallel(Plain())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def with_other_weights():
    """Loaded on one rank after the model was wrapped."""
    model = DistributedDataParallel(Plain())
    with torch.no_grad():
        model.module.head.weight[0, 0] += dist.get_rank()
    return model


def with_other_names():
    """A model whose layers were made in the order of a set, which differs between processes."""
    names = ["first", "second"][:: 1 - 2 * dist.get_rank()]
    return DistributedDataParallel(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}))


def with_other_groups(model):
    """In which layers of one shape have another rate each."""
    layers = [model.module.body[0].bias, model.module.body[2].bias][:: 1 - 2 * dist.get_rank()]
    return torch.optim.SGD([{"params": [layer], "lr": 0.1 * (1 + place)} for place, layer in enumerate(layers)])


def with_other_state(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    return optimizer


def with_other_schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 9 * dist.get_rank()})
    return scheduler


def shard_optimizer(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its module uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def fail(model, **changes):
    with pytest.raises(AutobatchError) as caught:
        fit(model, **changes)
    return f"{type(caught.value).__name__}: {caught.value}"


def fail_to_bind(model, optimizer=None, **options):
    plan = make_rank_plans((20, 20), 4)[dist.get_rank()]
    with pytest.raises(AutobatchError) as caught:
        autobatch.Runner(plan, model, mean_step, optimizer, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


class Broken:
    """Raises one error of the user's, the same object each time."""

    error = ValueError("the same again")

    def __call__(self, *_):
        raise self.error


def fit_runner(model, keep=()):
    options = {"batch": make_batch(4, torch.float64), "device": make_device(), "check": None}
    return autobatch.Runner.fit(model, TARGET, step=mean_step, keep=keep, **options)


def fail_again(model, call=fit, **changes):
    """The errors of a few calls that one rank ends before it has talked to the others."""
    errors = []
    for _ in range(5):
        with pytest.raises((AutobatchError, ValueError)) as caught:
            call(model, **(changes if dist.get_rank() else {}))
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
        del caught  # so that the next error may get its id
    return errors


def fit_all():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Plain())
    optimizer = torch.optim.AdamW(model.parameters())
    before = bits_of(model.module, optimizer)
    return {
        "equal": describe(fit(model, optimizer=optimizer)),
        "uneven": describe(fit(model, target_batch=41)),
        "given": describe(fit(model, share=[25, 15])),
        "speed": fit_by_the_clock(model),
        "changed": differences(bits_of(model.module, optimizer), before),
        "other target": fail(model, target_batch=40 + rank),
        "other share": fail(model, share="speed" if rank else "equal"),
        "other rate": fail_to_bind(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))),
        "other momentum": fail_to_bind(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1 * rank)),
        "fewer parameters": fail_to_bind(model, torch.optim.SGD([*model.parameters()][2 * rank :], lr=0.1)),
        "other weights": fail_to_bind(with_other_weights()),
        "other names": fail_to_bind(with_other_names()),
        "other groups": fail_to_bind(model, with_other_groups(model)),
        "other state": fail_to_bind(model, with_other_state(model)),
        "other schedule": fail_to_bind(model, optimizer, scheduler=with_other_schedule(optimizer)),
        "other scale": fail_to_bind(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))),
        "zero": fail(model, optimizer=shard_optimizer(model)),
        "wrong share": fail(model, share=[20, 21]),
        "one error": fail_again(model, step=Broken()),
        "errors alike": fail_again(model, target_batch=0),
        "nothing to keep": fail_again(model, fit_runner, keep=[3]),
        "no memory": fail(model, device=FakeDevice(lambda n: 10 + n, total_bytes=10 + (rank == 0))),
        "plain": fail(Plain()),
        "sync": fail(with_late_layer(nn.SyncBatchNorm(4))),
        "nested": fail(with_late_layer(DistributedDataParallel(nn.Linear(2, 2)))),
        "hook": fail(with_hook()),
        "compiled": fail(torch.compile(DistributedDataParallel(Plain()))),
        "ignored": fail(with_ignored("head.weight")),
        "sharded": fail(with_parallel_head()),
        "again": describe(fit(model, optimizer=optimizer)),
        "verify": autobatch.verify(model, make_batch(6, torch.float64), mean_step).exact,
    }


@cache
def answers():
    """Asked once: the processes take longer to start than to run."""
    return run_ranks(fit_all)


def results_of(name):
    return [value[name] for value in values_of(answers())]


def test_each_rank_has_its_own_sizes_of_one_target():
    """The first takes its whole share at once, the second in parts."""
    first, second = results_of("equal")
    assert first[:4] == (0, 2, (20, 20), (10, 10))
    assert second[:4] == (1, 2, (20, 20), (4, 4, 4, 4, 4))
    assert first[4] == "autobatch: rank 0 of 2: 20 of 40 = 2 x 10 on fake device"
    assert results_of("again") == [first, second]
    assert [one[2] for one in results_of("uneven")] == [(21, 20), (21, 20)]


def test_shares_may_be_given():
    """As numbers of samples."""
    assert [one[2:4] for one in results_of("given")] == [((25, 15), (13, 12)), ((25, 15), (4, 4, 4, 3))]


def test_shares_follow_the_speed():
    """Four times as fast is four times as much, by what was measured."""
    first, second = results_of("speed")
    assert first[2] == second[2]
    assert first[2] == (32, 8)
    assert sum(first[3]) == 32
    assert max(first[3]) <= 16
    assert max(second[3]) <= 4


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("other target", ["target_batch=", "rank 0: 40; rank 1: 41"]),
        ("other share", ["share=", "rank 0: equal; rank 1: speed"]),
        ("zero", ["ZeroRedundancyOptimizer", "fully_shard(model)"]),
        ("wrong share", ["share=[20, 21]", "target_batch=40", "[20, 20]"]),
        ("plain", ["2 ranks", "Plain", "DistributedDataParallel(model)", "fully_shard(model)", "plan.settings()"]),
        ("sync", ["layer 1", "SyncBatchNorm", "GroupNorm"]),
        ("compiled", ["DistributedDataParallel(torch.compile(model))"]),
        ("ignored", ["parameters_to_ignore", "freeze"]),
        ("sharded", ["head.weight", "DTensor", "fully_shard(model)"]),
        ("nested", ["layer 1", "DistributedDataParallel"]),
        ("hook", ["register_comm_hook()"]),
        ("other rate", ["the optimizer", "8 parameters, lr 0.1", "lr 0.2"]),
        ("other momentum", ["the optimizer", "8 parameters, lr 0.1"]),
        ("fewer parameters", ["the optimizer", "8 parameters", "6 parameters"]),
        ("other weights", ["parameters", "rank 0: ", "rank 1: "]),
        ("other names", ["the model", "rank 0: 4 parameters", "rank 1: 4 parameters"]),
        ("other groups", ["the optimizer", "2 parameters, lr 0.1, 0.2"]),
        ("other state", ["the optimizer", "rank 0: nothing; rank 1: "]),
        ("other schedule", ["scheduler=", "rank 0: StepLR", "rank 1: StepLR"]),
        ("other scale", ["scaler=", "scale 16.0", "scale 32.0"]),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(name, named):
    """At once, in the same words; also what would move parameters apart though the gradients were equal."""
    first, second = results_of(name)
    assert first == second
    assert first.startswith("InvalidArgument: ")
    assert [text for text in named if text not in first] == []
    assert len(first.splitlines()) == 1


def test_a_rank_on_which_nothing_fits_stops_the_others():
    """It gets its own error, and the other one gets the reason."""
    first, second = results_of("no memory")
    assert second.startswith("DoesNotFit: ")
    assert first.startswith(
        "RankFailed: fit() was undone on every rank, because it failed on one: rank 1: DoesNotFit: "
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one error", "ValueError: the same again"),
        ("errors alike", "InvalidArgument: target_batch=0 must be an int of at least 1: it counts samples"),
        (
            "nothing to keep",
            (
                "InvalidArgument: keep[0] is an int, which cannot be put back: give it state_dict() and "
                "load_state_dict(state), or take() and put(taken)"
            ),
        ),
    ],
)
def test_an_error_is_news_to_the_others_each_time(name, text):
    """Be it the same object, or one that lies where the last one lay: they wait for this rank in each call."""
    failed = f"RankFailed: fit() was undone on every rank, because it failed on one: rank 1: {text}"
    assert results_of(name) == [[failed] * 5, [text] * 5]


def test_a_split_is_verified_on_each_rank_by_itself():
    """The wrapper does not communicate."""
    assert results_of("verify") == [True, True]


def test_it_leaves_no_trace_on_any_rank():
    """After four plans."""
    assert results_of("changed") == [[], []]
