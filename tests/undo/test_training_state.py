"""Whatever a training step does to a model and its optimizer, afterwards there is no trace of it."""

from __future__ import annotations

import gc
import random
import tempfile
import weakref
from collections import OrderedDict, deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from workloads import Everything, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.undo.training_state import TrainingState

CPU = torch.device("cpu")
IN_MEMORY = 2**40


def remember(model, optimizer=None, host_bytes=IN_MEMORY):
    """Everything of both, on the CPU."""
    return TrainingState(model, optimizer, CPU, host_bytes=host_bytes)


def train(model, optimizer, steps=1):
    """Whole training steps, each on its own batch."""
    for step in range(steps):
        optimizer.zero_grad()
        mean_step(model, make_batch(6, seed=step)).backward()
        optimizer.step()


class Wrapped:
    """An optimizer in another, as libraries for mixed precision and for several processes have them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.steps += 1
        self.optimizer.step()


class ByHand(torch.optim.Optimizer):
    """Plain descent that gives each parameter new memory, as hand-written optimizers often do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["last"] = parameter.grad
                parameter.data = parameter.data - 0.1 * parameter.grad


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW without foreach": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW fused, amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "AdamW with a tensor as rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "wrapped AdamW": lambda p: Wrapped(torch.optim.AdamW(p)),
    "twice wrapped AdamW": lambda p: Wrapped(Wrapped(torch.optim.AdamW(p))),
    "by hand": ByHand,
}


def attributes_of(thing):
    """An optimizer's own attributes, those of the one inside too, without what ``bits_of`` compares."""
    own = {k: v for k, v in vars(thing).items() if k not in ("state", "param_groups", "optimizer")}
    return own | ({"inner": attributes_of(thing.optimizer)} if hasattr(thing, "optimizer") else {})


@pytest.mark.parametrize("host_bytes", [IN_MEMORY, 0], ids=["in memory", "in a file"])
@pytest.mark.parametrize("earlier_steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_steps_leave_no_trace(name, earlier_steps, host_bytes):
    """Bit for bit, with rewinds between: weights, buffers, gradients, step counters, generators, attributes."""
    model = Everything()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, earlier_steps)
    before, attributes = bits_of(model, optimizer), attributes_of(optimizer)
    with remember(model, optimizer, host_bytes) as state:
        for _ in range(2):
            state.rewind()
            train(model, optimizer, 2)
            assert differences(bits_of(model, optimizer), before)
    assert not differences(bits_of(model, optimizer), before)
    assert attributes_of(optimizer) == attributes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_been(name):
    """The steps after it are bitwise those of a run without it: bias correction, momentum, dropout masks."""
    outcomes = []
    for is_interrupted in (False, True):
        torch.manual_seed(5)
        model = Everything()
        optimizer = OPTIMIZERS[name](model.parameters())
        if is_interrupted:
            with remember(model, optimizer) as state:
                state.rewind()
                train(model, optimizer, 2)
        train(model, optimizer, 3)
        outcomes.append({k: v for k, v in bits_of(model, optimizer).items() if not k.startswith("gradient object")})
    assert not differences(*outcomes)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_restores_and_comes_out(error):
    """Whatever ends the block, also Ctrl-C in the middle of a step."""
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    before = bits_of(model, optimizer)

    def stop(gradient):
        raise error("in backward")

    with pytest.raises(error, match="in backward"), remember(model, optimizer) as state:
        state.rewind()
        model.head.weight.register_hook(stop)
        train(model, optimizer)
    assert not differences(bits_of(model, optimizer), before)


def test_a_scheduler_keeps_its_hold_on_the_optimizer():
    """It wraps ``optimizer.step`` in the instance and writes rates into the groups: both are as before."""
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(model, optimizer)
    scheduler.step()
    before, step, attributes = bits_of(model, optimizer), optimizer.step, dict(vars(optimizer))
    with remember(model, optimizer):
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.step = None
    assert not differences(bits_of(model, optimizer), before)
    assert optimizer.step == step
    assert vars(optimizer) == attributes
    train(model, optimizer)
    scheduler.step()  # warns, which is an error here, where it thinks that no step was taken before it
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_scheduler_that_is_made_in_the_block_is_gone():
    """Its wrapper around ``step`` and its entries in the groups go with it."""
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, attributes = bits_of(model, optimizer), set(vars(optimizer))
    with remember(model, optimizer):
        torch.optim.lr_scheduler.LinearLR(optimizer)
    assert not differences(bits_of(model, optimizer), before)
    assert set(vars(optimizer)) == attributes


def add_group(model, optimizer):
    """As gradual unfreezing does."""
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 1.0})


def replace_state(model, optimizer):
    """As loading a state does."""
    optimizer.load_state_dict(optimizer.state_dict())


