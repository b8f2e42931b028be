"""The count of live CPU storages: exact, and a budget on it that holds in forward, backward and update."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lines import AtLine, in_another_thread
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from autobatch.memory.cpu import LiveStorage, StorageBudget

UNLIMITED = 2**60


def count(*tensors):
    """Bytes that a fresh count gives for these tensors."""
    storage = LiveStorage()
    storage.add(tensors)
    return storage.live_bytes


def make_sparse(layout):
    """An identity matrix of 20 rows in this sparse layout."""
    return torch.eye(20).to_sparse(layout=layout)


@pytest.mark.parametrize(
    ("make", "byte_count"),
    [
        (lambda: torch.empty(10), 40),
        (lambda: torch.empty(10, dtype=torch.bfloat16), 20),
        (lambda: torch.empty(10, dtype=torch.complex64).imag, 80),
        (lambda: torch.empty(0), 0),
        (lambda: torch.empty(1).expand(1000), 4),
        (lambda: torch.empty(10)[3:5], 40),
        (lambda: nn.Parameter(torch.empty(10)), 40),
        (lambda: torch.from_numpy(np.zeros(10)), 80),
        (lambda: torch.eye(20).to_sparse(), 20 * 4 + 2 * 20 * 8),
        (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged), 8 * 4 + 3 * 8),
        (lambda: torch.empty(10, device="meta"), 0),
        (lambda: torch.ones(10).to_mkldnn(), 0),  # opaque: no storage to look at
    ],
)
@pytest.mark.filterwarnings("ignore:.*prototype stage")
def test_each_kind_of_tensor_counts_its_storages(make, byte_count):
    """Dense, viewed, expanded, sparse, nested and foreign memory count by what they hold, meta and opaque ones not."""
    assert count(make()) == byte_count


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (torch.sparse_csr, ("crow_indices", "col_indices", "values")),
        (torch.sparse_csc, ("ccol_indices", "row_indices", "values")),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_compressed_sparse_tensors_count_all_three_parts(layout, names):
    """Values and both index tensors."""
    tensor = make_sparse(layout)
    # to_sparse cuts its parts out of larger storages: their whole storages are what is held.
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in (getattr(tensor, n)() for n in names)}
    assert count(tensor) == sum(storage.nbytes() for storage in storages.values()) >= 20 * 4


@given(plan=st.lists(st.sampled_from(["make", "view", "drop", "recount", "grow", "shrink"]), max_size=60))
def test_the_count_is_the_sum_over_distinct_storages(plan):
    """Whatever is made, viewed, resized, counted again and dropped, the count is the sum over what lives."""
    storage, held = LiveStorage(), []
    for number, action in enumerate(plan):
        if action == "make":
            held.append(torch.empty(number, dtype=torch.uint8))
        elif held and action == "view":
            held.append(held[number % len(held)][:1])
        elif held and action == "drop":
            held.pop(number % len(held))
        elif held and action in ("grow", "shrink"):
            # torch's resize_ never shrinks a storage; its owner can.
            held[number % len(held)].untyped_storage().resize_(100 + number if action == "grow" else number)
        storage.add(held)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        assert storage.live_bytes == sum(storages.values())
    held.clear()
    assert storage.live_bytes == 0


def test_what_only_the_graph_holds_still_counts():
    """A tensor saved for backward has no Python object of its own any more, and lives."""
    storage = LiveStorage()
    weight = torch.ones(1000, requires_grad=True)
    storage.add([weight])
    with StorageBudget(storage, UNLIMITED):
        loss = weight.exp().sum()  # exp saves its result
        gc.collect()
        assert storage.live_bytes == 4000 + 4000 + 4
        loss.backward()
        assert storage.live_bytes == 4000 + 4000 + 4  # the saved result went, the gradient came
    del loss
    assert storage.live_bytes == 8000


@pytest.mark.parametrize(
    ("operate", "new_bytes"),
    [
        (lambda a: a + a, 400),
        (lambda a: a.add_(1), 0),
        (lambda a: a.mul_(2)[5:].t_() if a.ndim == 2 else a.view(10, 10).t(), 0),
        (lambda a: a.requires_grad_().detach(), 0),
        (lambda a: torch._foreach_add([a, a], 1), 800),
        (lambda a: torch._foreach_add_([a], 1), 0),
        (lambda a: a.sort(), 400 + 800),
        (lambda a: a.split(10), 0),
        (lambda a: a.resize_(200), 400),
        (lambda a: torch.mul(a, 2, out=torch.empty(100)), 400),
        (lambda a: a.to_sparse(), 800 + 400),
        (lambda a: torch.quantize_per_tensor(a, 0.1, 0, torch.qint8), 100),
        (lambda a: a.to(torch.complex64).conj(), 800),
        (lambda a: a.numpy(), 0),
        (lambda a: torch.tensor([1.0, 2.0]), 8),
        (lambda a: torch.func.vmap(lambda row: row * 2)(a.view(10, 10)), 400),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*deprecated")
def test_an_operator_counts_what_it_makes(operate, new_bytes):
    """New results count; views, in-place updates and what is already counted do not."""
    storage = LiveStorage()
    argument = torch.ones(100)
    storage.add([argument])
    with StorageBudget(storage, UNLIMITED):
        result = operate(argument)
        assert storage.live_bytes == 400 + new_bytes
    assert result is not None or new_bytes == 0


def measure_with_the_allocator(action):
    """Most bytes above the start, by torch's own allocator as its profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(np.cumsum([change for _, change in sorted(changes, key=lambda entry: entry[0])]))


