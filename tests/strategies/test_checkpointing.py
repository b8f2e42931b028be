"""Blocks that are recomputed: the gradient, the names, and what is left on the model."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from text_blocks import LAYERS, WIDTH, make_model, make_texts, need_of, step
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.step.workload import Workload
from autobatch.strategies.blocks import BlockMeasurement, find_blocks, measure_blocks
from autobatch.strategies.checkpointing import _keep, recompute
from autobatch.strategies.choice import whole


def fit(model: nn.Module, part: float, **options) -> autobatch.Plan:
    options = {"strategies": "auto", "check": None, "reuse": False, "step": step, **options}
    return autobatch.fit(model, 4, batch=make_texts(), budget=int(part * need_of(model)), headroom=0, **options)


def test_the_gradient_is_that_of_the_plain_step_and_generators_end_where_they_would():
    """In float64 with dropout, however many blocks are recomputed, whole or selectively."""
    texts = make_texts()
    both = {f"blocks.{i}": ("selective", "checkpoint")[i % 2] for i in range(LAYERS)}
    for chosen in (whole(["blocks.0"]), {"blocks.0": "selective"}, whole(both), dict.fromkeys(both, "selective"), both):
        found = []
        for ways in ({}, chosen):
            model = make_model(torch.float64)
            torch.manual_seed(1)
            recompute(Workload(model, step), ways).step(model, texts).backward()
            found.append(([p.grad for p in model.parameters()], torch.get_rng_state()))
        (plain, ended), (again, ended_again) = found
        assert all((one - other).norm() <= 1e-12 * one.norm() for one, other in zip(plain, again, strict=True))
        assert torch.equal(ended, ended_again)


def test_a_runner_of_such_a_plan_has_the_whole_batch_s_gradient_and_leaves_the_model_as_it_was():
    """Between steps no forward pass is replaced, so copies, names and evaluation are those of the plain model."""
    model = make_model(torch.float64)
    for block in model.blocks:
        block.dropout.p = block.dropout1.p = block.dropout2.p = block.self_attn.dropout = 0.0
    plan = fit(model, 0.7)
    names, texts = [*model.state_dict()], make_texts()
    whole = copy.deepcopy(model)
    step(whole, texts).backward()
    runner = autobatch.Runner(plan, model, step, None)
    runner.accumulate(texts)
    assert plan.checkpointing is not None
    assert [*model.state_dict()] == names
    assert not any("forward" in vars(module) for module in model.modules())
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 1e-12 * one.grad.norm()


def test_the_plan_s_slowdown_is_that_of_the_step_where_it_fits_plainly():
    """Also if a block takes longer in its recomputation, as it does where it adds to gradients or has many hooks."""
    model = make_model()

    def take_time(*_):
        time.sleep(0.08 if torch._C._current_graph_task_id() >= 0 else 0.02)

    for block in model.blocks:
        block.linear1.register_forward_pre_hook(take_time)

    def slow_step(model, texts):
        time.sleep(0.2)
        return step(model, texts)

    texts, apart = make_texts(1), []
    for _ in range(3):  # a busy machine may slow down the one trial of a plan
        plan, seconds = fit(model, 0.6, step=slow_step), {}
        ways = {"plain": slow_step, "recomputed": recompute(Workload(model, slow_step), plan.checkpointing.ways).step}
        for name in 4 * [*ways]:
            started = time.perf_counter()
            ways[name](model, texts).backward()
            seconds.setdefault(name, []).append(time.perf_counter() - started)
        slowdown = min(seconds["recomputed"]) / min(seconds["plain"]) - 1
        assert slowdown > 0.5
        apart.append(abs(plan.checkpointing.slowdown - slowdown))
        if apart[-1] < 0.25:
            break
    assert min(apart) < 0.25


def test_a_runner_s_step_stays_inside_the_budget_in_which_the_plain_step_does_not_fit():
    """What the plan promises was tried; plain, the same micro-batch runs out of memory."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = fit(model, 0.6, optimizer=optimizer)
    result = autobatch.Runner(plan, model, step, optimizer).step(make_texts())
    assert result.retries == 0
    assert result.peak_bytes <= plan.budget_bytes
    with pytest.raises(autobatch.DoesNotFit):
        autobatch.Runner(
            plan.model_copy(update={"checkpointing": None, "recomputable": ()}), model, step, optimizer
        ).step(make_texts())


