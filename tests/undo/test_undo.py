"""What a failed attempt may have changed besides gradients: buffers and generators, back by value."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from workloads import Everything, bits_of, differences, make_batch

from autobatch.undo.undo import Undo

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def test_a_forward_pass_is_undone():
    """Running statistics, non-persistent buffers and every generator are bitwise as before; a second time too."""
    model = Everything()
    before = bits_of(model)
    undo = Undo(model, CPU)
    for _ in range(2):
        model(make_batch(6)[0])
        random.random()
        np.random.rand()
        assert differences(bits_of(model), before)
        undo.restore()
        assert not differences(bits_of(model), before)


def test_the_same_dropout_comes_again():
    """The repeated pass is bitwise the first one."""
    model, (inputs, _) = Everything(), make_batch(6)
    undo = Undo(model, CPU)
    first = model(inputs)
    undo.restore()
    assert torch.equal(model(inputs), first)


def test_buffers_keep_their_identity():
    """One that was replaced is put back as the object it was, with its old value; what was None is None."""
    model = nn.Module()
    model.register_buffer("state", torch.zeros(3))
    model.register_buffer("mask", None)
    kept = model.state
    undo = Undo(model, CPU)
    kept += 1
    model.state = torch.ones(5)
    model.mask = torch.ones(2)
    undo.restore()
    assert model.state is kept
    assert kept.tolist() == [0, 0, 0]
    assert model.mask is None


def test_one_buffer_in_two_modules_is_the_same_again():
    """Shared buffers stay shared."""
    model = nn.ModuleList([nn.Module(), nn.Module()])
    model[0].register_buffer("table", torch.zeros(3))
    model[1].register_buffer("table", model[0].table)
    undo = Undo(model, CPU)
    model[1].table += 1
    undo.restore()
    assert model[0].table is model[1].table
    assert model[0].table.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([float("nan"), -0.0]),
        lambda: torch.tensor([True, False]),
        lambda: torch.ones(3).bfloat16(),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.tensor(2**62),
        lambda: torch.empty(0),
        lambda: torch.arange(6).view(2, 3).t(),
    ],
)
def test_any_buffer_comes_back(make):
    """Every kind of dtype and layout that a module may register."""
    model = nn.Module()
    model.register_buffer("buffer", make())
    before = bits_of(model)
    undo = Undo(model, CPU)
    model.buffer.zero_()
    undo.restore()
    assert not differences(bits_of(model), before)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_a_sparse_buffer_comes_back(layout):
    """The adjacency matrix of a graph network."""
    model = nn.Module()
    model.register_buffer("adjacency", torch.eye(3).to_sparse(layout=layout))
    kept = model.adjacency
    undo = Undo(model, CPU)
    model.adjacency.values().zero_() if layout is torch.sparse_csr else model.adjacency._values().zero_()
    undo.restore()
    assert model.adjacency is kept
    assert torch.equal(model.adjacency.to_dense(), torch.eye(3))


def test_an_overlapping_buffer_is_left_alone():
    """Torch refuses to write into it, so it cannot have changed."""
    model = nn.Module()
    model.register_buffer("positions", torch.arange(4).expand(3, 4))
    kept = model.positions
    undo = Undo(model, CPU)
    model.positions = None
    undo.restore()
    assert model.positions is kept


def test_restoring_does_not_enter_a_graph():
    """It happens between forward passes, where gradients are recorded."""
    model = nn.Module()
    model.register_buffer("state", torch.zeros(3))
    undo = Undo(model, CPU)
    undo.restore()
    assert model.state.is_leaf
    assert not model.state.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: setattr(buffer, "data", torch.arange(16.0)),
        lambda buffer: setattr(buffer, "data", torch.tensor([7.0])),
        lambda buffer: setattr(buffer, "data", buffer.data.bfloat16()),
        lambda buffer: setattr(buffer, "data", buffer.data.clone().zero_()),
        lambda buffer: buffer.resize_(9),
        lambda buffer: buffer.resize_(1).zero_(),
        lambda buffer: buffer.t_(),
    ],
    ids=["grown", "shrunk", "other dtype", "other memory", "resized up", "resized down", "transposed"],
)
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3)], ids=str)
def test_a_buffer_whose_memory_was_replaced_points_to_its_own_again(change, shape):
    """A table that grows through ``.data``: the same object, memory, shape, dtype and values as before."""
    model = nn.Module()
    model.register_buffer("table", torch.rand(shape))
    kept, storage, before = model.table, model.table.untyped_storage()._cdata, bits_of(model)
    undo = Undo(model, CPU)
    change(model.table)
    undo.restore()
    assert model.table is kept
    assert not differences(bits_of(model), before)
    assert kept.stride() == torch.empty(shape).stride()
    assert kept.untyped_storage()._cdata == storage


def test_an_overlapping_buffer_whose_memory_was_replaced_comes_back():
    """It is not copied, yet it can be pointed elsewhere."""
    model = nn.Module()
    model.register_buffer("positions", torch.arange(4).expand(3, 4))
    undo = Undo(model, CPU)
    model.positions.data = torch.arange(8).expand(3, 8)
    undo.restore()
    assert model.positions.tolist() == [[0, 1, 2, 3]] * 3