def cast_to_half(model, optimizer):
    """``half()`` gives every parameter another dtype and other memory, through ``.data``."""
    model.half()


def toggle_requires_grad(model, optimizer):
    """As freezing and the two players of an adversarial game do."""
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def replace_things(model, optimizer):
    """Parameters, buffers, submodules and plain attributes become other objects."""
    model.head.weight = nn.Parameter(torch.ones(4, 8))
    model.seen = torch.ones(5)
    model.head = nn.Identity()
    del model.tied
    model.calls = 10**6


def add_things(model, optimizer):
    """Lazily made parts: a buffer, a parameter, a submodule, a cached tensor."""
    model.register_buffer("mask", torch.ones(3))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model.adapter = nn.Linear(2, 2)
    model.cache = {"keys": [torch.ones(3)]}


def add_hooks(model, optimizer):
    """On modules, on tensors, on the optimizer."""
    model.register_forward_hook(lambda *a: None)
    model.head.register_forward_pre_hook(lambda *a: None)
    model.head.register_full_backward_hook(lambda *a: None)
    optimizer.register_step_pre_hook(lambda *a: None)


def change_modes(model, optimizer):
    """Train and eval."""
    model.eval()
    model.drop.train()
    model.drop.p = 0.9


def draw_numbers(model, optimizer):
    """From each generator."""
    torch.rand(3)
    random.random()
    np.random.rand()


def write_in_place(model, optimizer):
    """With and without autograd's knowledge, and through views."""
    with torch.no_grad():
        model.head.weight.zero_()
        model.tied.weight[0] += 1
    model.norm.running_mean.data.fill_(9)
    model.seen.resize_(100).fill_(3)
    model.head.bias.data = model.head.bias.data[:2]


def join_a_graph(model, optimizer):
    """A forgotten ``detach``: a buffer that was updated in place with a loss hangs on its graph."""
    loss = mean_step(model, make_batch(6))
    model.seen += loss
    loss.backward()


def change_gradients(model, optimizer):
    """Accumulated into, replaced, made and dropped."""
    mean_step(model, make_batch(6)).backward()
    model.head.weight.grad = torch.ones(4, 8)
    model.unused.weight.grad = torch.ones(3, 3)
    model.head.bias.grad = None


ACTIONS = [
    add_group,
    replace_state,
    cast_to_half,
    toggle_requires_grad,
    replace_things,
    add_things,
    add_hooks,
    change_modes,
    draw_numbers,
    write_in_place,
    join_a_graph,
    change_gradients,
]


def is_changed(found, expected):
    """Whether anything differs; what one side has and the other has not can be of any kind."""
    if set(found) != set(expected):
        return True
    return any(type(found[key]) is not type(expected[key]) or differences(found[key], expected[key]) for key in found)


def hooks_of(optimizer):
    """How many hooks hang on it."""
    return len(optimizer._optimizer_step_pre_hooks)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_each_thing_a_step_can_do_is_undone(action, has_gradients):
    """One at a time, with gradients from before (which keep values and identity) and without (None stays None)."""
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    if not has_gradients:
        optimizer.zero_grad()
    before, objects = bits_of(model, optimizer), [*model.modules(), *model.parameters(), *model.buffers()]
    with remember(model, optimizer):
        action(model, optimizer)
        assert is_changed(bits_of(model, optimizer), before) or hooks_of(optimizer) or action is replace_state
    assert not differences(bits_of(model, optimizer), before)
    assert hooks_of(optimizer) == 0
    assert all(buffer.is_leaf for buffer in model.buffers())
    now = [*model.modules(), *model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(now, objects, strict=True))
    train(model, optimizer)  # and it still trains


def test_hooks_and_attributes_of_tensors_are_undone():
    """What hangs on a parameter itself: hooks of both kinds, a gradient in wider precision."""
    model, calls = nn.Linear(3, 3), []
    model.weight.register_hook(lambda gradient: calls.append("mine"))
    model.weight.note = "mine"
    with remember(model):
        model.weight.register_hook(lambda gradient: calls.append("added"))
        model.bias.register_hook(lambda gradient: calls.append("added"))
        model.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append("added"))
        model.weight.main_grad = torch.ones(3, 3)
        model.weight.note = "changed"
    model(torch.ones(3)).sum().backward()
    assert calls == ["mine"]
    assert vars(model.weight) == {"note": "mine"}


