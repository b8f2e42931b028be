"""``map`` gives what the function would have given for all samples at once, in their order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import autobatch
from autobatch import by_length
from autobatch.errors import InvalidArgument
from autobatch.inference import mapping
from autobatch.testing import FakeDevice

pytestmark = pytest.mark.quick

SAMPLES = 37
INPUTS = torch.arange(SAMPLES * 3.0).reshape(SAMPLES, 3)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    sums: torch.Tensor
    names: list[str]


class Rows(Dataset):
    """A map-style dataset, which counts what was read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.read.append(index)
        return INPUTS[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(INPUTS)


def small_device(most=5):
    """A device on which so many samples fit."""
    return FakeDevice(lambda n: 100 * n, total_bytes=100 * most)


def double(batch):
    return 2 * batch


def run(fn, batch, **options):
    return autobatch.map(fn, batch, **{"device": small_device(), "headroom": 0, **options})


@pytest.mark.parametrize(
    ("fn", "of_tensor"),
    [
        (lambda x: x * 2, None),
        (lambda x: (x, x.sum(1)), None),
        (lambda x: {"a": x, "b": [x + 1, {"c": x.sum(1)}][1]}, None),
        (lambda x: Pair(x, x.sum(1) > 3), None),
        (lambda x: Record(x.sum(1), [str(float(row[0])) for row in x]), None),
        (lambda x: [float(row.sum()) for row in x], None),
        (lambda x: (x.numpy() * 2, None), None),
        (lambda x: None, None),
    ],
    ids=["tensor", "tuple", "dict", "namedtuple", "dataclass", "list", "array and None", "None"],
)
def test_a_batch_gives_what_the_function_gives_for_the_whole(fn, of_tensor):
    """In the same containers, whatever the pieces were; and by samples each sample's part of it."""
    whole, joined, single = fn(INPUTS), run(fn, INPUTS), list(run(fn, list(INPUTS)))
    assert flat(joined) == flat(whole)
    assert type(joined) is type(whole)
    assert len(single) == SAMPLES
    for row, result in enumerate(single):
        assert type(result) is (type(whole) if not isinstance(whole, list) else float)
        assert flat(result) == [entry[row] if entry is not None else None for entry in flat(whole)]


def flat(result):
    if isinstance(result, torch.Tensor | np.ndarray):
        return [result.tolist()]
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in flat(value)]
    if isinstance(result, tuple):
        return [leaf for value in result for leaf in flat(value)]
    if isinstance(result, Record):
        return [*flat(result.sums), result.names]
    return [result]


@pytest.mark.parametrize(
    "given_batch",
    [
        INPUTS,
        INPUTS.numpy(),
        {"x": INPUTS},
        (INPUTS, INPUTS.sum(1)),
        Record(INPUTS, ["name"] * SAMPLES),
        autobatch.batches.Fields([INPUTS, INPUTS]),
    ],
    ids=["tensor", "array", "dict", "tuple", "dataclass", "Fields"],
)
def test_one_batch_is_cut(given_batch):
    """Its pieces have its own containers; ``fn`` sees each sample once, in order."""
    seen = []

    def first(piece):
        assert type(piece) is type(given_batch)
        rows = next(iter(piece.values())) if isinstance(piece, dict) else piece
        rows = rows.sums if isinstance(rows, Record) else rows[0] if isinstance(rows, tuple | list) else rows
        seen.extend(torch.as_tensor(rows)[:, 0].tolist())
        return torch.as_tensor(rows)

    assert torch.equal(run(first, given_batch), INPUTS)
    assert seen == INPUTS[:, 0].tolist()


