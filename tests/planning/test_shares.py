"""Shares of ranks: they make the batch exactly, no rank goes without, and what is faster has no less."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import InvalidArgument
from autobatch.planning.division import share_batch, share_target

pytestmark = pytest.mark.quick

TARGETS = st.integers(12, 5000)
RATES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)
WHOLE_RATES = st.lists(st.integers(1, 9), min_size=1, max_size=12)  # small, so that there are ties
SHARES = st.lists(st.integers(1, 300), min_size=1, max_size=12)
HUGE = 10**400


@pytest.mark.parametrize(
    ("target", "share", "rates", "shares"),
    [
        (256, "equal", [1], (256,)),
        (256, "equal", [9, 1], (128, 128)),
        (5, "equal", [1] * 4, (2, 1, 1, 1)),
        (11, "equal", [1, 2, 3], (4, 4, 3)),
        (96, "speed", [3.0, 1.0], (72, 24)),
        (10, "speed", [1.0, 1.0, 1.0], (4, 3, 3)),
        (10, "speed", [1.0, 2.0, 3.0], (2, 3, 5)),
        (100, "speed", [1e-9, 1.0], (1, 99)),
        (100, "speed", [1e-300, 1e300, 1e300], (1, 50, 49)),
        (3, "speed", [1e9, 1.0, 1.0], (1, 1, 1)),
        (10, "speed", [0.6, 4.7, 4.7], (1, 5, 4)),
        (12, "speed", [1, 12, 100], (1, 1, 10)),
        (256, [64, 192], [1, 1], (64, 192)),
        (256, (1, 255), [1, 1], (1, 255)),
        (3, range(1, 3), [1, 1], (1, 2)),
    ],
)
def test_shares_by_example(target, share, rates, shares):
    """Known shares come out as written, those of slow ranks rounded up to one sample."""
    assert share_target(target, share, rates) == shares


@given(TARGETS, WHOLE_RATES | RATES, st.sampled_from(["equal", "speed"]))
def test_shares_make_the_target_and_leave_no_rank_without(target, rates, share):
    """One for each rank, each at least 1, and together the target."""
    shares = share_target(target, share, rates)
    assert len(shares) == len(rates)
    assert min(shares) >= 1
    assert sum(shares) == target


@given(TARGETS, WHOLE_RATES | RATES)
def test_a_faster_rank_has_no_fewer_samples(target, rates):
    """Shares are in the order of the rates; of equal rates the first ranks have the one more."""
    shares = share_target(target, "speed", rates)
    by_speed = sorted(range(len(rates)), key=lambda rank: (-rates[rank], rank))
    ordered = [shares[rank] for rank in by_speed]
    assert ordered == sorted(ordered, reverse=True)


@given(TARGETS, WHOLE_RATES | RATES)
def test_shares_are_within_one_sample_of_the_exact_proportion(target, rates):
    """Rounding moves less than a sample, where the exact share of no rank is below one."""
    exact = [Fraction(rate) * target / sum(map(Fraction, rates)) for rate in rates]
    if min(exact) >= 1:
        shares = share_target(target, "speed", rates)
        assert all(abs(share - part) < 1 for share, part in zip(shares, exact, strict=True))


@given(SHARES)
def test_the_users_own_shares_are_taken_as_they_are(shares):
    """Also as NumPy's and torch's whole numbers, and then returned as Python's."""
    target, rates = sum(shares), [1.0] * len(shares)
    for given_shares in (shares, tuple(shares), [np.int64(n) for n in shares], [torch.tensor(n) for n in shares]):
        taken = share_target(target, given_shares, rates)
        assert taken == tuple(shares)
        assert {type(samples) for samples in taken} == {int}


@given(SHARES, st.integers(0, 3000))
def test_a_batch_is_shared_as_the_target_is(shares, samples):
    """It is made exactly, no rank with a larger share has less, and none has nothing where there are enough."""
    parts = share_batch(samples, shares)
    assert len(parts) == len(shares)
    assert sum(parts) == samples
    assert min(parts) >= (1 if samples >= len(shares) else 0)
    by_share = sorted(range(len(shares)), key=lambda rank: (-shares[rank], rank))
    ordered = [parts[rank] for rank in by_share]
    assert ordered == sorted(ordered, reverse=True)