def test_containers_kept_as_attributes_are_undone():
    """Lists, dicts, sets and deques of a module keep identity and content, nested ones too."""
    model = nn.Linear(3, 3)
    model.losses, model.recent, model.seen = [1.0], deque([1, 2], maxlen=2), {"a"}
    model.cache = OrderedDict(b=[torch.zeros(2)], a=(torch.zeros(2), {"deep": 1}))
    held = [model.losses, model.recent, model.seen, model.cache, model.cache["b"], model.cache["a"]]
    with remember(model):
        model.losses.append(2.0)
        model.recent.append(3)
        model.seen.update("bc")
        model.cache["b"].append(1)
        model.cache["b"][0].add_(1)
        model.cache["a"][0].add_(1)
        model.cache["a"][1]["deep"] = 2
        model.cache.move_to_end("b")
        model.losses = None
    now = [model.losses, model.recent, model.seen, model.cache, model.cache["b"], model.cache["a"]]
    assert all(one is other for one, other in zip(now, held, strict=True))
    assert (model.losses, list(model.recent), model.recent.maxlen, model.seen) == ([1.0], [1, 2], 2, {"a"})
    assert list(model.cache) == ["b", "a"]
    assert [tensor.tolist() for tensor in (*model.cache["b"], model.cache["a"][0])] == [[0, 0], [0, 0]]
    assert model.cache["a"][1] == {"deep": 1}


def test_a_state_of_odd_values_comes_back():
    """Payloads of NaN, negative zeros, overlapping and shared memory, every kind of dtype, as buffers."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    bits = torch.tensor([0x7FC00000, -0x3FFFFF, 0x7FA12345, -(2**31)], dtype=torch.int32)
    values = [bits.view(torch.float32), torch.tensor([True, False]), torch.ones(3).bfloat16(), torch.arange(3).char()]
    values += [torch.ones(3, dtype=torch.complex64), torch.ones(3, 1).expand(3, 4), torch.empty(0)]
    values += [values[0][1:3], torch.ones(3).to(torch.float8_e5m2)]
    for index, value in enumerate(values):
        model.register_buffer(f"buffer{index}", value, persistent=index % 2 == 0)
    before = bits_of(model)
    with remember(model):
        for buffer in model.buffers():
            buffer.untyped_storage().fill_(77)
        model.buffer0 = torch.zeros(4)
    assert not differences(bits_of(model), before)
    assert model.buffer7.data_ptr() == model.buffer0[1:].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3).to_mkldnn(),
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3).requires_grad_().sum(),
    ],
)
def test_any_tensor_may_be_an_attribute(make):
    """Without memory, opaque, part of a graph, sparse: it stays the same object."""
    model = nn.Linear(3, 3)
    model.kept = make()
    kept = model.kept
    with remember(model) as state:
        state.rewind()
        model.kept = None
    assert model.kept is kept


def test_an_inference_tensor_may_be_an_attribute():
    """A cache made under ``inference_mode`` cannot be written by autograd, but its bytes can."""
    model = nn.Linear(3, 3)
    with torch.inference_mode():
        model.cache = torch.ones(3)
    with remember(model), torch.inference_mode():
        model.cache.zero_()
    assert model.cache.tolist() == [1, 1, 1]


def test_a_view_that_joined_a_graph_does_not_stop_the_rest():
    """No view can be taken out of its graph in place: its value comes back, and so does everything else."""
    model = nn.Linear(3, 3)
    model.register_buffer("first", torch.zeros(2, 3)[0])
    before = bits_of(model)
    with remember(model):
        model.first += model.bias
        model.weight.data.zero_()
    assert not differences(bits_of(model), before)


def test_a_sparse_gradient_comes_back():
    """Adding to it gives it other indices and values, in place."""
    model = nn.Embedding(10, 3, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    gradient, expected = model.weight.grad, model.weight.grad.to_dense()
    with remember(model):
        model(torch.tensor([2, 5])).sum().backward()
    assert model.weight.grad is gradient
    assert gradient._nnz() == 2
    assert torch.equal(gradient.to_dense(), expected)


def test_a_lstm_keeps_its_weights_together():
    """It keeps references to its weights beside the parameters, in lists."""
    model = nn.LSTM(3, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = bits_of(model, optimizer)
    with remember(model, optimizer):
        model(torch.ones(5, 3))[0].sum().backward()
        optimizer.step()
        model.half()
    assert not differences(bits_of(model, optimizer), before)
    assert all(flat is weight for flat, weight in zip(model._flat_weights, model.parameters(), strict=True))


def test_rewinding_keeps_what_is_resident():
    """Between trials the optimizer keeps the state it has made; values and generators are the first ones."""
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    before = bits_of(model)
    with remember(model, optimizer) as state:
        train(model, optimizer)
        state.rewind()
        assert optimizer.state[model.head.weight]["exp_avg"].shape == (4, 8)
        assert not differences(bits_of(model), before)
    assert len(optimizer.state) == 0


def test_rewinding_drops_gradients_from_before_and_restoring_returns_them():
    """A trial begins without gradients; the user's own are back at the end, value and identity."""
    model = Everything()
    mean_step(model, make_batch(5)).backward()
    before = bits_of(model)
    with remember(model) as state:
        state.rewind()
        assert all(parameter.grad is None for parameter in model.parameters())
        mean_step(model, make_batch(6)).backward()
    assert not differences(bits_of(model), before)


