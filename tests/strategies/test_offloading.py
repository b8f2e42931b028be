"""Blocks whose saved tensors go to host memory: what comes back, what stays, and which blocks may run so."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from text_blocks import LAYERS, make_model, make_texts, step
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.records import Checkpointing
from autobatch.step.workload import Workload
from autobatch.strategies.blocks import find_blocks, measure_blocks
from autobatch.strategies.checkpointing import recompute
from autobatch.strategies.choice import BlockRun, WayRun, choices, predict_peak, useful_ways
from autobatch.strategies.offloading import HostCopies, HostRoom, offloading

WIDTH = 96
ROWS = 64
"""So that each activation has more bytes than the smallest one that is moved."""


class Counted(HostCopies):
    """Counts what is brought back, and the bytes of the storages that stay."""

    moved, stayed = 0, 0

    def pack(self, tensor: torch.Tensor):
        packed = super().pack(tensor)
        type(self).stayed += packed[0] is not None and isinstance(packed[0], torch.Tensor)
        type(self).moved += not isinstance(packed[0], torch.Tensor)
        return packed


@pytest.fixture
def counted():
    Counted.moved = Counted.stayed = 0
    return Counted


def make_inputs(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape or (ROWS, WIDTH), generator=generator, dtype=dtype).requires_grad_()


def gradients_of(block: nn.Module, forward, inputs: torch.Tensor) -> list[torch.Tensor]:
    block.zero_grad()
    inputs.grad = None
    torch.manual_seed(1)
    forward(inputs).square().sum().backward()
    return [inputs.grad.clone(), *(one.grad.clone() for one in block.parameters())]


class Parts(nn.Module):
    """Attention in parts: views of one memory, transposed, expanded and saved several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(inputs).split(WIDTH, dim=-1)
        mask = torch.ones(1, 1, len(inputs), dtype=inputs.dtype).expand(4, len(inputs), -1)
        heads = [one.unflatten(-1, (4, -1)).transpose(0, 1) for one in (query, key, value)]
        scores = (heads[0] @ heads[1].transpose(1, 2) * mask).softmax(-1)
        mixed = F.dropout(scores, 0.3) @ heads[2]
        return self.last(mixed.transpose(0, 1).flatten(1)).tanh() * value


class Spectrum(nn.Module):
    """Complex numbers, conjugated views, and a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.fft.fft(self.inner(inputs))
        power = (found * found.conj()).real
        return torch.sparse.mm((power > power.mean()).to(power.dtype).to_sparse(), power.T / 1000).tanh()


class Rewritten(nn.Module):
    """Saves one memory, writes into it, and saves it again. What was saved first has no backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(inputs)
        hidden.sin()
        hidden.mul_(2)
        return self.last(hidden)


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.inner(inputs)))


@pytest.mark.quick
@pytest.mark.parametrize("kind", [Parts, Spectrum, Rewritten, WithBatchNorm])
def test_the_gradient_is_that_of_the_plain_pass_bit_for_bit(kind):
    """With dropout, views, shared memory, complex and sparse numbers; a graph may run backward twice."""
    torch.manual_seed(0)
    block, inputs, room = kind().double(), make_inputs(), HostRoom(2**40)
    plain = gradients_of(block, block.forward, inputs)
    moved = gradients_of(block, offloading(block, block.forward, room), inputs)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    assert room.left < 2**40
    torch.manual_seed(1)
    loss = offloading(block, block.forward, room)(inputs).square().sum()
    for _ in range(2):
        [again] = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert torch.equal(again, plain[0])


@pytest.mark.quick
def test_a_second_derivative_is_that_of_the_plain_pass():
    """What comes back has its place in the graph."""
    block, found = Parts().double(), []
    for forward in (block.forward, offloading(block, block.forward, HostRoom(2**40))):
        inputs = make_inputs()
        torch.manual_seed(1)
        [gradient] = torch.autograd.grad(forward(inputs).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), inputs)[0])
    assert torch.equal(*found)


class Noting(HostCopies):
    """Copies that note what was saved."""

    saved: ClassVar[list[tuple[torch.Tensor, object]]] = []

    def pack(self, tensor: torch.Tensor) -> object:
        packed = super().pack(tensor)
        self.saved.append((tensor.detach(), packed))
        return packed