def test_an_own_forward_of_the_user_is_called_and_put_back():
    """An instance may have a forward pass of its own, as some libraries patch it."""
    model, calls = make_model(), []
    own = model.blocks[0].forward

    def patched(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    model.blocks[0].forward = patched
    recompute(Workload(model, step), whole(["blocks.0"])).step(model, make_texts()).backward()
    assert len(calls) == 2
    assert model.blocks[0].forward is patched


def test_fit_leaves_no_trace():
    """Weights, gradients, generators, modes and forward passes are what they were, also after a refusal."""
    model = make_model()
    model.eval()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    python = random.getstate()
    for part in (0.6, 0.05):
        try:
            fit(model, part)
        except autobatch.DoesNotFit:
            assert part == 0.05
        assert torch.equal(generator, torch.get_rng_state())
        assert random.getstate() == python
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module.training or "forward" in vars(module) for module in model.modules())


def measure(model: nn.Module, step=step, allowed=("checkpoint", "selective")) -> BlockMeasurement:
    with CpuDevice().limit(2**40):
        return measure_blocks(
            Workload(model, step),
            CpuDevice(),
            find_blocks(model),
            make_texts(2),
            {},
            allowed=allowed,
        )


class Odd(nn.Module):
    """A block that cannot be recomputed, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.inner, self.norm = kind, 0, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.generator = torch.Generator().manual_seed(1)
        self.count_elsewhere = lambda: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.count_elsewhere()
        changed = self.inner(hidden)
        if self.kind == "BatchNorm":
            return self.norm(changed.transpose(1, 2)).transpose(1, 2)
        if self.kind == "own generator":
            return changed.sigmoid() * torch.rand(changed.shape, generator=self.generator)
        if self.kind == "Python's random":
            return changed.sigmoid() * random.random()
        if self.kind == "branch on moving state":
            self.calls += 1
            return changed.sigmoid() if self.calls % 2 else changed.exp().tanh()
        if self.kind == "counter":
            self.calls += 1
        if self.kind == "writes into its input":
            return hidden.mul_(2).sigmoid() + changed
        return changed.sigmoid()


@pytest.mark.parametrize(
    "kind",
    [
        *("BatchNorm", "own generator", "Python's random", "branch on moving state", "counter"),
        "writes into its input",
    ],
)
@pytest.mark.parametrize("allowed", [["checkpoint", "selective"], ["selective"]])
def test_a_block_that_cannot_be_recomputed_is_found_and_left_out(kind: str, allowed: list[str]):
    """By running it each way; its neighbours are not left out."""
    model = make_model()
    model.blocks.insert(2, Odd(kind))
    measured = measure(model, step, allowed)
    assert [*measured.left_out] == ["blocks.2"]
    assert [run.block for run in measured.runs] == [f"blocks.{i}" for i in range(LAYERS + 1) if i != 2]


class Overwriting(nn.Module):
    """A block that writes into the result of a matrix product, which a selective way would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(hidden).mul_(2).tanh())


def test_a_block_that_overwrites_what_would_be_kept_is_recomputed_whole_only():
    """It is left out if only the selective way is allowed."""
    model = make_model()
    model.blocks.insert(2, Overwriting())
    measured = measure(model)
    assert not measured.left_out
    assert {run.block for run in measured.runs if "selective" not in run.ways} == {"blocks.2"}
    assert [*measure(model, allowed=["selective"]).left_out] == ["blocks.2"]


