"""``prediction.sizing``: the size that is traced again, and what becomes of an estimate that does not hold there."""

from __future__ import annotations

from autobatch.errors import InvalidArgument
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.sizing import prove
from autobatch.prediction.timeline import Block, Timeline, TracedStep, combine

MIB = 2**20
BLOCK = Block(phase="forward", kind="activation")
LINES = Timeline(order=(1, -1), fixed=(MIB,), per_sample=(0,), blocks=(BLOCK,))


def step_at(samples, byte_count):
    return TracedStep(samples=samples, order=(1, -1), sizes=(byte_count,), blocks=(BLOCK,))


def check_padding(estimate, size):
    """What a step takes that pads its samples to 128, a MiB for each 128."""
    timeline = estimate.timeline
    known = list(timeline.traced) or [timeline.at(n) for n in (2, 67)]
    return None if size <= 128 else combine([*known, step_at(size, -(-size // 128) * MIB)])


def judge_within(limit, bound=4096):
    """The largest size within a limit of bytes in tensors."""

    def judge(estimate):
        sizes = range(1, min(bound, estimate.largest_traced or bound) + 1)
        return max((size for size in sizes if estimate.tensor_bytes(size) <= limit), default=0)

    return judge


def test_a_size_at_which_it_holds_is_proven_by_one_trace():
    """And the estimate stays the one that it was."""
    asked = []
    proof = prove(Estimate(LINES, 0), lambda _: 100, lambda _, size: asked.append(size))
    assert (proof.proven_at, proof.doubt, asked) == (100, "", [100])
    assert proof.estimate.timeline is LINES


def test_where_it_does_not_hold_the_answer_moves_and_is_traced_again():
    """Until it is one that was traced; no more than what fits there."""
    judge = judge_within(8 * MIB)
    assert judge(Estimate(LINES, 0)) == 4096
    proof = prove(Estimate(LINES, 0), judge, check_padding)
    assert proof.estimate.timeline.interpolated
    assert 512 < proof.proven_at <= 1024
    assert proof.proven_at == judge(proof.estimate)


def test_a_size_that_cannot_be_traced_is_in_doubt():
    """With the reason; the estimate stays what it was."""

    def check(*_):
        raise InvalidArgument("it takes too long")

    proof = prove(Estimate(LINES, 0), lambda _: 100, check)
    assert (proof.proven_at, proof.doubt) == (0, "it takes too long")
    assert proof.estimate.timeline is LINES