@pytest.fixture
def saved():
    Noting.saved.clear()
    return Noting.saved


def is_moved(packed: object) -> bool:
    return not isinstance(packed[0], torch.Tensor)


@pytest.mark.quick
def test_each_memory_is_copied_once_and_its_views_come_back_as_views(saved):
    """Attention saves the parts of one memory: each view has its dtype, shape, strides and place, and values."""
    torch.manual_seed(0)
    block = Parts()
    offloading(block, block.forward, HostRoom(2**40), Noting)(make_inputs(dtype=torch.float32))
    moved = [(tensor, packed) for tensor, packed in saved if is_moved(packed)]
    memories = {tensor.untyped_storage().data_ptr() for tensor, _ in moved}
    assert len({id(packed[0]) for _, packed in moved}) == len(memories) < len(moved)
    for tensor, packed in moved:
        back = HostCopies(HostRoom(0), ()).unpack(packed)
        assert torch.equal(back, tensor)
        assert (back.stride(), back.storage_offset(), back.dtype) == (
            *(tensor.stride(), tensor.storage_offset()),
            tensor.dtype,
        )
        assert back.data_ptr() != tensor.data_ptr()


@pytest.mark.quick
def test_parameters_buffers_inputs_and_small_tensors_are_not_copied(saved):
    """Copies of them would free nothing, or next to nothing."""
    block, inputs = WithBatchNorm(), make_inputs(dtype=torch.float32)
    offloading(block, block.forward, HostRoom(2**40), Noting)(inputs)
    held = {one.untyped_storage().data_ptr() for one in (inputs, *block.parameters(), *block.buffers())}
    stayed = {tensor.untyped_storage().data_ptr() for tensor, packed in saved if not is_moved(packed)}
    moved = [tensor for tensor, packed in saved if is_moved(packed)]
    assert len(held & stayed) >= 3
    assert not held & {tensor.untyped_storage().data_ptr() for tensor in moved}
    assert min(tensor.untyped_storage().nbytes() for tensor in moved) > 4 * WIDTH * 4


@pytest.mark.quick
def test_what_the_host_has_no_room_for_stays(saved):
    """The gradient is the same, and no more is copied than there is room for."""
    torch.manual_seed(0)
    block, inputs = Parts().double(), make_inputs()
    plain = gradients_of(block, block.forward, inputs)
    moved = gradients_of(block, offloading(block, block.forward, HostRoom(200_000), Noting), inputs)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    sizes = {id(packed[0]): tensor.untyped_storage().nbytes() for tensor, packed in saved if is_moved(packed)}
    assert 0 < sum(sizes.values()) <= 200_000
    assert any(tensor.nbytes > 2**14 for tensor, packed in saved if not is_moved(packed))


class Overwriting(nn.Module):
    """Writes into what it has saved: into an activation, its input, or its weight, counted by torch or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(inputs)
        outputs = hidden.sin() * inputs.cos()
        with torch.no_grad():
            if self.kind == "activation":
                hidden.mul_(2)
            elif self.kind == "input":
                inputs.mul_(2)
            elif self.kind == "weight":
                self.inner.weight.mul_(2)
            elif self.kind == "unseen":
                hidden.data.mul_(2)
        return outputs


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["input", "weight", "activation"])
def test_a_saved_tensor_that_is_written_into_raises_or_has_its_old_value(kind):
    """Plain, each raises an error of torch. What stays does so too; what was copied is as it was saved."""
    torch.manual_seed(0)
    block, inputs = Overwriting(kind).double(), make_inputs()
    with pytest.raises(RuntimeError, match="inplace operation"):
        block(inputs * 1).square().sum().backward()
    forward = offloading(block, block.forward, HostRoom(2**40))
    if kind == "activation":
        found = gradients_of(block, forward, inputs)
        block.kind = "nothing"
        right = gradients_of(block, block.forward, inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    else:
        with pytest.raises(RuntimeError, match="inplace operation"):
            forward(inputs * 1).square().sum().backward()


def measure(block: nn.Module, *allowed: str) -> tuple[BlockRun | None, dict[str, str]]:
    """What was measured of a block between others, and why it was left out."""
    model = make_model()
    model.blocks.insert(2, block)
    with CpuDevice().limit(2**40):
        found = measure_blocks(
            Workload(model, step), CpuDevice(), find_blocks(model), make_texts(2), {}, allowed=allowed
        )
    assert {"blocks.1", "blocks.3"} <= {run.block for run in found.runs}
    return next((run for run in found.runs if run.block == "blocks.2"), None), dict(found.left_out)


class Odd(nn.Module):
    """A block that cannot be recomputed, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.inner, self.norm = kind, 0, nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = self.inner(hidden)
        self.calls += 1
        if self.kind == "BatchNorm":
            return self.norm(changed.transpose(1, 2)).transpose(1, 2).tanh()
        if self.kind == "own generator":
            return changed.sigmoid() * torch.rand(changed.shape, generator=self.generator)
        if self.kind == "NumPy":
            return changed.sigmoid() * (np.random.random() + random.random())
        if self.kind == "branch on moving state":
            return changed.sigmoid() if self.calls % 2 else changed.exp().tanh()
        outputs = changed.sin()
        changed.data.mul_(2)
        return outputs