@pytest.mark.parametrize(
    "samples",
    [
        lambda: list(INPUTS),
        Rows,
        Stream,
        lambda: iter(INPUTS),
        lambda: (row for row in INPUTS),
        lambda: DataLoader(
            TensorDataset(INPUTS), batch_size=8, collate_fn=lambda rows: torch.stack([r for (r,) in rows])
        ),
    ],
    ids=["list", "Dataset", "IterableDataset", "iterator", "generator", "DataLoader"],
)
def test_samples_give_one_result_each(samples):
    """In order, one by one."""
    results = run(double, samples())
    assert iter(results) is results
    assert torch.equal(torch.stack(list(results)), 2 * INPUTS)


def test_a_loader_s_batches_are_cut_and_not_joined():
    """Inputs and labels, as a loader gives them; no piece has samples of two batches."""
    loader, device = DataLoader(TensorDataset(INPUTS, INPUTS.sum(1)), batch_size=8), small_device()
    results = list(autobatch.map(lambda piece: piece[0].sum(1) - piece[1], loader, device=device, headroom=0))
    assert [float(result) for result in results] == [0.0] * SAMPLES
    boundaries = set(itertools.accumulate(device.ran_sizes))
    assert boundaries >= {8, 16, 24, 32, SAMPLES}


def test_samples_are_collated_by_the_user_s_own_function():
    """Texts of unequal length are padded as the user pads them."""
    texts = [torch.ones(1 + number % 4) for number in range(SAMPLES)]
    pad = torch.nn.utils.rnn.pad_sequence
    results = run(lambda piece: piece.sum(1), texts, collate=lambda rows: pad(rows, batch_first=True))
    assert [float(result) for result in results] == [float(len(text)) for text in texts]


@pytest.mark.parametrize("empty", [[], iter(()), Stream, DataLoader([], batch_size=2)], ids=type)
def test_nothing_gives_nothing(empty):
    """No sample, no call."""
    if empty is Stream:
        empty = TensorDataset(INPUTS[:0])
    assert list(run(lambda piece: pytest.fail("called"), empty)) == []


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (INPUTS[:0], "a Tensor of shape (0, 3)"),
        ({"x": INPUTS[:0], "y": INPUTS[:0, 0]}, "a Tensor of shape (0, 3)"),
        (INPUTS[:0].numpy(), "a ndarray of shape (0, 3)"),
        ({}, "an empty dict"),
        ((), "an empty tuple"),
    ],
    ids=["tensor", "dict", "array", "empty dict", "empty tuple"],
)
def test_a_batch_without_samples_is_refused_by_what_was_passed(batch, named):
    """Its result has no shape that anybody knows; the function is not called."""
    with pytest.raises(InvalidArgument) as caught:
        run(lambda piece: pytest.fail("called"), batch)
    assert str(caught.value).startswith("map() got a batch without samples")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_what_is_needed_is_read():
    """The first result is there when its piece has run, and a dataset is read no further."""
    rows = Rows()
    results = run(double, rows)
    assert rows.read == []
    assert torch.equal(next(results), 2 * INPUTS[0])
    assert rows.read == [0, 1]
    assert torch.equal(next(results), 2 * INPUTS[1])
    assert rows.read == [0, 1]
    next(results)
    assert len(rows.read) <= 2 + 5
    assert len(list(results)) == SAMPLES - 3
    assert rows.read == list(range(SAMPLES))


def test_an_endless_stream_can_be_mapped():
    """Results come as long as they are asked for."""
    results = run(double, (torch.tensor([float(number)]) for number in itertools.count()))
    assert [float(result) for result in itertools.islice(results, 100)] == [2.0 * number for number in range(100)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=700), st.booleans())
def test_lengths_leave_the_order_of_results(numbers, by_function):
    """Each piece begins with its longest sample, in windows of a stream; results are in the order of samples."""
    heads = []

    def longest(piece):
        assert max(*piece, 1) == max(piece[0], 1)  # an empty text takes what a word takes
        heads.append(piece)
        return [number + 1 for number in piece]

    lengths = (lambda number: number) if by_function else numbers
    results = run(longest, iter(numbers), cut=by_length(lengths), collate=list)
    assert list(results) == [number + 1 for number in numbers]
    assert sum(map(len, heads)) == len(numbers)