def test_a_selective_plan_runs_in_its_budget_with_the_gradient_of_the_plain_step():
    """In float64 with dropout; it is saved and loaded, and its report names the way."""
    model = make_model(torch.float64)
    plan = fit(model, 0.7, strategies=["selective"], max_micro_batch=1)
    plan = autobatch.Plan.model_validate_json(plan.model_dump_json())
    assert plan.checkpointing.ways == dict.fromkeys(plan.checkpointing.blocks, "selective")
    assert plan.recomputable == ()
    assert "selectively" in plan.explain()
    found = []
    for own in (plan.model_copy(update={"checkpointing": None, "budget_bytes": 2**32}), plan):
        torch.manual_seed(1)
        result = autobatch.Runner(own, model, step, None).accumulate(make_texts())
        assert result.retries == 0
        assert result.peak_bytes <= own.budget_bytes
        found.append([one.grad.clone() for one in model.parameters()])
        model.zero_grad()
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-12 * one.norm()


@pytest.mark.parametrize("has_graph", [False, True])
def test_a_step_may_run_backward_twice_through_blocks_of_any_way(has_graph: bool):
    """With a gradient of its own, that is differentiated or not; a selective block recomputes all the second time."""

    def twice(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
        loss = step(model, texts)
        options = {"create_graph": True} if has_graph else {"retain_graph": True}
        return loss + sum(one.square().sum() for one in torch.autograd.grad(loss, [*model.parameters()], **options))

    found = []
    for way in ("", "checkpoint", "selective"):
        model = make_model(torch.float64)
        torch.manual_seed(1)
        chosen = {f"blocks.{i}": way for i in range(LAYERS)} if way else {}
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            recompute(Workload(model, twice), chosen).step(model, make_texts()).backward()
        found.append([one.grad for one in model.parameters()])
    for others in found[1:]:
        assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found[0], others, strict=True))


def test_a_plan_without_selective_blocks_is_one_of_an_earlier_release():
    """Its blocks are recomputed whole."""
    plan = fit(make_model(), 0.6, strategies=["checkpoint"])
    earlier = plan.model_dump(mode="json")
    del earlier["checkpointing"]["selective"]
    found = autobatch.Plan.model_validate(earlier).checkpointing
    assert found.ways == whole(found.blocks)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_block_that_changes_another_module_is_left_out(kind: str):
    """A count of the model's own would count twice."""
    model = make_model()
    model.count = 0
    model.register_buffer("counted", torch.zeros(()))

    def count():
        if kind == "buffer":
            model.counted += 1
        else:
            model.count += 1

    model.blocks.insert(2, Odd("plain"))
    model.blocks[2].count_elsewhere = count
    measured = measure(model, step)
    assert [*measured.left_out] == ["blocks.2"]


class Noting(nn.Module):
    """A block that writes into a dict or a list which it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, notes: dict | list) -> torch.Tensor:
        changed = self.inner(hidden)
        if isinstance(notes, dict):
            notes["size"] = changed.square().mean()
        else:
            notes.append(changed.square().mean())
        return hidden + changed


@pytest.mark.parametrize("make_notes", [dict, list])
def test_a_block_that_writes_into_its_arguments_is_left_out(make_notes):
    """The step finds what the block wrote, and the block runs plainly."""
    model = make_model()
    model.noting = nn.ModuleList([Noting()])

    def noting_step(model, texts):
        notes = make_notes()
        size = model.noting[0](model.embed(texts), notes).square().mean()
        return step(model, texts) + size + (notes["size"] if make_notes is dict else notes[0])

    measured = measure(model, noting_step)
    assert [*measured.left_out] == ["noting.0"]


def test_a_refusal_says_why_blocks_were_left_out_where_memory_ends_among_them():
    """Blocks that are left out run plainly, so what does not fit is no fault of a single block."""
    model = make_model()
    model.blocks = nn.ModuleList(Noting() for _ in range(LAYERS))

    def noting_step(model, texts):
        hidden, notes = model.embed(texts), []
        for block in model.blocks:
            hidden = block(hidden, notes)
        return model.head(hidden).square().mean() + sum(notes)

    options = {"batch": make_texts(), "step": noting_step, "headroom": 0, "check": None, "reuse": False}
    need = autobatch.fit(model, 4, budget="4GiB", max_micro_batch=1, **options).peak_bytes
    with pytest.raises(autobatch.DoesNotFit, match=r"blocks\.0 \(it writes into a list"):
        autobatch.fit(model, 4, budget=int(0.7 * need), strategies="auto", **options)


def test_recomputing_is_never_said_to_take_more_than_the_plain_pass(monkeypatch):
    """Blocks that were measured on a busy machine may seem to take longer than the whole trial."""
    monkeypatch.setattr("autobatch.fitting.choose_blocks.again_seconds", lambda *_: 3600.0)
    assert fit(make_model(), 0.7).checkpointing.slowdown <= 1


def test_a_step_that_fails_where_its_graph_is_cut_is_refused_in_words():
    """Such as a penalty on a gradient through the blocks; the user's step has no fault."""
    model = make_model()

    def penalized_step(model, texts):
        loss = step(model, texts)
        (gradient,) = torch.autograd.grad(loss, model.embed.weight, create_graph=True)
        return loss + gradient.square().sum()

    with sdpa_kernel(SDPBackend.MATH), pytest.raises(autobatch.DoesNotFit, match=r"strategies=.*cut at each block"):
        fit(model, 0.7, step=penalized_step)