@pytest.mark.parametrize("kind", ["BatchNorm", "own generator", "NumPy", "branch on moving state"])
def test_a_block_that_cannot_be_recomputed_may_be_offloaded(kind):
    """It runs once, so that its draws and what it moves are those of the plain pass; else it is left out."""
    run, left_out = measure(Odd(kind), "checkpoint", "selective", "offload")
    assert not left_out
    assert [*run.ways] == ["offload"]
    assert run.cost("offload") >= 0
    run, left_out = measure(Odd(kind), "checkpoint", "selective")
    assert run is None
    assert [*left_out] == ["blocks.2"]


def test_a_block_that_writes_into_what_it_saved_unknown_to_torch_is_left_out():
    """A copy has the old values, and the plain pass would use the new ones."""
    run, left_out = measure(Odd("unseen"), "offload")
    assert run is None
    assert "unknown to torch" in left_out["blocks.2"]


def test_a_step_that_offloads_has_the_plain_gradient_and_moves_statistics_once():
    """In float64 with dropout, with BatchNorm in train mode, also beside recomputed blocks."""
    ways = {f"blocks.{i}": ("checkpoint", "selective", "offload")[i % 3] for i in range(LAYERS)}
    found = []
    for chosen in ({}, {**ways, f"blocks.{LAYERS}": "offload"}, dict.fromkeys([*ways, f"blocks.{LAYERS}"], "offload")):
        model = make_model()
        model.blocks.append(Odd("BatchNorm"))
        model = model.double()
        torch.manual_seed(1)
        recompute(Workload(model, step), chosen).step(model, make_texts()).backward()
        assert not any("forward" in vars(module) for module in model.modules())
        norm = model.blocks[LAYERS].norm
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        found.append([*gradients, norm.running_mean, norm.num_batches_tracked, torch.get_rng_state()])
    for others in found[1:]:
        assert all(
            torch.allclose(one, other, rtol=1e-12, atol=1e-15) for one, other in zip(found[0], others, strict=True)
        )
        assert torch.equal(found[0][-1], others[-1])


def make_run(number: int, ways: dict[str, WayRun], **changes) -> BlockRun:
    own = {"kind": "Block", "saved_bytes": 100, "input_bytes": 10, "keeps_input": True, "again_bytes": 120}
    return BlockRun(block=f"blocks.{number}", ways=ways, flops=10, again_seconds=1.0, **{**own, **changes})


@pytest.mark.quick
def test_offload_is_taken_where_it_is_cheaper_or_the_only_way():
    """By measured times, as parts of a forward pass; a way that saves no more and costs no less is left out."""
    again, everything = WayRun(kept_bytes=0, again_bytes=120, seconds=1.0), ["checkpoint", "offload"]
    slow, fast = (WayRun(kept_bytes=10, again_bytes=50, seconds=seconds) for seconds in (2.0, 0.2))
    assert useful_ways([make_run(0, {"checkpoint": again, "offload": slow})], everything) == {
        "blocks.0": ["checkpoint"]
    }
    assert useful_ways([make_run(0, {"checkpoint": again, "offload": fast})], everything) == {"blocks.0": everything}
    runs = [make_run(0, {"offload": slow}), make_run(1, {"checkpoint": again})]
    assert [*choices(runs, everything)] == [
        {"blocks.1": "checkpoint"},
        {"blocks.0": "offload"},
        {"blocks.0": "offload", "blocks.1": "checkpoint"},
    ]