@pytest.mark.parametrize(
    "lengths", [lambda batch: batch[:, 0].int(), [int(row[0]) for row in INPUTS], INPUTS[:, 0].int().numpy()]
)
def test_a_batch_is_sorted_by_length_too(lengths):
    """The longest samples run first, and the result has the batch's own order."""
    seen = []
    result = run(
        lambda piece: (seen.extend(piece[:, 0].tolist()), (piece, [1] * len(piece)))[1],
        INPUTS,
        cut=by_length(lengths),
    )
    assert torch.equal(result[0], INPUTS)
    assert seen == sorted(seen, reverse=True)


def test_short_samples_run_in_larger_pieces():
    """A real budget: where padding is trimmed, many short texts run at once and few long ones."""
    texts = [torch.ones(length, dtype=torch.long) for length in [2000] * 20 + [50] * 2000]
    net, sizes = nn.Embedding(3, 64), {2000: [], 50: []}

    def embed(piece):
        sizes[piece.shape[1]].append(len(piece))
        return net(piece).mean(1)

    pad = torch.nn.utils.rnn.pad_sequence
    results = autobatch.map(
        embed, texts, cut=by_length(len), collate=lambda rows: pad(rows, batch_first=True), budget="8MiB"
    )
    assert len(list(results)) == len(texts)
    assert max(sizes[2000]) <= 16
    assert max(sizes[50]) > 200


def call(model, inputs):
    return model(inputs)


def call_in_train_mode(model, inputs):
    model.train()
    return model(inputs)


class Moody(nn.Module):
    """A layer in train mode inside a model in eval mode, and the reverse."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm, self.calls = nn.Dropout(0.5), nn.BatchNorm1d(3).eval(), []

    def forward(self, x):
        self.calls.append((self.training, self.drop.training, self.norm.training))
        return self.norm(self.drop(x))


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: model.forward, lambda model: partial(call, model)])
def test_modules_are_in_eval_mode_meanwhile(wrap):
    """Given as ``fn``, by a method, or reached by a function: dropout is off, and all modes are put back."""
    model = Moody()
    model(INPUTS)
    before = model.calls.pop()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.allclose(run(wrap(model), INPUTS), INPUTS, rtol=1e-4)
    assert set(model.calls) == {(False, False, False)}
    assert (model.training, model.drop.training, model.norm.training) == before == (True, True, False)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Holder:
    """Something of the user's, which holds a model beside much else."""

    shared: nn.Module
    __slots__ = ("__dict__", "slot")

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)

    def in_dict(self, piece):
        return self.models["net"](piece)

    def in_slot(self, piece):
        return self.slot(piece)

    def of_class(self, piece):
        return self.shared(piece)

    def in_part(self, piece):
        return self.part.models["net"](piece)


MUCH = {
    "texts": lambda: [f"document {number}" for number in range(30_000)],
    "numbers": lambda: {number: float(number) for number in range(30_000)},
    "rows": lambda: [{"text": str(number), "tokens": [number]} for number in range(9000)],
    "mixed": lambda: [str(number) if number % 2 else (number, None) for number in range(30_000)],
    "objects": lambda: [object() for _ in range(5000)],
    "tensors": lambda: [*torch.zeros(30_000)],
}


@pytest.mark.parametrize("much", MUCH)
def test_a_model_is_found_beside_much_else(much, caplog):
    """The documents of a search do not use up what is looked at, wherever they are held."""
    for build in (
        lambda net, held: Holder(documents=held, models={"net": net}).in_dict,
        lambda net, held: partial(lambda held, models, piece: models[0](piece), held, [net]),
        lambda net, held: Holder(documents=held, part=Holder(documents=held, models={"net": net})).in_part,
    ):
        model = Moody()
        autobatch.map(build(model, MUCH[much]()), INPUTS)
        assert set(model.calls) == {(False, False, False)}
    assert "objects" not in caplog.text


