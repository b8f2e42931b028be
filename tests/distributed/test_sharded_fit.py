"""``fit`` with sharded parameters: all ranks try the same sizes, and a size is one that fits each."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from workloads import bits_of, differences

import autobatch
from autobatch.errors import AutobatchError
from autobatch.records import IN_EACH, SUMMINGS

pytestmark = needs_sharding

TARGET = 4097
BUDGET = "24MiB"


class Wide(nn.Sequential):
    """1.2 MB of parameters."""

    def __init__(self):
        super().__init__(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))


class Tall(nn.Sequential):
    """Many layers, so that all their gradients are much more than those of one layer."""

    def __init__(self):
        super().__init__(nn.Linear(64, 128), *(nn.Linear(128, 128) for _ in range(20)), nn.Linear(128, 4))


def mean_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def failing_step(model, batch):
    """An error of the user's on one rank, in the middle of a trial."""
    loss = mean_step(model, batch)
    if dist.get_rank() == 1 and len(batch[0]) > 2:
        raise ValueError("my own bug")
    return loss


def short_or_failing_step(model, batch):
    """Memory ends on one rank where the other one has an error of its own, before the next exchange."""
    loss = mean_step(model, batch)
    if len(batch[0]) > 2:
        is_short = dist.get_rank() == 0
        raise torch.OutOfMemoryError("CUDA out of memory") if is_short else ValueError("my own bug")
    return loss


def make_data(samples=TARGET):
    """``(inputs [samples, 64], labels [samples])``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 64, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def fit(model, **changes):
    options = {"batch": make_data(8), "step": mean_step, "optimizer": None, "budget": BUDGET, "progress": False}
    return autobatch.fit(model, **{"target_batch": TARGET, **options, **changes})


def describe(plan):
    return {
        "shares": plan.shares,
        "sizes": plan.micro_batch_sizes,
        "trials": [(trial.micro_batch_size, trial.outcome) for trial in plan.trials],
        "peak": plan.peak_bytes,
        "within": plan.peak_bytes <= plan.budget_bytes - plan.headroom_bytes,
    }


def fail(call):
    with pytest.raises(AutobatchError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def refuse_all():
    """The refusal of each model that cannot be trained."""
    part = nn.Sequential(fully_shard(nn.Linear(64, 4)), nn.Linear(4, 4))
    ignoring = Wide()
    fully_shard(ignoring, ignored_params={ignoring[0].weight})
    unsynced = shard(Wide())
    unsynced.set_requires_gradient_sync(False)
    uneven = shard(Wide())
    uneven[0].set_gradient_divide_factor(3.0)
    offloaded = fully_shard(Wide())
    for group in offloaded._get_fsdp_state()._fsdp_param_groups:
        group.offload_policy = CPUOffloadPolicy()  # only afterwards: torch makes such a model on a machine with a GPU
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    divided = nn.Sequential(parallelize_module(nn.Linear(64, 4), mesh["tensor"], ColwiseParallel()))
    elsewhere = Wide()
    fully_shard(elsewhere[2], mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("other", "shard"))["shard"])
    models = {
        "a part": part,
        "ignored": ignoring,
        "unsynced": unsynced,
        "uneven": uneven,
        "in two ways": fully_shard(divided, mesh=mesh["data"]),
        "offloaded": offloaded,
        "elsewhere": fully_shard(elsewhere),
    }
    return {name: fail(lambda model=model: fit(model)) for name, model in models.items()}


def fit_with_memory():
    """Plans and steps with memory for held gradients, and with too little of it: what is planned, and what is run."""
    model = shard(Tall())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"optimizer": optimizer, "target_batch": 1024, "max_micro_batch": 256}
    roomy = fit(model, budget="256MiB", **options)
    least = roomy.summing_trials[IN_EACH].peak_reserved
    tight = round(1.02 * least / 0.95)
    held = roomy.model_copy(update={"summing": SUMMINGS[-1]})  # whatever the clock has shown
    plans = {
        "roomy": held,
        "tight": fit(model, budget=tight, **options),
        "objective": fit(model, budget="256MiB", objective="memory", **options),
        "less later": held.model_copy(update={"budget_bytes": tight, "headroom_bytes": 0}),
    }
    found = {}
    for name, plan in plans.items():
        runner = autobatch.Runner(plan, model, mean_step, optimizer)
        retries = within = 0
        for _ in range(2):
            result = runner.accumulate(make_data(512))
            retries, within = retries + result.retries, within + (result.peak_bytes <= plan.budget_bytes)
            model.zero_grad()
        outcomes = [trial.outcome for trial in plan.summing_trials.values()]
        found[name] = outcomes, plan.summing, runner._ranks.passes.summing, retries, within
    return found


def fit_all():
    rank, found = dist.get_rank(), {}
    torch.manual_seed(0)
    model = shard(Wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = bits_of(model, optimizer)
    plan = fit(model, optimizer=optimizer)
    found["equal"] = describe(plan)
    found["warnings"] = plan.warnings
    found["again"] = describe(fit(model, optimizer=optimizer))
    found["given"] = describe(fit(model, optimizer=optimizer, share=[3097, 1000]))
    found["short"] = describe(fit(model, optimizer=optimizer, budget="18MiB" if rank else BUDGET))
    found["nothing fits"] = fail(lambda: fit(model, optimizer=optimizer, budget="4MiB" if rank else BUDGET))
    found["speed"] = fail(lambda: fit(model, share="speed"))
    found["strict"] = fail(lambda: fit(model, check="raise", max_micro_batch=100))
    for name, step in (("an error", failing_step), ("an error beside a shortage", short_or_failing_step)):
        try:
            fit(model, step=step)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["after an error"] = describe(fit(model, optimizer=optimizer))
    found["changed"] = differences(bits_of(model, optimizer), before)
    found["sums"] = fit_with_memory()
    scaler = torch.amp.GradScaler("cpu")
    found["scaler"] = fail(lambda: autobatch.Runner(plan, model, mean_step, optimizer, scaler=scaler))
    runner = autobatch.Runner(plan, model, mean_step, optimizer, max_grad_norm=1.0)
    share = plan.shares[rank]
    results = [runner.step(make_data(share)) for _ in range(4)]
    found["steps"] = [(result.retries, result.peak_bytes <= plan.budget_bytes) for result in results]
    return found | refuse_all()


@cache
def answers():
    return run_ranks(fit_all, limit_seconds=200)


def results_of(name):
    return [value[name] for value in values_of(answers())]


def test_all_ranks_try_the_same_sizes():
    """For the largest share; a second search finds the same."""
    first, second = results_of("equal")
    assert first["shares"] == second["shares"] == (2049, 2048)
    assert (sum(first["sizes"]), sum(second["sizes"])) == (2049, 2048)
    assert first["trials"] == second["trials"]
    assert first["peak"] == second["peak"]
    assert first["within"]
    assert results_of("again") == [first, second]
    assert results_of("after an error") == [first, second]


def test_the_rank_with_the_least_memory_decides():
    """A size of the trials fits it, too."""
    first, second = results_of("short")
    (whole, _), smaller = results_of("equal"), max(first["sizes"])
    assert first["trials"] == second["trials"]
    assert smaller < max(whole["sizes"])
    assert len(first["sizes"]) == len(second["sizes"])
    assert "oom" in {outcome for _, outcome in first["trials"]} or smaller in {size for size, _ in first["trials"]}


def test_shares_may_be_given():
    """The size is one for the largest share, so that each rank's fits."""
    first, second = results_of("given")
    assert first["shares"] == second["shares"] == (3097, 1000)
    assert (sum(first["sizes"]), sum(second["sizes"])) == (3097, 1000)
    assert max(second["sizes"]) <= max(size for size, outcome in first["trials"] if outcome == "fits")