@pytest.mark.quick
def test_a_prediction_counts_what_an_offloaded_block_keeps_and_its_own_peak():
    """It needs its input no more than the plain pass does, unlike a recomputation."""
    moved = {"offload": WayRun(kept_bytes=10, again_bytes=50, seconds=1.0)}
    runs = [make_run(number, moved, keeps_input=False) for number in range(2)]
    assert [
        predict_peak(runs, chosen, 0)
        for chosen in ({}, {"blocks.0": "offload"}, dict.fromkeys(("blocks.0", "blocks.1"), "offload"))
    ] == [220, 130, 60]
    again = {"checkpoint": WayRun(kept_bytes=0, again_bytes=120, seconds=1.0)}
    assert predict_peak([make_run(0, again, keeps_input=False)], {"blocks.0": "checkpoint"}, 0) == 130


def make_record(**changes) -> Checkpointing:
    own = {"blocks": ("a", "b", "c"), "candidates": 4, "micro_batch_size": 1, "plain_bytes": 2**20, "peak_bytes": 2**19}
    return Checkpointing(**{**own, "slowdown": 0.1, **changes})


@pytest.mark.quick
def test_a_record_names_the_offloaded_blocks():
    """It is saved and loaded, older ones have none, and a block has one way."""
    some, every = make_record(selective=("a",), offloaded=("c",)), make_record(offloaded=("a", "b", "c"))
    assert some.ways == {"a": "selective", "b": "checkpoint", "c": "offload"}
    assert Checkpointing.model_validate_json(some.model_dump_json()) == some
    assert Checkpointing.model_validate({**make_record().model_dump(), "left_out": ()}).recomputed == ["a", "b", "c"]
    assert str(some).startswith("checkpointing 3 of 4 blocks, 1 of them selectively, 1 of them offloaded: ")
    assert str(every).startswith("offloading 3 of 4 blocks: ")
    for wrong in ({"selective": ("a",), "offloaded": ("a",)}, {"offloaded": ("d",)}):
        with pytest.raises(ValueError, match=r"block [ad] "):
            make_record(**wrong)


def fit(model: nn.Module, **options) -> autobatch.Plan:
    return autobatch.fit(model, 4, batch=make_texts(), step=step, check=None, reuse=False, max_micro_batch=1, **options)


def test_a_cpu_offers_no_offload():
    """Its memory is the host's. By itself the way is refused, and left out beside others."""
    model = make_model()
    with pytest.raises(autobatch.InvalidArgument, match="host memory") as caught:
        fit(model, strategies=["offload"])
    assert "\n" not in str(caught.value)
    need = fit(model).peak_bytes
    plan = fit(model, strategies=["offload", "checkpoint"], budget=int(0.7 * need), headroom=0)
    assert set(plan.checkpointing.ways.values()) == {"checkpoint"}


def test_other_frameworks_are_told_how_to_offload(caplog):
    """A block that draws from NumPy cannot be checkpointed there, either."""
    plan = fit(make_model())
    plan = plan.model_copy(update={"checkpointing": make_record(offloaded=("c",))})
    caplog.clear()
    plan.settings("huggingface")
    assert "save_on_cpu" in caplog.text
    assert "(a, b)" in caplog.text


def test_an_offloaded_block_is_recomputed_where_memory_ends_if_that_was_tried():
    """The others stay offloaded, and a step that does not fit even then says so."""
    model, is_short = make_model(), [True]

    def short_step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
        if is_short[0]:
            raise torch.OutOfMemoryError("out of memory")
        return step(model, texts)

    plan = fit(model)
    own = {"blocks": ("blocks.0", "blocks.1"), "offloaded": ("blocks.0", "blocks.1"), "candidates": LAYERS}
    chosen = make_record(**own)
    plan = plan.model_copy(update={"checkpointing": chosen, "recomputable": ("blocks.1",)})
    model.blocks[0].norm = nn.BatchNorm1d(3)
    runner = autobatch.Runner(plan, model, short_step, None)
    with pytest.raises(autobatch.DoesNotFit, match=r"recomputed: 1 block; already offloaded: 1 block"):
        runner.accumulate(make_texts())
    is_short[0] = False
    runner.accumulate(make_texts())
    assert model.head.weight.grad is not None
