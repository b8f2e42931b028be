"""``distributed.reduction``: sums through buckets that are smaller than what is summed."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.ranks import run_ranks, values_of

from autobatch.distributed.channel import open_channel
from autobatch.distributed.reduction import GradientSlot, Reduction

KINDS = ("both", "first", "second", "laid out otherwise", "sum in float32", "wide gradient")


def make_parameter(kind, rank):
    """A parameter of this rank's, the sums in float32, and what its gradient is."""
    dtype = torch.bfloat16 if kind in ("sum in float32", "wide gradient") else torch.float64
    parameter = torch.nn.Parameter(torch.zeros(3, 7, dtype=dtype))
    value, sums = torch.arange(21.0, dtype=torch.float64).view(3, 7) * (rank + 1), {}
    has_dtype = hasattr(parameter, "grad_dtype")  # since torch 2.9
    if kind == "wide gradient" and has_dtype:
        parameter.grad_dtype = torch.float32
        value = value + 1 / 1024
    if (kind, rank) in (("first", 1), ("second", 0), ("wide gradient", 1)):
        return parameter, sums, torch.zeros_like(value)
    if kind == "sum in float32" and rank == 0:
        sums[parameter] = value.float()
    elif kind == "wide gradient":
        parameter.grad = value.to(torch.float32 if has_dtype else dtype)
    elif kind == "laid out otherwise":
        parameter.grad = value.t().contiguous().t()  # a copy
    else:
        parameter.grad = value.to(dtype, copy=True)
    return parameter, sums, value


def reduce_all():
    """How far each sum is from the sum of both ranks' values, in units of rounding, and the loss."""
    rank, reduction = dist.get_rank(), Reduction(None, open_channel(None), bucket_bytes=40)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes with nan
    made = {kind: make_parameter(kind, rank) for kind in KINDS}
    loss = torch.empty((), dtype=torch.float32)
    loss.grad = torch.tensor(2.0 + rank)
    slots = [GradientSlot(parameter, sums) for parameter, sums, _ in made.values()]
    for slot in slots:
        slot.lay_out()
    reduction.reserve([*(parameter for parameter, *_ in made.values()), loss])
    reduction.sum([*slots, GradientSlot(loss, {})], 0.5)
    errors = {}
    for kind, (parameter, sums, value) in made.items():
        everyone = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everyone, value.contiguous())
        expected = (everyone[0] + everyone[1]) / 2
        rounding = 2**-8 if parameter.grad.dtype is torch.bfloat16 else 2**-20
        errors[kind] = float((parameter.grad.double() - expected).abs().max() / expected.max()) / rounding
        assert not sums
    return errors, loss.grad.item()


@cache
def answers():
    return run_ranks(reduce_all)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_may_be_in_several_buckets(kind):
    """For any rank with a gradient, any layout in memory, and any dtype of the sum."""
    for errors, loss in values_of(answers()):
        assert errors[kind] <= 1
        assert loss == 2.5