def test_the_plan_is_what_the_runner_needs():
    """No retry in its first steps, each within the budget."""
    assert results_of("steps") == [[(0, True)] * 4] * 2


def test_gradients_are_held_where_there_is_memory_for_them():
    """By trials of the size, on every rank; and at run time not where less is free, before anything fails."""
    first, second = results_of("sums")
    assert first == second
    assert first == {
        "roomy": (["fits"] * 3, SUMMINGS[-1], SUMMINGS[-1], 0, 2),
        "tight": (["fits", "oom"], IN_EACH, IN_EACH, 0, 2),
        "objective": ([], IN_EACH, IN_EACH, 0, 2),
        "less later": (["fits"] * 3, SUMMINGS[-1], IN_EACH, 0, 2),
    }


def test_it_leaves_no_trace_on_any_rank():
    """After six plans and four errors."""
    assert results_of("changed") == [[], []]


def test_the_split_is_not_checked():
    """And the plan says so."""
    for warnings in results_of("warnings"):
        assert any(one.startswith("splitting was not checked: parameters are sharded") for one in warnings)
    for text in results_of("strict"):
        assert text.startswith(
            "InexactSplit: it could not be checked whether splitting is exact: parameters are sharded"
        )


@pytest.mark.parametrize("name", ["an error", "an error beside a shortage"])
def test_an_error_in_a_trial_of_one_rank_ends_fit_on_all(name):
    """It gets its own error, the others get its rank and reason; so does one that runs out of memory there."""
    first, second = results_of(name)
    assert second == "ValueError: my own bug"
    assert first.startswith("RankFailed: trial ")
    assert first.endswith("was undone on every rank, because it failed on one: rank 1: ValueError: my own bug")


def test_nothing_fits_where_it_does_not_fit_one_rank():
    """All ranks get the bytes of one sample."""
    for text in results_of("nothing fits"):
        assert text.startswith("DoesNotFit: a micro-batch of 1 sample does not fit on ")


REFUSALS = {
    "speed": ["share='speed'", "DistributedDataParallel", "share='equal'"],
    "scaler": ["scaler=", "bfloat16"],
    "a part": ["Sequential", "fully_shard(model)"],
    "ignored": ["0.weight", "ignored_params="],
    "unsynced": ["set_requires_gradient_sync(True)"],
    "uneven": ["set_gradient_divide_factor()"],
    "in two ways": ["0.weight", "2 dimensions", "tensor parallelism"],
    "offloaded": ["offload_policy=CPUOffloadPolicy()"],
}


def test_a_module_that_is_sharded_over_other_ranks_is_refused():
    """Nobody else would have its part of the gradient."""
    for rank, text in enumerate(results_of("elsewhere")):
        assert text == (
            f"InvalidArgument: the parameter 2.weight is sharded over the ranks [{rank}], and 0.weight over [0, 1]: "
            f"call fully_shard() with the same mesh on each module"
        )


@pytest.mark.parametrize(("name", "named"), REFUSALS.items())
def test_what_cannot_be_done_is_refused_on_every_rank(name, named):
    """At once, in the same words."""
    first, second = results_of(name)
    assert first == second
    assert first.startswith("InvalidArgument: ")
    assert [text for text in named if text not in first] == []
    assert len(first.splitlines()) == 1