def test_a_block_that_two_lists_share_is_found_once():
    """By its first name, which a plan can name."""
    model = make_model()
    model.again = nn.ModuleList(model.blocks[:2])
    assert find_blocks(model) == [f"blocks.{i}" for i in range(LAYERS)]


class Stage(nn.Module):
    """Several blocks that are one entry of a list, as in a ConvNeXt."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_blocks_inside_others_are_recomputed_where_the_outer_ones_are_too_large():
    """A stage of five blocks takes nearly as much while it is recomputed as the plain step."""
    model, plain = make_model(torch.float64), make_model(torch.float64)
    model.blocks = nn.ModuleList([Stage(model.blocks[:5]), Stage(model.blocks[5:])])
    assert find_blocks(model) == ["blocks.0", "blocks.1"]
    plan = fit(model, 0.6)
    assert {block.count(".") for block in plan.checkpointing.blocks} == {3}
    for one in (model, plain):
        torch.manual_seed(1)
        run = recompute(Workload(one, step), plan.checkpointing.ways).step if one is model else step
        run(one, make_texts()).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 1e-12 * one.grad.norm()


class Graphs(nn.Module):
    """Layers of a graph network, which are called with a sparse matrix."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(edges, self.inner(hidden).tanh().sin())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        edges = torch.eye(len(hidden)).to_sparse()
        for block in self.blocks:
            hidden = block(hidden, edges)
        return hidden.square().mean()


def test_blocks_may_be_called_with_sparse_tensors():
    """A memory that several of them share counts once."""
    model, names = Graphs(), [f"blocks.{i}" for i in range(3)]
    inputs = torch.randn(16, WIDTH)
    with CpuDevice().limit(2**40):
        found = measure_blocks(
            Workload(model, lambda model, inputs: model(inputs)),
            CpuDevice(),
            names,
            inputs,
            {},
            allowed=["checkpoint", "selective", "offload"],
        )
    assert [run.block for run in found.runs] == names
    first, *others = (run.input_bytes for run in found.runs)
    assert {first - one for one in others} == {16 * 8 * 2 + 16 * 4}  # indices and values


class DynamicCache:
    """Stands for that of Transformers."""