@pytest.mark.parametrize(
    ("samples", "shares", "parts"),
    [
        (5, (128, 128), (3, 2)),
        (2, (255, 1), (1, 1)),
        (1, (255, 1), (1, 0)),
        (2, (64, 64, 64), (1, 1, 0)),
        (0, (2, 1), (0, 0)),
        (100, (192, 64), (75, 25)),
    ],
)
def test_batches_by_example(samples, shares, parts):
    """Known parts come out as written; fewer samples than ranks go to the largest shares."""
    assert share_batch(samples, shares) == parts


EXAMPLE = "must be 'equal', 'speed' or a number of samples for each rank, such as [128, 128]"
EACH = "each rank needs a whole number of samples, at least 1"
REFUSED = [
    ("fast", f"share='fast' {EXAMPLE}"),
    ("", f"share='' {EXAMPLE}"),
    (None, f"share=None {EXAMPLE}"),
    (True, f"share=True {EXAMPLE}"),
    (0.5, f"share=0.5 {EXAMPLE}"),
    (b"\x80\x80", f"share=b'\\x80\\x80' {EXAMPLE}"),
    ({0: 128, 1: 128}, f"share={{0: 128, 1: 128}} {EXAMPLE}"),
    ({128}, f"share={{128}} {EXAMPLE}"),
    (np.array([128, 128]), f"share=array([128, 128]) {EXAMPLE}"),
    ([0.25, 0.75], f"share=[0.25, 0.75] has 0.25 for rank 0: {EACH}"),
    ([128, 128.0], f"share=[128, 128.0] has 128.0 for rank 1: {EACH}"),
    ([255, True], f"share=[255, True] has True for rank 1: {EACH}"),
    (["128", "128"], f"share=['128', '128'] has '128' for rank 0: {EACH}"),
    ([256, 0], f"share=[256, 0] has 0 for rank 1: {EACH}"),
    ([257, -1], f"share=[257, -1] has -1 for rank 1: {EACH}"),
    ([128, float("nan")], f"share=[128, nan] has nan for rank 1: {EACH}"),
    ([[128, 128]], f"share=[[128, 128]] has [128, 128] for rank 0: {EACH}"),
    ([128, None], f"share=[128, None] has None for rank 1: {EACH}"),
    ([], "share=[] has 0 numbers for 2 ranks: pass one for each rank"),
    ([256], "share=[256] has 1 number for 2 ranks: pass one for each rank"),
    ([1, 1, 254], "share=[1, 1, 254] has 3 numbers for 2 ranks: pass one for each rank"),
    ([1, 3], "share=[1, 3] makes 4 samples, not target_batch=256: pass [64, 192] for these proportions"),
    ([300, 100], "share=[300, 100] makes 400 samples, not target_batch=256: pass [192, 64] for these proportions"),
    (
        [1, HUGE],
        (
            "share=a list makes an int of about 401 digits samples, not target_batch=256: pass [1, 255] for these "
            "proportions"
        ),
    ),
]


@pytest.mark.parametrize(("share", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_shares_that_cannot_be_meant_are_refused(share, text):
    """What was passed, what is wrong with it, and numbers to pass, word for word."""
    with pytest.raises(InvalidArgument) as caught:
        share_target(256, share, [1.0, 1.0])
    assert str(caught.value) == text


@given(st.integers(12, 5000), SHARES)
def test_the_shares_that_a_message_names_are_taken(target, shares):
    """Whoever does what the message says gets a plan."""
    if sum(shares) == target:
        return
    with pytest.raises(InvalidArgument) as caught:
        share_target(target, shares, [1.0] * len(shares))
    named = str(caught.value).partition("pass [")[2].partition("]")[0]
    assert sum(share_target(target, [int(n) for n in named.split(", ")], [1.0] * len(shares))) == target


@pytest.mark.parametrize("share", ["equal", "speed", [1, 1, 1]])
def test_fewer_samples_than_ranks_are_refused(share):
    """No rank can be left without a sample."""
    with pytest.raises(InvalidArgument) as caught:
        share_target(2, share, [1.0] * 3)
    assert str(caught.value) == (
        "target_batch=2 is less than one sample for each of 3 ranks: pass target_batch=3 or more, or run on fewer ranks"
    )


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, True, "5", None, [1.0], HUGE])
def test_a_speed_that_is_not_known_is_refused(rate):
    """A rate of 0 is one that was not taken; no samples can be shared by it."""
    with pytest.raises(InvalidArgument, match=r"^share='speed' needs .* is none for rank 1: pass share='equal', or"):
        share_target(256, "speed", [1.0, rate])
    assert share_target(256, "equal", [1.0, rate]) == (128, 128)