def test_rewinding_lets_a_model_with_a_memory_begin_anew():
    """A hidden state has as many rows as the last batch: the next trial has another size."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)
            self.hidden = None

        def forward(self, inputs):
            self.hidden = self.cell(inputs, self.hidden if self.hidden is None else self.hidden.detach())
            return self.hidden

    model = Remembers()
    with remember(model) as state:
        for size in (2, 5):
            state.rewind()
            model(torch.ones(size, 3))
            model(torch.ones(size, 3))
    assert model.hidden is None


def test_an_optimizer_kept_by_the_model_is_the_optimizer_s():
    """Its state stays resident between trials, though the model reaches it too."""
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    model.optimizer, model.optimizers = optimizer, [optimizer]
    with remember(model, optimizer) as state:
        train(model, optimizer)
        state.rewind()
        assert len(optimizer.state) > 0
    assert len(optimizer.state) == 0


def test_an_optimizer_with_very_many_parameters_comes_back():
    """A record looks into no container of more than 1,000 entries, but a large model's optimizer state has more."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(1001)])
    optimizer = ByHand(model.parameters())
    for parameter in model:
        optimizer.state[parameter] = {"count": 1, "mean": torch.zeros(2)}
    before = bits_of(model, optimizer)
    with remember(model, optimizer):
        for parameter in model:
            parameter.data.zero_()
            optimizer.state[parameter]["count"] += 1
            optimizer.state[parameter]["mean"].add_(1)
    assert not differences(bits_of(model, optimizer), before)


def test_nothing_stays_in_memory_or_on_disk(tmp_path, monkeypatch):
    """Copies, the optimizer's fresh state and the gradients of the block are gone without a garbage collection."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    gc.disable()
    try:
        with remember(model, optimizer, host_bytes=0) as state:
            assert list(tmp_path.iterdir())
            train(model, optimizer)
            made = [value for entry in optimizer.state.values() for value in entry.values()]
            made += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            references = [weakref.ref(tensor.untyped_storage()) for tensor in made]
            references += [weakref.ref(copy) for _, copy in state._values.saved.values()]
            del made
        assert len(references) > 20
        assert not any(reference() for reference in references)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()


def test_a_state_that_is_over_holds_nothing():
    """Who still has the object keeps neither the model nor its memory."""
    model = nn.Linear(3, 3)
    model.cache = [torch.ones(3)]
    with remember(model) as state:
        state.rewind()
    references = [weakref.ref(model.weight.untyped_storage()), weakref.ref(model.cache[0].untyped_storage())]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert isinstance(state, TrainingState)


def test_the_file_goes_even_if_restoring_fails(tmp_path, monkeypatch):
    """An error on the way back is said, and the temporary files are removed all the same."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = nn.Linear(3, 3)
    model.kept = [1]
    with pytest.raises(RuntimeError, match="frozen"), remember(model, host_bytes=0):

        def refuse(state):
            raise RuntimeError("frozen")

        monkeypatch.setattr(torch, "set_rng_state", refuse)
    assert list(tmp_path.iterdir()) == []


class Proxy:
    """Passes every question on, and is not connected."""

    def __getattr__(self, name):
        raise RuntimeError("not connected")


def test_an_object_that_answers_no_questions_is_passed_over():
    """Such as the proxy of a client: it is asked for nothing."""
    model = nn.Linear(3, 3)
    model.client, model.clients = Proxy(), [Proxy()]
    with remember(model):
        model.weight.data.zero_()
    assert model.weight.any()


class Delegating:
    """Passes every question on to what it holds."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Lookahead:
    """An optimizer around another, which it holds through something else."""

    def __init__(self, inner):
        self.inner = Delegating(inner)
        self.param_groups = inner.param_groups


def test_an_optimizer_behind_something_that_delegates_is_put_back():
    """The state that trials make in it does not stay."""
    model = nn.Linear(3, 3)
    adam = torch.optim.Adam(model.parameters())
    with remember(model, Lookahead(adam)):
        model.weight.sum().backward()
        adam.step()
    assert not adam.state


@pytest.mark.parametrize("name", [None, property(lambda _: "mine")], ids=["none", "a property"])
def test_a_class_without_the_name_of_a_module_is_passed_over(name):
    """What the step can reach is walked, whatever it is."""
    model = nn.Linear(3, 3)
    model.odd = type("Odd", (), {"__module__": name})()
    with remember(model):
        model.weight.data.zero_()
    assert model.weight.any()
    step = partial(lambda odd, model, batch: model(batch).square().mean(), model.odd)
    assert autobatch.fit(model, 4, batch=torch.randn(4, 3), step=step, check=None).target_batch == 4