class Checkpointed(nn.Module):
    """Three blocks, each run again in the backward pass."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, inputs):
        hidden = inputs.clone().requires_grad_()
        for block in self.blocks:
            # With it each keeps a generator's state, 5056 bytes that no operator returns.
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return hidden


FLOATS = torch.linspace(-1, 1, 128 * 64).view(128, 64)
TOKENS = torch.arange(512) % 100


@pytest.mark.parametrize(
    ("make_model", "make_optimizer", "inputs"),
    [
        (lambda: nn.Linear(64, 256), torch.optim.AdamW, FLOATS),
        (lambda: nn.Linear(64, 256), lambda p: torch.optim.AdamW(p, foreach=True), FLOATS),
        (lambda: nn.Linear(64, 256), lambda p: torch.optim.AdamW(p, fused=True), FLOATS),
        (lambda: nn.Linear(64, 256), lambda p: torch.optim.SGD(p, momentum=0.9), FLOATS),
        (lambda: nn.Sequential(nn.Linear(64, 99), nn.GELU(), nn.LayerNorm(99)), torch.optim.Adagrad, FLOATS),
        (lambda: nn.GRU(64, 64, 2), torch.optim.SGD, FLOATS.view(8, 16, 64)),
        (lambda: nn.TransformerEncoderLayer(64, 4), torch.optim.SGD, FLOATS.view(8, 16, 64)),
        (lambda: nn.Embedding(100, 64, sparse=True), lambda p: torch.optim.SGD(p, lr=0.1), TOKENS),
        (lambda: nn.Embedding(100, 64), torch.optim.SGD, TOKENS),
        (lambda: Checkpointed(use_reentrant=False), torch.optim.SGD, FLOATS),
        (lambda: Checkpointed(use_reentrant=True), torch.optim.SGD, FLOATS),
    ],
)
def test_a_training_step_peaks_where_torch_s_own_allocator_does(make_model, make_optimizer, inputs):
    """Forward, backward and update: the counted peak is the allocator's, up to a few scalars and one row of scratch."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())

    def step():
        output = model(inputs)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        optimizer.step()

    step()
    gradients = [parameter.grad for parameter in model.parameters()]
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    storage = LiveStorage()
    storage.add([*model.parameters(), *gradients, *state, inputs])
    expected = measure_with_the_allocator(step)
    base = storage.live_bytes
    storage.peak_bytes = base
    with StorageBudget(storage, UNLIMITED):
        step()
    assert storage.peak_bytes - base == pytest.approx(expected, abs=600)


def test_autocast_counts_its_cached_weights():
    """The bfloat16 copy of a weight lives until autocast ends."""
    storage = LiveStorage()
    layer, inputs = nn.Linear(64, 64, bias=False), torch.ones(2, 64)
    with StorageBudget(storage, UNLIMITED):
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            output = layer(inputs)
            assert storage.live_bytes >= 64 * 64 * 2 + output.nbytes
        loss = output.float().sum().detach()
        del output
    assert storage.live_bytes == loss.nbytes


def test_compiled_code_is_counted_operator_by_operator():
    """Under the budget compiled code runs eagerly: its intermediate results count, which fusion would not even make."""
    compiled = torch.compile(lambda inputs: (inputs * 2).sin() + 1, backend="eager")
    storage = LiveStorage()
    with StorageBudget(storage, UNLIMITED):
        compiled(torch.ones(1000))
    assert storage.peak_bytes == 3 * 4000


def take_one_step(model, optimizer, inputs):
    model(inputs).square().mean().backward()
    optimizer.step()


