"""Memory that ends, items that are bad, and interrupts: nothing is wrong, nothing is lost, nothing is counted twice."""

from __future__ import annotations

import random
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import autobatch
from autobatch import by_length
from autobatch.errors import DoesNotFit, InvalidArgument
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
    return results if isinstance(results, torch.Tensor) else torch.stack(list(results))


GIVEN = {
    "batch": (INPUTS, {}),
    "batch by length": (INPUTS, {"cut": by_length([1 + row % 5 for row in range(SAMPLES)])}),
    "samples": (list(INPUTS), {}),
    "samples by length": (list(INPUTS), {"cut": by_length(lambda row: 1 + abs(int(row.tolist()[0] * 10)))}),
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
    assert lines[0].startswith("map ran out of memory at 30 samples, which are run again in smaller pieces")


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


@pytest.mark.parametrize("most", [1, None])
def test_memory_that_is_short_for_a_moment_ends_no_map(most):
    """Another process may have taken it: each sample is run once more by itself, and results are complete."""
    short, calls = {3, 4, 20}, Counter()

    def need(piece):
        rows = {int(row) for row in piece}
        calls.update(rows)
        if len(rows) == 1 and rows & short:
            short.difference_update(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return piece

    inputs = torch.arange(30)
    assert torch.equal(autobatch.map(need, inputs, max_piece=most), inputs)
    assert set(calls) == set(range(30))
    assert most is None or (short == set() and sum(calls.values()) == 33)


class Unreadable(Exception):
    """The user's own."""


def refuse(row):
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
        for result in autobatch.map(refuse(5), list(INPUTS), cut=by_length(lengths)):
            got.append(result)  # noqa: PERF402 - as above
    error = caught.value
    assert (error.sample_index, got) == (5, [])
    assert sorted(error.done) == list(range(6, SAMPLES))
    assert all(torch.equal(result, 2 * INPUTS[index]) for index, result in zip(error.done, error.results, strict=True))
    with pytest.raises(Unreadable) as caught:
        autobatch.map(refuse(5), INPUTS, cut=by_length(lengths))
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


def test_memory_that_ends_in_the_search_hides_no_error():
    """The user's own is raised, with the piece that raised it."""

    def check(piece):
        if len(piece) > 4:
            raise Unreadable("cannot be read")
        if (piece[:, 0] == INPUTS[3, 0]).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return piece

    with pytest.raises(Unreadable) as caught:
        autobatch.map(check, INPUTS)
    assert caught.value.sample_index is None
    assert caught.value.done == [0, 1, 2]


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


def write(piece):
    return piece.mul_(2)


@pytest.mark.parametrize("batch", [INPUTS.clone, lambda: list(INPUTS.clone())], ids=["batch", "samples"])
def test_a_function_may_not_change_the_user_s_samples(batch):
    """Of a batch it gets views, so that is refused; samples are collated into new tensors, which it may change."""
    given = batch()
    if isinstance(given, list):
        assert torch.equal(torch.stack(list(autobatch.map(write, given))), 2 * INPUTS)
        assert torch.equal(torch.stack(given), INPUTS)
    else:
        with pytest.raises(InvalidArgument, match="in place"):
            autobatch.map(write, given)


ARRAYS = {
    "batch": (lambda rows: rows, {}),
    "in a dict": (lambda rows: {"x": rows, "y": [*rows]}, {}),
    "in lists by length": (
        lambda rows: {"x": autobatch.batches.Samples([*rows])},
        {"cut": by_length([*range(SAMPLES)])},
    ),
    "samples": (list, {"collate": list}),
    "samples by length": (list, {"collate": list, "cut": by_length(lambda row: 1 + abs(int(row[0] * 10)))}),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("is_short", [False, True], ids=["memory is there", "memory ends"])
def test_a_function_does_not_change_the_user_s_arrays(kind, is_short):
    """It gets copies, since arrays count no writes: a retry would find its samples written already."""
    arrange, options = ARRAYS[kind]
    rows, calls = INPUTS.numpy().copy(), []

    def scale(piece):
        calls.append(1)
        parts = piece["x"] if isinstance(piece, dict) else piece
        for row in parts:
            np.multiply(row, 2, out=row)
        if is_short and len(calls) == 1:
            raise torch.OutOfMemoryError
        return [row.copy() for row in parts]

    assert np.array_equal(np.stack(list(autobatch.map(scale, arrange(rows), **options))), 2 * INPUTS.numpy())
    assert np.array_equal(rows, INPUTS.numpy())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of tensors of such kinds
@pytest.mark.parametrize(
    ("fn", "shown"),
    [
        (lambda x: x.sum(), r"a Tensor of shape \(\) as the result"),
        (lambda x: x[:1], r"a Tensor of shape \(1, 4\) as the result for 2 samples"),
        (lambda x: {"a": x, "b": [1]}, r'a list of 1 as the result\["b"\]'),
        (lambda x: (x, "text"), r"a str as the result\[1\]"),
        (lambda x: 3, "an int as the result"),
        (lambda x: torch.nested.nested_tensor([*x[1:]]), "a nested Tensor of 1 row as the result for 2 samples"),
    ],
)
def test_results_without_one_entry_a_sample_are_refused(fn, shown):
    """In words, at the first piece."""
    with pytest.raises(InvalidArgument, match=shown):
        autobatch.map(fn, INPUTS)
    with pytest.raises(InvalidArgument, match=shown):
        next(autobatch.map(fn, list(INPUTS)))
    with pytest.raises(InvalidArgument, match=shown):
        autobatch.map(fn, INPUTS, on_result=lambda indices, result: None)


def as_nested(x):
    """Of torch's first kind of them, which has no shape."""
    return torch.nested.nested_tensor([*x])


def as_jagged(x):
    return torch.nested.nested_tensor([*x], layout=torch.jagged)


def as_quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of tensors of such kinds
@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (torch.Tensor.to_sparse, r"a torch\.sparse_coo Tensor"),
        (torch.Tensor.to_sparse_csr, r"a torch\.sparse_csr Tensor"),
        (as_nested, "a nested Tensor"),
        (as_jagged, "a nested NestedTensor"),
        (as_quantized, "a quantized Tensor"),
        (torch.Tensor.to_mkldnn, r"a torch\._mkldnn Tensor"),
    ],
)
def test_tensors_that_torch_cannot_fill_are_refused_where_results_are_put_together_alone(make, shown):
    """Of one batch, however small; given to on_result= they are whole."""
    for inputs in (INPUTS, INPUTS[:2]):
        with pytest.raises(InvalidArgument, match=shown + r" as the result\[1\], whose rows cannot be put together"):
            autobatch.map(lambda x: (x, make(x)), inputs)
    given = {}
    autobatch.map(make, INPUTS, on_result=lambda indices, result: given.update({tuple(indices): result}))
    assert [index for indices in given for index in indices] == [*range(SAMPLES)]
    assert all(type(result) is type(make(INPUTS)) for result in given.values())


def test_lengths_that_end_early_lose_no_sample():
    """``next()`` of nothing raises what also ends an iterator: it is an error of that sample."""
    texts = ["a>", "b>", "c", "d>"]

    def find(text):
        return next(position for position, letter in enumerate(text) if letter == ">")

    for options in ({}, {"on_result": lambda indices, result: None}):
        with pytest.raises(InvalidArgument, match="for sample 2") as caught:
            list(autobatch.map(list, texts, cut=by_length(find), **options))
        assert caught.value.sample_index == 2


def test_pieces_that_are_no_one_result_are_refused():
    """What generate() returns for a batch may differ in length; of samples the results stay apart."""

    def grow(piece):
        return torch.zeros(len(piece), len(piece))

    assert grow(INPUTS).shape == (SAMPLES, SAMPLES)
    with pytest.raises(InvalidArgument, match=r"rows of shape \(2,\) for the pieces before it.*pass samples"):
        autobatch.map(grow, INPUTS)
    assert len(list(autobatch.map(grow, iter(INPUTS)))) == SAMPLES
    with pytest.raises(InvalidArgument, match="of 2 results as the result, and a tuple of 1 result for the"):
        autobatch.map(lambda piece: (piece,) if len(piece) == 2 else (piece, +piece), INPUTS)


def test_the_order_of_keys_is_that_of_the_first_piece():
    """Each key's results are its own, wherever later pieces name it."""

    def detect(piece):
        found = [("scores", piece), ("boxes", {"x": 2 * piece, "y": [3 * row for row in piece.tolist()]})]
        if len(piece) != 2:
            found = [("boxes", dict(reversed(found[1][1].items()))), found[0]]
        return dict(found)

    inputs = torch.arange(float(SAMPLES))
    result = autobatch.map(detect, inputs)
    assert [*result] == ["scores", "boxes"]
    assert torch.equal(result["scores"], inputs)
    assert torch.equal(result["boxes"]["x"], 2 * inputs)
    assert result["boxes"]["y"] == (3 * inputs).tolist()


def test_weights_that_hooks_bring_in_for_each_pass_are_mapped():
    """As accelerate offloads a model: between passes its parameters are on the meta device."""
    accelerate = pytest.importorskip("accelerate")
    net = make_net().eval()
    expected = net(INPUTS).detach()
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in net.parameters())
    assert torch.allclose(autobatch.map(net, INPUTS, device="cpu"), expected)
    assert torch.allclose(autobatch.map(net.__call__, INPUTS, device="cpu"), expected)
    with pytest.raises(InvalidArgument, match=r"^device= is needed: Sequential is on the meta device, which"):
        autobatch.map(net, INPUTS)


def test_a_model_that_is_offloaded_in_part_runs_where_the_rest_is():
    """Its first layer is on the meta device, and the second says where passes run."""
    accelerate = pytest.importorskip("accelerate")
    net = make_net().eval()
    expected = net(INPUTS).detach()
    accelerate.cpu_offload(net[0], execution_device=torch.device("cpu"))
    assert torch.allclose(autobatch.map(net, INPUTS), expected)


def test_a_model_that_is_called_with_weights_from_elsewhere_is_mapped():
    """As ``functional_call`` does, whose model may stay on the meta device; also inside another module."""

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = make_net().to("meta").eval()
            self.weights = nn.ParameterList(make_net().parameters())

        def forward(self, piece):
            names = [name for name, _ in self.empty.named_parameters()]
            return torch.func.functional_call(self.empty, dict(zip(names, self.weights, strict=True)), (piece,))

    expected = make_net().eval()(INPUTS).detach()
    given = Given()
    assert torch.allclose(autobatch.map(given, INPUTS), expected)
    empty, weights = given.empty, dict(make_net().named_parameters())

    def call(piece):
        return torch.func.functional_call(empty, weights, (piece,))

    assert torch.allclose(autobatch.map(call, INPUTS, device="cpu"), expected)