def test_modes_are_the_user_s_between_results():
    """Whoever trains between two results meets the model in train mode."""
    model = Moody()
    for _ in run(model, list(INPUTS)):
        assert model.training
        assert model.drop.training
        assert torch.is_grad_enabled()


def test_a_function_may_choose_train_mode_itself():
    """Monte Carlo dropout: the function's own call holds."""
    drop = nn.Dropout(0.5).eval()
    result = run(partial(call_in_train_mode, drop), INPUTS + 1)
    assert (result == 0).any()
    assert not drop.training


def test_results_carry_no_graph_and_can_be_trained_on():
    """They are ordinary tensors, not those of inference mode; what a model remembers of its forward pass too."""
    model = nn.Linear(3, 2)
    joined, rows = run(model, INPUTS), torch.stack(list(run(model, list(INPUTS))))
    for features in (joined, rows):
        assert not features.requires_grad
        (features * torch.ones(2, requires_grad=True)).sum().backward()
    assert model.weight.grad is None


def test_a_module_takes_a_mapping_as_keywords():
    """As models of Hugging Face do."""

    class Named(nn.Module):
        def forward(self, x, mask):
            return x * mask

    assert torch.equal(run(Named(), {"x": INPUTS, "mask": INPUTS > 3}), INPUTS * (INPUTS > 3))


@pytest.mark.parametrize("batch", [INPUTS, list(INPUTS)], ids=["batch", "samples"])
def test_a_callback_gets_each_result_once(batch):
    """With the indices of its samples, and nothing is returned."""
    got = {}
    assert run(double, batch, on_result=lambda indices, result: got.update(zip(indices, result, strict=True))) is None
    assert torch.equal(torch.stack([got[index] for index in range(SAMPLES)]), 2 * INPUTS)


def test_no_piece_is_larger_than_the_user_allows():
    """``max_piece`` is for what memory does not see, such as a kernel's limit."""
    sizes = []
    autobatch.map(lambda x: sizes.append(len(x)), INPUTS, max_piece=3)
    assert max(sizes) == 3
    assert sum(sizes) == SAMPLES


def test_the_log_says_what_was_done(caplog):
    """One line at the end: pieces, sizes, shortages, peak."""
    caplog.set_level("INFO", logger="autobatch")
    run(double, INPUTS)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("map: 37 samples in 8 pieces of 2 to 5 on fake device; peak 500 bytes of 500 bytes")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(is_terminal, monkeypatch, capsys):
    """At most one line a second."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    clock = itertools.count(step=0.3)
    monkeypatch.setattr("autobatch.inference.mapping.time.monotonic", lambda: next(clock))
    run(double, INPUTS)
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) == is_terminal
    assert len(lines) < 9
    run(double, INPUTS, progress=False)
    assert capsys.readouterr().err == ""


def test_texts_are_samples():
    """A list of texts goes to the function as a list of texts."""
    texts = [f"text {number}" for number in range(SAMPLES)]
    assert list(run(lambda piece: [text.upper() for text in piece], texts)) == [text.upper() for text in texts]


def test_results_go_where_they_are_asked_to(monkeypatch):
    """``to=`` takes a device; what is no tensor stays."""
    monkeypatch.setattr(mapping, "_read_target", torch.device)  # "meta" is refused, and no other device is everywhere
    result = run(lambda x: (x, ["a"] * len(x)), INPUTS, to="meta")
    assert result[0].device.type == "meta"
    assert result[1] == ["a"] * SAMPLES


@pytest.mark.parametrize("samples", [1, 6])
def test_results_stay_when_the_function_fills_its_own_dict_again(samples):
    """One piece or several: what ``map`` has returned is the user's, and no later call changes it."""
    own = {}

    def fill(piece):
        own["doubled"] = piece * 2
        return own

    first = run(fill, torch.ones(samples, 2))
    run(fill, torch.zeros(samples, 2))
    assert torch.equal(first["doubled"], torch.full((samples, 2), 2.0))
