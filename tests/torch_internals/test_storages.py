"""The memory behind tensors: each part of it, and none where there is none."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.torch_internals.storages import bytes_of, storages_of

pytestmark = pytest.mark.quick

quietly = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:.*prototype stage")


def make_fake():
    """A tensor that claims to be on the CPU and holds nothing."""
    with FakeTensorMode():
        return torch.ones(3)


@quietly
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: torch.eye(4).to_sparse(), ("_indices", "_values")),
        (lambda: torch.eye(4).to_sparse_csr(), ("crow_indices", "col_indices", "values")),
        (lambda: torch.eye(4).to_sparse_csc(), ("ccol_indices", "row_indices", "values")),
        (lambda: torch.eye(4).to_sparse_bsr((2, 2)), ("crow_indices", "col_indices", "values")),
        (lambda: torch.eye(4).to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices", "values")),
    ],
)
def test_a_sparse_tensor_has_a_storage_for_each_part(make, names):
    """Indices are memory as well as values."""
    tensor = make()
    parts = [getattr(tensor, name)().untyped_storage()._cdata for name in names]
    assert [storage._cdata for storage in storages_of(tensor)] == parts
    assert len(set(parts)) == len(names)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:], lambda t: t.t(), lambda t: t.expand(3, 2, 5)])
def test_a_view_has_the_storage_of_its_base(view):
    """However it looks at it."""
    tensor = torch.ones(2, 5)
    [storage] = storages_of(view(tensor))
    assert storage._cdata == tensor.untyped_storage()._cdata


@quietly
def test_a_wrapper_has_the_storages_of_what_is_inside():
    """A nested tensor is values and where its rows begin, which may stand in one storage or in several."""
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    inside = {storage._cdata for storage in storages_of(tensor)}
    assert {part.untyped_storage()._cdata for part in (tensor.values(), tensor.offsets())} <= inside


@pytest.mark.parametrize("make", [lambda: torch.ones(3, device="meta"), lambda: torch.ones(3).to_mkldnn(), make_fake])
def test_what_holds_no_values_has_no_storage(make):
    """Meta and fake tensors have none, opaque ones do not show theirs."""
    assert list(storages_of(make())) == []


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(3, 4), 48),
        (torch.ones(100, 4)[:3], 48),
        (torch.ones(1, 4).expand(3, 4), 48),
        (torch.ones(3, 4, dtype=torch.complex64), 96),
        (torch.eye(3).to_sparse(), 3 * (2 * 8 + 4)),
        (
            torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 5), (9, 5), check_invariants=True),
            2 * (8 + 20),
        ),
        (torch.ones(3).to_mkldnn(), 12),
        (torch.empty(0), 0),
    ],
)
def test_bytes_are_those_of_the_values_and_of_a_sparse_ones_parts(tensor, expected):
    """A view counts what it shows, not what lies behind it; a sparse tensor its indices and values."""
    assert bytes_of(tensor) == expected
