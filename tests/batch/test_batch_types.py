"""Batches of types that users register and lists that they mark, through ``fit``, ``Runner`` and ``verify``.

The oracle is the gradient of the whole batch in float64.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import autobatch
from autobatch.batch import registry
from autobatch.batch.samples import describe, is_empty
from autobatch.batch.tree import map_tensors, tensors_of
from autobatch.batches import Fields, register
from autobatch.errors import InvalidArgument
from autobatch.testing import FakeDevice

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch_geometric scripts a class on import, which torch 2.13 deprecates
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader as GraphLoader


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test registers is not registered in the next."""
    monkeypatch.setattr(registry, "_registered", {})


class Ragged:
    """Sequences of unequal length, end to end in one tensor."""

    def __init__(self, values: torch.Tensor, lengths: Sequence[int], names: Any = None) -> None:
        self.values, self.lengths, self.names = values, list(lengths), names

    def __len__(self) -> int:
        return len(self.lengths)

    def pick(self, indices: Sequence[int]) -> Ragged:
        parts = self.values.split(self.lengths)
        return type(self)(torch.cat([parts[i] for i in indices]), [self.lengths[i] for i in indices], self.names)


class Longer(Ragged):
    """A subclass."""


def make_ragged(*lengths: int, kind: type[Ragged] = Ragged) -> Ragged:
    """Sequences with these lengths, their values counted up."""
    return kind(torch.arange(sum(lengths), dtype=torch.float64), lengths)


def register_ragged(**changes: Any) -> None:
    """As a user would, but for the changes."""
    register(Ragged, **{"count": len, "take": Ragged.pick, **changes})


Oracle = Callable[[nn.Module, Any], torch.Tensor]


def whole_gradient(model: nn.Module, step: Oracle, batch: Any) -> list[torch.Tensor]:
    """The gradient of the whole batch at once, on a copy of the model."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    step(alone, copy.deepcopy(batch)).backward()
    return [parameter.grad for parameter in alone.parameters()]


def assert_exact(
    model: nn.Module, step: Oracle, batch: Any, target: int, *, largest: int = 2, example: Any = None
) -> Any:
    """A plan's pieces give the whole gradient, in the pieces asked for; returns the plan."""
    expected = whole_gradient(model, step, batch)
    model.zero_grad()
    example = batch if example is None else example
    plan = autobatch.fit(model, target, batch=example, step=step, max_micro_batch=largest, reuse=False)
    result = autobatch.Runner(plan, model, step, None).accumulate(batch)
    assert sum(result.micro_batch_sizes) == target
    assert max(result.micro_batch_sizes) <= largest
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    return plan


# ------------------------------------------------------------------------------------------------- marked lists


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


@dataclass
class Tagged:
    x: torch.Tensor
    y: torch.Tensor


