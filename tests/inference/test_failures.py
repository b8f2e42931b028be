"""Memory that ends, items that are bad, and interrupts: nothing is wrong, nothing is lost, nothing is counted twice.

Covers planned and real shortages at every operation, the user's errors, and results that are refused. Does not cover
how sizes are chosen (``tests/planning/test_piece_size.py``).
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import autobatch
from autobatch.errors import DoesNotFit, InvalidArgument, InvalidResult, InvalidStep
from autobatch.testing import FakeDevice, oom_at

SAMPLES = 40
torch.manual_seed(0)
INPUTS = torch.randn(SAMPLES, 4)

pytestmark = pytest.mark.usefixtures("quiet_log")


def make_net():
    """Several operations, dropout among them, which is off."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def as_tensor(results):
    """Of a batch or of samples."""
    return results if isinstance(results, torch.Tensor) else torch.stack(list(results))


GIVEN = {
    "batch": (INPUTS, {}),
    "batch by length": (INPUTS, {"lengths": [1 + row % 5 for row in range(SAMPLES)]}),
    "samples": (list(INPUTS), {}),
    "samples by length": (list(INPUTS), {"lengths": lambda row: 1 + abs(int(row.tolist()[0] * 10))}),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_memory_may_end_at_every_operation(kind):
    """Results are the same, and each sample's result is taken once, wherever it ends."""
    batch, options = GIVEN[kind]
    net = make_net().eval()
    expected, counted = net(INPUTS).detach(), Counter()
    with oom_at(10**9) as planned:
        autobatch.map(net, batch, **options, on_result=lambda indices, _: counted.update(indices))
    assert set(counted.values()) == {1}
    assert planned.operations >= 5
    for position in range(1, planned.operations + 1):
        counted.clear()
        with oom_at(position) as planned:
            autobatch.map(net, batch, **options, on_result=lambda indices, _: counted.update(indices))
        assert counted == Counter(range(SAMPLES))
        with oom_at(position) as planned:
            results = list(autobatch.map(net, batch, **options))
        assert planned.raised
        assert torch.allclose(as_tensor(iter(results)), expected, atol=1e-6)


def test_several_shortages_in_a_row_are_survived():
    """Down to single samples, and up again."""
    net = make_net().eval()
    with oom_at(*range(9, 30, 3)) as planned:
        result = autobatch.map(net, INPUTS)
    assert len(planned.raised) >= 5
    assert torch.allclose(result, net(INPUTS), atol=1e-6)


def test_a_shortage_costs_one_piece(caplog):
    """What ran before is not run again, and a log line says what happened."""
    caplog.set_level("WARNING", logger="autobatch")
    device = FakeDevice(lambda n: 100 * n, total_bytes=4000)
    seen = Counter()

    def look(piece):
        seen.update(piece[:, 0].tolist())
        if len(seen) > 5 and not device.tenants:
            device.curve = lambda n: 400 * n  # other work begins to need memory
        return piece

    result = autobatch.map(look, INPUTS, device=device)
    assert torch.equal(result, INPUTS)
    assert set(seen.values()) == {1}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # 30 samples, then 15, of which 9 fit
    assert lines[0].startswith("autobatch: map ran out of memory at 30 samples, which are run again in smaller pieces")


def test_generators_are_as_if_nothing_had_failed():
    """A piece that is run again draws what it would have drawn: torch, Python and NumPy go back to its beginning."""
    draws = []

    def draw_and_run_out_once(piece):
        draws.append((torch.rand(3).tolist(), random.random(), float(np.random.rand())))
        if len(draws) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return piece

    autobatch.map(draw_and_run_out_once, INPUTS)
    assert draws[2] == draws[1]
    assert draws[1] != draws[0] != draws[3] != draws[2]


def test_nothing_of_a_failed_piece_is_held():
    """The next attempt begins without the tensors of the one that failed."""
    held, alive = [], []

    def run_out_once(piece):
        if not held:
            tensor = torch.zeros(1000)
            held.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        alive.append(held[0]() is not None)
        return piece

    autobatch.map(run_out_once, INPUTS)
    assert not any(alive)


def test_one_sample_that_does_not_fit_is_named():
    """With its index; what was done before is on the error."""

    def need(piece):
        if (piece[:, 0] == INPUTS[23, 0]).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return piece

    with pytest.raises(DoesNotFit, match="sample 23 alone does not fit") as caught:
        autobatch.map(need, INPUTS)
    assert caught.value.sample_index == 23
    assert caught.value.done == list(range(23))
    assert torch.equal(caught.value.results, INPUTS[:23])


class Unreadable(Exception):
    """The user's own."""


def refuse(row):
    """A function that raises for one sample."""

    def check(piece):
        if (piece[:, 0] == INPUTS[row, 0]).any():
            raise Unreadable("cannot be read")
        return 2 * piece

    return check


@pytest.mark.parametrize("row", [0, 1, 2, 9, 27, 39])
def test_a_bad_item_of_a_batch_is_named(row):
    """The user's own error, with the index, and with the results of all that is done."""
    with pytest.raises(Unreadable, match="cannot be read") as caught:
        autobatch.map(refuse(row), INPUTS)
    error = caught.value
    assert error.sample_index == row
    assert error.__notes__ == [f"autobatch.map: raised by sample {row}"]
    assert error.done == list(range(row))
    assert row == 0 or torch.equal(error.results, 2 * INPUTS[:row])
    assert error.__traceback__.tb_next is not None


@pytest.mark.parametrize("row", [0, 1, 2, 9, 27, 39])
def test_a_bad_item_of_a_stream_comes_after_all_results_before_it(row):
    """They are yielded, then the error is raised."""
    results, got = autobatch.map(refuse(row), iter(INPUTS)), []
    with pytest.raises(Unreadable) as caught:
        for result in results:
            got.append(result)  # noqa: PERF402 - extend would lose them
    assert len(got) == row
    assert caught.value.sample_index == row
    assert (caught.value.done, caught.value.results) == ([], [])


def test_what_lengths_brought_forward_is_not_lost_either():
    """Results that wait for their turn when the error comes are on it."""
    lengths, got = list(range(1, SAMPLES + 1)), []
    with pytest.raises(Unreadable) as caught:
        for result in autobatch.map(refuse(5), list(INPUTS), lengths=lengths):
            got.append(result)  # noqa: PERF402 - as above
    error = caught.value
    assert (error.sample_index, got) == (5, [])
    assert sorted(error.done) == list(range(6, SAMPLES))
    assert all(torch.equal(result, 2 * INPUTS[index]) for index, result in zip(error.done, error.results, strict=True))
    with pytest.raises(Unreadable) as caught:
        autobatch.map(refuse(5), INPUTS, lengths=lengths)
    assert torch.equal(caught.value.results, 2 * INPUTS[caught.value.done])
    assert sorted(caught.value.done) == list(range(6, SAMPLES))


def test_an_error_that_no_sample_raises_alone_names_the_piece():
    """It is raised all the same, with what was done."""

    def refuse_many(piece):
        if len(piece) > 4:
            raise Unreadable("too many")
        return piece

    with pytest.raises(Unreadable) as caught:
        autobatch.map(refuse_many, INPUTS)
    assert caught.value.sample_index is None
    assert "samples 2 to" in caught.value.__notes__[0]
    assert torch.equal(caught.value.results, INPUTS[caught.value.done])


def test_an_error_of_the_stream_comes_in_its_turn():
    """What was read before is run first; the sample that could not be read is named."""

    def read():
        yield from INPUTS[:11]
        raise OSError("disk")

    got = []
    with pytest.raises(OSError, match="disk") as caught:
        for result in autobatch.map(lambda piece: piece, read()):
            got.append(result)  # noqa: PERF402 - as above
    assert torch.equal(torch.stack(got), INPUTS[:11])
    assert caught.value.sample_index == 11


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(interrupt):
    """At once, with modes put back and no piece run again."""
    net, calls = nn.Dropout(0.5), []

    def stop(piece):
        calls.append(len(piece))
        net(piece)
        raise interrupt

    with pytest.raises(interrupt):
        autobatch.map(stop, INPUTS)
    assert len(calls) == 1
    assert net.training


def test_a_fatal_error_is_not_looked_for_in_single_samples():
    """After it every call on the card fails, so the first sample would be blamed."""
    calls = []

    def assert_on_device(piece):
        calls.append(len(piece))
        if len(calls) > 1:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return piece

    with pytest.raises(RuntimeError, match="device-side") as caught:
        autobatch.map(assert_on_device, INPUTS)
    assert len(calls) == 2
    assert caught.value.sample_index is None


def test_an_error_holds_no_frames_of_ours_afterwards():
    """Once it is handled nothing of the call is alive: no cycle keeps the user's tensors."""
    net = make_net()
    alive = weakref.ref(net)
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            autobatch.map(net, INPUTS[:, :3])
        del net
        assert alive() is None
    finally:
        gc.enable()


def write(piece):
    """In place."""
    return piece.mul_(2)


@pytest.mark.parametrize("batch", [INPUTS.clone, lambda: list(INPUTS.clone())], ids=["batch", "samples"])
def test_a_function_may_not_change_the_user_s_samples(batch):
    """Of a batch it gets views, so that is refused; samples are collated into new tensors, which it may change."""
    given = batch()
    if isinstance(given, list):
        assert torch.equal(torch.stack(list(autobatch.map(write, given))), 2 * INPUTS)
        assert torch.equal(torch.stack(given), INPUTS)
    else:
        with pytest.raises(InvalidStep, match="in place"):
            autobatch.map(write, given)


@pytest.mark.parametrize(
    ("fn", "shown"),
    [
        (lambda x: x.sum(), r"a Tensor of shape \(\) as the result"),
        (lambda x: x[:1], r"a Tensor of shape \(1, 4\) as the result for 2 samples"),
        (lambda x: {"a": x, "b": [1]}, r'a list of 1 as the result\["b"\]'),
        (lambda x: (x, "text"), r"a str as the result\[1\]"),
        (lambda x: 3, "an int as the result"),
    ],
)
def test_results_without_one_entry_a_sample_are_refused(fn, shown):
    """In words, at the first piece."""
    with pytest.raises(InvalidResult, match=shown):
        autobatch.map(fn, INPUTS)
    with pytest.raises(InvalidResult, match=shown):
        next(autobatch.map(fn, list(INPUTS)))


@pytest.mark.parametrize("samples", [INPUTS, list(INPUTS)], ids=["batch", "samples"])
@pytest.mark.parametrize(
    "lengths",
    [5, {0: 1}, {1, 2}, (1 for _ in INPUTS), "a" * SAMPLES, torch.tensor(3), [1] * (SAMPLES - 1), [1] * (SAMPLES + 1)],
    ids=["int", "dict", "set", "generator", "text", "number", "too few", "too many"],
)
def test_lengths_that_are_not_one_a_sample_are_refused_before_anything_is_run(lengths, samples):
    """When ``map`` is called, and not as an error of a sample."""
    with pytest.raises(InvalidArgument, match=r"^lengths=.* (must be a function|entries for 40 samples)"):
        autobatch.map(lambda piece: pytest.fail("called"), samples, lengths=lengths)


def test_a_length_of_several_numbers_is_refused():
    """In words, not as an error of the tensor."""
    with pytest.raises(InvalidArgument, match="for sample 0: a length is an int"):
        autobatch.map(torch.neg, INPUTS, lengths=torch.ones(SAMPLES, 2, dtype=torch.int))


def test_pieces_that_are_no_one_result_are_refused():
    """What generate() returns for a batch may differ in length; of samples the results stay apart."""

    def grow(piece):
        return torch.zeros(len(piece), len(piece))

    assert grow(INPUTS).shape == (SAMPLES, SAMPLES)
    with pytest.raises(InvalidResult, match=r"rows of shape \(2,\) for the pieces before it.*pass samples"):
        autobatch.map(grow, INPUTS)
    assert len(list(autobatch.map(grow, iter(INPUTS)))) == SAMPLES
    with pytest.raises(InvalidResult, match="of 2 results, and 1 for the pieces before it"):
        autobatch.map(lambda piece: (piece,) if len(piece) == 2 else (piece, +piece), INPUTS)