def test_a_cache_that_blocks_are_called_with_is_named_with_what_to_do():
    """Models of Transformers make one in training, too, unless they are told not to."""
    model = make_model()
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda hidden, cache=None, plain=plain: plain(hidden)

    def cached_step(model, texts):
        hidden, cache = model.embed(texts), DynamicCache()
        for block in model.blocks:
            hidden = block(hidden, cache=cache)
        return hidden.square().mean()

    with pytest.raises(autobatch.DoesNotFit, match=r"DynamicCache.*use_cache = False"):
        fit(model, 0.6, step=cached_step)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_attention_with_dropout_is_not_kept_on_a_card(name):
    """It draws: if its recomputation did not, the layers after it would draw other numbers than before."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    for dropout in (0.0, 0.1):
        places = [one.name for one in operator._schema.arguments]
        given = [dropout if one == "dropout_p" else None for one in places[: places.index("dropout_p") + 1]]
        assert (_keep(None, operator, *given) == CheckpointPolicy.MUST_SAVE) is (dropout == 0.0)
        assert (_keep(None, operator, dropout_p=dropout) == CheckpointPolicy.MUST_SAVE) is (dropout == 0.0)


def test_a_compiled_model_is_refused_by_the_runner_of_such_a_plan():
    """As by fit."""
    model = make_model()
    plan = fit(model, 0.6)
    with pytest.raises(autobatch.InvalidArgument, match="compile"):
        autobatch.Runner(plan, torch.compile(model, backend="eager"), step, None)


def test_a_plan_names_the_blocks_that_were_left_out():
    """With the reason, in the record and in its report; it is saved and loaded with them."""
    model = make_model()
    model.blocks.insert(2, Odd("BatchNorm"))
    plan = fit(model, 0.7)
    assert [one.block for one in plan.checkpointing.left_out] == ["blocks.2"]
    assert "blocks.2" in plan.explain()
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_remembered_plan_is_confirmed_with_its_blocks_recomputed(tmp_path, monkeypatch):
    """One trial is enough, and the new plan recomputes the same blocks; without strategies it is not used."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    model = make_model()
    first, again = fit(model, 0.6, reuse=True), fit(model, 0.6, reuse=True)
    assert again.confirms == first.id
    assert len(again.trials) == 1
    assert again.checkpointing == first.checkpointing
    with pytest.raises(autobatch.DoesNotFit):
        fit(model, 0.6, reuse=True, strategies=None)


def test_nothing_is_recomputed_where_the_step_fits():
    """Strategies are for what does not fit."""
    assert fit(make_model(), 8.0).checkpointing is None


def test_a_budget_in_which_no_choice_fits_is_refused_in_one_line():
    """It says what strategies= tried."""
    with pytest.raises(autobatch.DoesNotFit, match="strategies=") as caught:
        fit(make_model(), 0.2)
    assert "\n" not in str(caught.value)


def test_a_model_without_blocks_is_refused_in_words():
    """There is nothing to choose from."""
    model = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50))
    with pytest.raises(autobatch.DoesNotFit, match="found no blocks"):
        fit(model, 0.5)


@pytest.mark.parametrize("given", ["offload", ["offload"], 3, "checkpoint"])
def test_an_unknown_strategy_is_refused(given):
    """A list of known ones, "auto" or None."""
    with pytest.raises(autobatch.InvalidArgument, match="strategies="):
        autobatch.fit(make_model(), 4, batch=make_texts(), step=step, strategies=given)


def test_a_compiled_model_is_refused():
    """Its graph has no blocks to recompute."""
    with pytest.raises(autobatch.InvalidArgument, match="compile"):
        autobatch.fit(torch.compile(make_model(), backend="eager"), 4, batch=make_texts(), step=step, strategies="auto")


def test_statistics_that_only_move_after_fit_are_refused():
    """Where a block's BatchNorm was in eval mode in ``fit`` and is in train mode in a step."""
    model = make_model()
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(WIDTH).eval()
    blocks = [f"blocks.{i}" for i in range(LAYERS)]
    recomputed = recompute(Workload(model, step), whole(blocks)).step
    recomputed(model, make_texts())
    model.blocks[1].norm.train()
    with pytest.raises(autobatch.InvalidArgument, match="BatchNorm"):
        recomputed(model, make_texts())


def test_copies_of_data_parallel_are_refused():
    """They would recompute the blocks of the first card."""
    with pytest.raises(autobatch.InvalidArgument, match="DataParallel"):
        fit(nn.DataParallel(make_model()), 0.6)


def test_settings_of_other_frameworks_name_the_recomputed_blocks(caplog):
    """Without them the size does not fit there."""
    plan = fit(make_model(), 0.6)
    caplog.clear()
    plan.settings("huggingface")
    assert plan.checkpointing.blocks[0] in caplog.text


def test_a_plan_of_another_model_s_blocks_is_refused():
    """The Runner cannot recompute a block that is not there."""
    model = make_model()
    plan = fit(model, 0.6)
    with pytest.raises(autobatch.InvalidArgument, match="blocks"):
        autobatch.Runner(plan, nn.Linear(2, 2), lambda m, x: m(x).mean(), None)