def make_training():
    """A model, its AdamW and a batch, all announced to a count."""
    model = nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 40))
    optimizer, inputs, storage = torch.optim.AdamW(model.parameters()), torch.ones(8, 20), LiveStorage()
    storage.add([*model.parameters(), inputs])
    return model, optimizer, inputs, storage


def test_no_budget_is_ever_passed():
    """At every budget from nothing to enough, the step raises at once or fits, and the peak stays within the budget."""
    model, optimizer, inputs, storage = make_training()
    resident = storage.live_bytes
    with StorageBudget(storage, UNLIMITED):
        take_one_step(model, optimizer, inputs)
    enough, operators = storage.peak_bytes, set()
    del model, optimizer, inputs
    for budget in range(resident, enough + 2000, 2000):
        model, optimizer, inputs, storage = make_training()
        try:
            with StorageBudget(storage, budget):
                take_one_step(model, optimizer, inputs)
            assert budget >= enough
        except torch.OutOfMemoryError as error:
            assert budget < enough
            operators.add(str(error).split(" in ")[1].split(" with ")[0])
        assert storage.peak_bytes <= budget
    # In forward, in backward and in the update.
    assert {"aten.addmm.default", "aten.mm.default", "aten.zeros_like.default"} <= operators


def test_the_message_says_what_was_tried_where_and_against_what():
    """One line: bytes, operator, what is held, the budget."""
    storage = LiveStorage()
    held = torch.ones(256)
    storage.add([held])
    with StorageBudget(storage, 3000), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.ones(1024)
    assert str(caught.value) == (
        "CPU out of memory. Tried to allocate 4.0 KiB in aten.ones.default with 1.0 KiB in tensors; "
        "the limit is 2.9 KiB"
    )


def test_the_result_that_was_too_large_is_gone_when_the_error_arrives():
    """Even while the error is held, with its traceback and without a garbage collection, its tensor is not."""
    made = []

    class Notes(LiveStorage):
        def count(self, result):
            if not isinstance(result, torch.Tensor):
                made.extend(weakref.ref(part.untyped_storage()) for part in result)
            return super().count(result)

    storage = Notes()
    argument = torch.ones(100)
    gc.disable()
    try:
        with StorageBudget(storage, 700), pytest.raises(torch.OutOfMemoryError) as caught:
            argument.sort()
        assert caught.value is not None
        assert len(made) == 2
        assert [reference() for reference in made] == [None, None]
        assert storage.live_bytes == 0
    finally:
        gc.enable()


def test_a_view_beyond_the_budget_does_not_raise():
    """What allocates nothing goes through, also where the budget is already passed."""
    storage = LiveStorage()
    tensor = torch.ones(100)
    storage.add([tensor])
    with StorageBudget(storage, 10):
        tensor.add_(1)
        assert tensor.view(10, 10).t()[3].shape == (10,)
        with pytest.raises(torch.OutOfMemoryError):
            tensor.sum()


COUNTING = ("autobatch.memory.cpu",)


def bytes_in(tensors):
    """Bytes of the distinct storages behind these tensors."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def make_and_free(storage, held, others=()):
    """Counts, frees, views, resizes, and makes tensors at addresses that others had."""
    for size in (1000, 1000, 64, 1000):
        held.append(torch.empty(size, dtype=torch.uint8))
        storage.add(held)
        held.append(held[0][:1])
        storage.add(held)
        del held[0]
    held[0].untyped_storage().resize_(5000)
    storage.add(held)
    del held[0]
    with StorageBudget(storage, UNLIMITED):
        held.append(held[0] + 1)
        held.append(held[0].sort().values)
    assert storage.live_bytes == bytes_in([*held, *others])


def test_whatever_another_thread_counts_and_frees_at_any_line_the_count_is_exact():
    """It counts the same tensors, frees some and reads the count between two lines."""
    for position in itertools.count(1):
        storage, held, others = LiveStorage(), [], [torch.empty(1000, dtype=torch.uint8)]
        storage.add(others)

        def work(storage=storage, held=held, others=others):
            storage.add(held)
            others.clear()
            others.append(torch.empty(64, dtype=torch.uint8))
            storage.add([*others, *held])

        with AtLine(position, in_another_thread(work), COUNTING) as run:
            make_and_free(storage, held, others)
        storage.add([*held, *others])
        assert storage.live_bytes == bytes_in([*held, *others]), run.where
        held.clear()
        assert storage.live_bytes == bytes_in(others), run.where
        if not run.where:
            break
    assert position > 100
