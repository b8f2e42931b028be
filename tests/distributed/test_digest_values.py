"""``digest_values``: the same text for equal bits, another one for others, on any layout and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.distributed import ranks
from autobatch.distributed.ranks import digest_values

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)


def numbers(dtype, size=12):
    """Zeros and ones, the same each time."""
    return torch.rand(size, generator=torch.Generator().manual_seed(0)).round().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_number_changes_it(dtype):
    """By the least bit that the dtype has."""
    one, other = numbers(dtype), numbers(dtype)
    assert digest_values([one]) == digest_values([other])
    other[3] = float(not other[3])
    assert digest_values([one]) != digest_values([other])


def test_the_last_bit_counts():
    """A sum of floats would round it away."""
    one = torch.tensor([1e20, 1.0])
    other = torch.stack((one[0], torch.nextafter(one[1], torch.tensor(2.0))))
    assert digest_values([one]) != digest_values([other])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_place_of_a_number_counts(dtype):
    """Two ranks may hold the same numbers in other rows, as of an embedding that saw other words."""
    values = torch.zeros(4, 3, dtype=dtype)
    one, other = values.clone(), values.clone()
    one[1, 0] = other[2, 1] = 1
    assert digest_values([one]) != digest_values([other])


@pytest.mark.parametrize(
    "change", [lambda x: x.t().contiguous().t(), lambda x: x.clone(), lambda x: torch.stack((x, x), -1)[..., 0]]
)
def test_the_layout_does_not_count(change):
    """Ranks may hold the same values in other strides."""
    values = numbers(torch.float32).reshape(3, 4)
    assert digest_values([change(values)]) == digest_values([values])


def test_large_tensors_are_summed_in_parts(monkeypatch):
    """To the same sum."""
    values = torch.arange(30.0).reshape(10, 3)
    whole = digest_values([values])
    monkeypatch.setattr(ranks, "_ELEMENTS_AT_ONCE", 4)
    assert digest_values([values]) == whole


def test_what_has_no_values_is_told_from_what_is_not_there():
    """Empty, without a shape yet, on the meta device, scalar, sparse."""
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    assert digest_values([]) == digest_values([None, None]) == ""
    kinds = [torch.empty(0, 3), nn.LazyLinear(2).weight, torch.empty(3, device="meta"), torch.tensor(2.0), sparse]
    assert all(digest_values([one, None]) != digest_values([None, one]) for one in kinds)
    assert digest_values([sparse]) == digest_values(
        [torch.sparse_coo_tensor([[0]], [3.0], (3,), check_invariants=True)]
    )