def sequence(seed: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[length, 4]`` and a label for each."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (length,), generator=generator)


SAMPLES: dict[str, Callable[..., Any]] = {
    "dicts": lambda x, y: {"x": x, "y": y},
    "tuples": lambda x, y: (x, y),
    "dataclasses": Tagged,
    "dicts in dicts": lambda x, y: {"in": {"x": x}, "y": (y,)},
}


def parts_of(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = tensors_of(sample)
    return inputs, labels


def step_over_samples(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over samples of what depends on each sequence as a whole, not on the mean over its tokens."""
    losses = []
    for inputs, labels in map(parts_of, batch):
        losses.append(F.cross_entropy(model(inputs).logsumexp(0, keepdim=True), labels[:1]))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_list_of_samples_is_cut_between_them(kind: str, count: int) -> None:
    """However few they are and however equal their lengths: the batch is cut, not the sequences."""
    batch = [SAMPLES[kind](*sequence(seed)) for seed in range(count)]
    plan = assert_exact(Tagger(), step_over_samples, batch, count, largest=1)
    assert plan.batch_lists["batch"] == "samples"


@pytest.mark.parametrize("batch", [[torch.ones(6, 4)] * 2, [[sequence(0)[0]] * 2] * 2, [{"x": torch.ones(6, 4)}]])
def test_what_is_unclear_is_asked_everywhere(batch: Any) -> None:
    """``fit``, ``verify`` and ``Runner`` say what to pass."""
    plan = autobatch.fit(Tagger(), 2, batch=torch.ones(2, 4, dtype=torch.float64), reuse=False)
    for call in (
        lambda: autobatch.fit(Tagger(), 2, batch=batch, step=step_over_samples),
        lambda: autobatch.verify(Tagger(), batch, step_over_samples),
        lambda: autobatch.Runner(plan, Tagger(), step_over_samples, None).accumulate(batch),
    ):
        with pytest.raises(InvalidArgument, match=r"pass autobatch\.batches\.Samples\(batch\)"):
            call()


def reconstruct(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.mse_loss(model.layer.weight.T @ model(inputs).T, targets.T)


def test_an_autoencoders_list_is_fields_when_marked() -> None:
    """And the plan holds that, so that a plain list of the same kind is read alike."""
    inputs, _ = sequence(0, 8)
    plan = assert_exact(Tagger(), reconstruct, [inputs, inputs + 1], 8, example=Fields([inputs, inputs + 1]))
    assert plan.batch_lists["batch"] == "fields"


def test_an_autoencoders_tuple_is_fields() -> None:
    """A tuple of tensors of one length is inputs and targets; a loader's list of the same is then read alike."""
    inputs, _ = sequence(0, 8)
    assert_exact(Tagger(), reconstruct, [inputs, inputs + 1], 8, example=(inputs, inputs + 1))


@pytest.mark.parametrize("target", [1, 2, 3, 8])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_loader_knows_what_its_lists_hold(target: int, columns: int) -> None:
    """Columns of one shape are fields, whatever the number of samples that is tried."""
    values = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(*[values + column for column in range(columns)]), batch_size=target)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        assert len(batch) == columns
        return sum(model(column).square().sum(1) for column in batch).mean()

    batch = next(iter(loader))
    plan = assert_exact(Tagger(), step, batch, target, example=loader)
    assert plan.batch_lists["batch"] == "fields"


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("target", [1, 2, 3, 6])
def test_a_loader_that_does_not_collate_gives_samples(target: int) -> None:
    """Bare tensors of one shape in a list: only the loader knows."""
    values = torch.randn(8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    class Bare(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(values)

        def __getitem__(self, index: int) -> torch.Tensor:
            return values[index]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.stack([model(sample).logsumexp((0, 1)) for sample in batch]).mean()

    loader = DataLoader(Bare(), batch_size=target, collate_fn=as_list)
    plan = assert_exact(Tagger(), step, next(iter(loader)), target, example=loader)
    assert plan.batch_lists["batch"] == "samples"


@pytest.mark.parametrize("target", [1, 2, 4, 8])
def test_a_collate_function_that_makes_more_samples_is_believed(target: int) -> None:
    """Two crops of each sample: what the loader knows is not the batch's number, and is left out."""
    data = TensorDataset(torch.zeros(4, 4, dtype=torch.float64))
    loader = DataLoader(data, batch_size=2, collate_fn=lambda samples: [torch.stack([s for (s,) in samples] * 2)])
    plan = autobatch.fit(Tagger(), target, batch=loader, step=lambda m, b: m(b[0]).square().sum(1).mean(), reuse=False)
    assert plan.batch_lists == {"batch": "fields"}


def test_where_a_loader_does_not_know_it_is_asked() -> None:
    """Two crops of each sample in two lists of one shape: a number that is not the batch's decides nothing."""
    data = TensorDataset(torch.zeros(4, 4, dtype=torch.float64))

    def crop(samples: Any) -> Any:
        rows = torch.stack([sample for (sample,) in samples] * 2)
        return [rows, rows]

    with pytest.raises(InvalidArgument, match=r"autobatch\.batches\.Fields\(batch\)"):
        autobatch.fit(Tagger(), 2, batch=DataLoader(data, batch_size=2, collate_fn=crop), step=reconstruct, reuse=False)


# ------------------------------------------------------------------------------------------ gradients of inputs


def penalise(model: nn.Module, batch: Any) -> torch.Tensor:
    """A penalty on the gradient by the inputs, which the batch brings as leaves that require one."""
    inputs = batch["x"]
    assert inputs.is_leaf
    assert inputs.requires_grad
    outputs = model(inputs).logsumexp(1)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return outputs.mean() + slope.square().sum(1).mean()


@pytest.mark.parametrize("earlier", [None, 3.0])
def test_inputs_may_require_a_gradient(earlier: float | None) -> None:
    """Trials, checks and steps take them, and leave ``.grad`` and ``requires_grad`` of the batch as they were."""
    leaf = sequence(0, 8)[0].requires_grad_()
    leaf.grad = None if earlier is None else torch.full_like(leaf, earlier)
    batch = {"x": leaf, "scale": torch.ones(8)}
    model = Tagger()
    assert_exact(model, penalise, batch, 8)
    assert autobatch.verify(model, batch, penalise).exact
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = autobatch.fit(model, 8, batch=batch, step=penalise, optimizer=optimizer, max_micro_batch=3, reuse=False)
    autobatch.Runner(plan, model, penalise, optimizer).step(batch)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert not batch["scale"].requires_grad
    assert (leaf.grad is None) if earlier is None else torch.equal(leaf.grad, torch.full_like(leaf, earlier))


@pytest.mark.predicts
def test_inputs_that_require_a_gradient_are_predicted() -> None:
    """A prediction runs the same step without values."""
    batch = {"x": sequence(0, 4)[0].requires_grad_()}
    found = autobatch.predict(Tagger(), batch, penalise, gpu="L4", target_batch=8)
    assert found.plan is not None
    assert batch["x"].grad is None


# --------------------------------------------------------------------------------------------- registered types


def score(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over sequences of something nonlinear in each."""
    parts = batch.values.split(batch.lengths)
    return torch.stack([model(part.repeat(4, 1).T / 9).logsumexp((0, 1)) for part in parts]).mean()


@pytest.mark.parametrize("kind", [Ragged, Longer])
def test_a_registered_batch_is_fitted_run_and_verified(kind: type[Ragged]) -> None:
    """The gradient of a step in pieces is that of the whole batch."""
    register_ragged()
    batch = make_ragged(3, 1, 4, 1, 5, kind=kind)
    model = Tagger()
    assert_exact(model, score, batch, 5)
    assert_exact(model, score, batch, 5, example=make_ragged(2, kind=kind))
    assert autobatch.verify(model, batch, score).exact
    assert type(describe(batch).take(range(1, 3))) is kind


def test_a_registered_batch_is_retried() -> None:
    """After memory ended its pieces are smaller, and the gradient is the same."""
    register_ragged()
    batch, model = make_ragged(3, 1, 4, 1, 5, 9), Tagger()
    expected = whole_gradient(model, score, batch)
    device = FakeDevice(lambda n: 10 * n, total_bytes=100)
    plan = autobatch.fit(model, 6, batch=batch, step=score, device=device)
    device.curve = lambda n: 40 * n
    result = autobatch.Runner(plan, model, score, None, device=device).accumulate(batch)
    assert result.retries >= 1
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


def test_the_largest_of_a_dataset_of_registered_batches_is_found() -> None:
    """By the tensors in them, after the loader's own collate function."""
    register_ragged()

    class Sequences(Dataset[Ragged]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Ragged:
            return make_ragged(index + 1)

    def join(samples: list[Ragged]) -> Ragged:
        return Ragged(torch.cat([s.values for s in samples]), [n for s in samples for n in s.lengths])

    seen: list[int] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.extend(batch.lengths)
        return score(model, batch)

    autobatch.fit(Tagger(), 3, batch=DataLoader(Sequences(), batch_size=3, collate_fn=join), step=step, reuse=False)
    assert {*seen} == {1, 7, 8, 9}  # and the smallest


def test_the_nearest_class_counts() -> None:
    """A subclass may be registered itself; classes above it are not asked then."""
    register_ragged()
    register(Longer, count=lambda batch: 1, take=lambda batch, indices: batch)
    assert describe(make_ragged(1, 2)).count == 2
    assert describe(make_ragged(1, 2, kind=Longer)).count == 1


def test_a_registered_batch_of_no_samples_is_empty() -> None:
    """As its own count says, whatever tensors are in it."""
    register_ragged(count=lambda batch: 0)
    assert is_empty(make_ragged(1, 2))


def test_a_registered_container_is_no_list_or_dict_any_more() -> None:
    """Also where the class is a mapping, a dataclass or a list: its own functions are asked."""

    class Bag(UserDict[str, Any]):
        pass

    class Column(list[Any]):
        pass

    register(Bag, count=lambda bag: len(bag["rows"]), take=lambda bag, at: Bag(rows=[bag["rows"][i] for i in at]))
    register(Column, count=len, take=lambda column, at: Column(column[i] for i in at))
    register(Tagged, count=lambda pair: pair.x.shape[1], take=lambda pair, at: Tagged(pair.x[:, at], pair.y))
    assert describe(Bag(rows=[1, 2, 3])).take(range(2)) == Bag(rows=[1, 2])
    assert describe({"c": Column([1, 2]), "x": torch.zeros(2)}).take(range(1, 2))["c"] == Column([2])
    assert describe(Tagged(torch.zeros(5, 7), torch.zeros(5))).take(range(4)).x.shape == (5, 4)


def test_two_registered_batches_in_a_list_are_asked() -> None:
    """As two tensors of one shape are; in a tuple they are fields."""
    register_ragged()
    with pytest.raises(InvalidArgument, match="alike entries"):
        describe([make_ragged(1, 2), make_ragged(2, 1)])
    assert describe((make_ragged(1, 2), make_ragged(2, 1))).count == 2


class Broken(Exception):
    """An error of the user's own."""


def fail(*_: Any) -> Any:
    raise Broken


def map_in_place(batch: Ragged, function: Callable[[torch.Tensor], torch.Tensor]) -> Ragged:
    """What torch_geometric's ``Data.apply`` does."""
    batch.values = function(batch.values)
    return batch


@pytest.mark.parametrize("wrong", ["count", "take", "map"])
def test_errors_of_a_users_function_come_out_as_they_are(wrong: str) -> None:
    """Whichever it is."""
    register_ragged(**{wrong: fail})
    with pytest.raises(Broken):
        autobatch.fit(Tagger(), 4, batch=make_ragged(1, 2), step=score, reuse=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": lambda batch: "two"}, "count= of Ragged returned 'two': it must return the number of samples"),
        ({"count": lambda batch: 2.0}, "count= of Ragged returned 2.0"),
        ({"count": lambda batch: -1}, "count= of Ragged returned -1"),
        ({"count": lambda batch: True}, "count= of Ragged returned True"),
        ({"count": lambda batch: 0}, "batch has 0 samples"),
        ({"count": lambda batch: 1}, "take= of Ragged was given 4 indices and returned 1 samples"),
        ({"take": lambda batch, at: batch}, "take= of Ragged was given 4 indices and returned 2 samples"),
        ({"take": lambda batch, at: [batch]}, "take= of Ragged returned a list: it must return a Ragged"),
        ({"take": lambda batch, at: None}, "take= of Ragged returned a NoneType"),
        ({"map": map_in_place}, "map= of Ragged changed the batch in place: it must return a new one"),
    ],
)
def test_functions_that_do_not_keep_to_it_are_named(changes: dict[str, Any], message: str) -> None:
    """A count that lies, a part of another type or size, a batch changed in place: one line says which function."""
    register_ragged(**changes)
    with pytest.raises(InvalidArgument) as caught:
        autobatch.fit(Tagger(), 4, batch=make_ragged(1, 2), step=score, max_micro_batch=4, reuse=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_copied_needs_a_map() -> None:
    """The error names the argument; with it all goes well."""
    batch = Ragged(torch.arange(3.0, dtype=torch.float64), [1, 2], threading.Lock())
    register_ragged()
    with pytest.raises(InvalidArgument, match=r"a Ragged cannot be copied .*: pass map=\(batch, function\) -> batch"):
        map_tensors(batch, torch.neg)
    register_ragged(map=lambda ragged, function: Ragged(function(ragged.values), ragged.lengths, ragged.names))
    assert_exact(Tagger(), score, make_ragged(1, 2), 2)
    assert map_tensors(batch, torch.neg).names is batch.names


@pytest.mark.parametrize("kind", [dict, list, tuple, str, object, torch.Tensor, "Ragged", Ragged(torch.zeros(1), [1])])
def test_only_classes_of_ones_own_are_registered(kind: Any) -> None:
    """What every batch is made of is refused, and so is what is no class."""
    with pytest.raises(InvalidArgument, match=r"register\(\) takes a class of your own"):
        register(kind, count=len, take=Ragged.pick)


# ------------------------------------------------------------------------------------------------------- graphs


class GraphNet(nn.Module):
    """One round of messages, and a sum over each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(3, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, graphs: Any) -> torch.Tensor:
        hidden = self.message(graphs.x).tanh()
        source, sink = graphs.edge_index
        hidden = hidden.index_add(0, sink, hidden[source])
        pooled = hidden.new_zeros(graphs.num_graphs, 5).index_add(0, graphs.batch, hidden)
        return self.head(pooled.tanh()).squeeze(1)


def graph_step(model: nn.Module, graphs: Any) -> torch.Tensor:
    """A regression of one number for each graph."""
    return F.mse_loss(model(graphs), graphs.y)


def make_graphs(*nodes: int) -> list[Data]:
    generator = torch.Generator().manual_seed(len(nodes))
    made = []
    for count in nodes:
        ring = torch.stack([torch.arange(count), (torch.arange(count) + 1) % count])
        x = torch.randn(count, 3, dtype=torch.float64, generator=generator)
        made.append(Data(x=x, edge_index=ring, y=x.sum().reshape(1)))
    return made


def take_graphs(batch: Any, indices: list[int]) -> Any:
    return Batch.from_data_list(batch.index_select(indices))


@pytest.fixture
def graphs_registered(nothing_registered: None) -> None:
    register(Batch, count=lambda batch: batch.num_graphs, take=take_graphs)


@pytest.mark.usefixtures("graphs_registered")
@pytest.mark.parametrize("largest", [1, 2, 4])
def test_graphs_give_the_gradient_of_the_whole_batch(largest: int) -> None:
    """Graphs of unequal size from torch_geometric, in any pieces."""
    batch = Batch.from_data_list(make_graphs(3, 5, 2, 7, 4, 6))
    before = batch.clone()
    model = GraphNet()
    assert_exact(model, graph_step, batch, 6, largest=largest)
    assert autobatch.verify(model, batch, graph_step).exact
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors_of(batch), tensors_of(before), strict=True))


@pytest.mark.predicts
@pytest.mark.usefixtures("graphs_registered")
def test_graphs_are_predicted() -> None:
    """The step is traced on graphs without memory, which ``take`` has made of real ones before."""
    batch = Batch.from_data_list(make_graphs(3, 5, 2, 7))
    found = autobatch.predict(GraphNet(), batch, graph_step, gpu="L4", target_batch=64)
    assert found.plan is not None
    assert found.plan.target_batch == 64


@pytest.mark.parametrize("beside", [lambda graphs: {"g": graphs, "y": graphs.y}, lambda graphs: [graphs, graphs.y]])
def test_graphs_beside_tensors_are_not_passed_whole(beside: Callable[[Any], Any]) -> None:
    """Unregistered, they would stand undivided beside divided labels."""
    batch = beside(Batch.from_data_list(make_graphs(3, 5, 2, 7)))
    with pytest.raises(InvalidArgument, match=r"is a DataBatch, no container .* a tensor in it has 4 rows"):
        describe(batch)


def test_what_all_samples_share_may_hold_tensors() -> None:
    """An object of unknown type is shared as before, unless a tensor in it has a row for each sample."""
    batch = {"x": torch.zeros(4, 2), "graph": make_graphs(6)[0], "settings": SimpleNamespace(weights=torch.ones(3))}
    part = describe(batch).take(range(2))
    assert part["graph"] is batch["graph"]
    assert part["settings"] is batch["settings"]
    with pytest.raises(InvalidArgument, match=r'batch\["settings"\] is a SimpleNamespace'):
        describe({"x": torch.zeros(3, 2), "settings": batch["settings"]})


@pytest.mark.usefixtures("graphs_registered")
def test_graphs_come_from_their_loader() -> None:
    """torch_geometric's DataLoader is a source: its largest graphs are tried, and its batches are steps."""
    loader = GraphLoader(make_graphs(*range(2, 14)), batch_size=6)
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters())
    nodes: list[int] = []

    def step(model: nn.Module, graphs: Any) -> torch.Tensor:
        nodes.append(graphs.num_nodes / graphs.num_graphs)
        return graph_step(model, graphs)

    plan = autobatch.fit(model, 6, batch=loader, step=step, optimizer=optimizer, max_micro_batch=4, reuse=False)
    assert max(nodes) >= 11.5  # 13, 12, 11 and 10 nodes
    runner = autobatch.Runner(plan, model, graph_step, optimizer)
    assert [runner.step(batch).micro_batch_sizes for batch in loader] == [(3, 3), (3, 3)]


# ----------------------------------------------------------------------------------------------- nested tensors


def make_nested(*lengths: int) -> torch.Tensor:
    """A jagged nested tensor of sequences with four features."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randn(length, 4, dtype=torch.float64, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def take_nested(batch: torch.Tensor, indices: list[int]) -> torch.Tensor:
    rows = batch.unbind()
    return torch.nested.as_nested_tensor([rows[index] for index in indices], layout=torch.jagged)


def nested_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.stack([row.logsumexp((0, 1)) for row in model(batch).unbind()]).mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_give_the_gradient_of_the_whole_batch() -> None:
    """Jagged tensors of torch itself, whose rows are of unequal length."""
    register(type(make_nested(1)), count=lambda batch: batch.size(0), take=take_nested)
    batch, model = make_nested(3, 1, 4, 1, 5), Tagger()
    alone = copy.deepcopy(model)
    nested_step(alone, batch).backward()
    plan = autobatch.fit(model, 5, batch=batch, step=nested_step, max_micro_batch=2, check="raise", reuse=False)
    assert autobatch.Runner(plan, model, nested_step, None).accumulate(batch).micro_batch_sizes == (2, 2, 1)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert autobatch.verify(model, batch, nested_step).exact
