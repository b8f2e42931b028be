"""Losses over the whole batch in two passes: their gradient is that of one graph over all samples."""

import copy
import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import bits_of, differences, gradients_of, relative_error

import autobatch
from autobatch.errors import CannotRetry, DoesNotFit, InexactSplit, InvalidArgument

SAMPLES, WIDTH = 12, 6


class Tower(nn.Module):
    """Dropout, and a way to run that some cases choose."""

    def __init__(self, norm=nn.LayerNorm, way="plain"):
        super().__init__()
        self.first, self.norm, self.last, self.way = nn.Linear(WIDTH, 16), norm(16), nn.Linear(16, 5), way
        self.calls = 0

    def body(self, inputs):
        return F.dropout(F.gelu(self.norm(self.first(inputs))), 0.3, self.training)

    def forward(self, inputs):
        self.calls += 1
        if "checkpoint" in self.way:
            hidden = checkpoint(self.body, inputs, use_reentrant="reentrant" in self.way)
        else:
            hidden = self.body(inputs)
        if self.way == "drawing":
            hidden = hidden * (1 + random.random() + np.random.rand())
        return self.last(hidden)


class Pair(nn.Module):
    """Two towers, and the parameters of the loss."""

    def __init__(self, **options):
        super().__init__()
        self.image, self.text = Tower(**options), Tower(**options)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-1.0))


def represent(model, batch):
    return {"images": F.normalize(model.image(batch[0]), dim=-1), "texts": [F.normalize(model.text(batch[1]), dim=-1)]}


def represent_views(model, batch):
    return model.image(batch[0]), model.image(batch[1])


def scores_of(model, rows):
    return model.scale.exp() * rows["images"] @ rows["texts"][0].T


def clip(model):
    def loss(rows, batch):
        scores, labels = scores_of(model, rows), torch.arange(len(batch[0]))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return autobatch.WholeBatch(represent, loss)


def siglip(model):
    def loss(rows, _):
        scores = scores_of(model, rows) + model.bias
        return -F.logsigmoid((2 * torch.eye(len(scores), dtype=scores.dtype) - 1) * scores).sum() / len(scores)

    return autobatch.WholeBatch(represent, loss)


def simclr(_):
    def loss(rows, batch):
        both = F.normalize(torch.cat(rows), dim=-1)
        scores = (both @ both.T / 0.2).fill_diagonal_(-torch.inf)
        return F.cross_entropy(scores, torch.arange(len(both)).roll(len(batch[0])))

    return autobatch.WholeBatch(represent_views, loss)


def barlow_twins(_):
    def loss(rows, batch):
        first, second = ((one - one.mean(0)) / one.std(0) for one in rows)
        return ((first.T @ second / len(batch[0]) - torch.eye(5, dtype=first.dtype)) ** 2).sum()

    return autobatch.WholeBatch(represent_views, loss)


def ranking(_):
    """MNRL with a draw of its own, which writes into a representation."""

    def loss(rows, _):
        anchors, others = rows
        anchors.mul_(2)
        return F.cross_entropy(F.dropout(anchors, 0.2) @ others.T, torch.arange(len(anchors)))

    return autobatch.WholeBatch(represent_views, loss)


def ordered(model):
    """Rows 2i and 2i + 1 belong together: the order of representations is that of the batch."""

    def loss(rows, batch):
        return (rows["images"][::2] * rows["texts"][0][1::2] * batch[0][::2, :1]).sum() * model.scale

    return autobatch.WholeBatch(represent, loss)


LOSSES = (clip, siglip, simclr, barlow_twins, ranking, ordered)


def make_batch(samples=SAMPLES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))


def make_model(dtype=torch.float64, **options):
    seed()
    return Pair(**options).to(dtype).train()


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


@cache
def make_plan(size, target=SAMPLES, dtype=torch.float64, make=clip):
    model = make_model(dtype)
    return autobatch.fit(
        model,
        target,
        batch=make_batch(target, dtype),
        step=make(model),
        max_micro_batch=size,
        check=None,
        reuse=False,
        progress=False,
    )


def run_as_one_graph(model, step, batch, parts):
    """The oracle: representations of the same micro-batches in one graph, and the loss over all of them."""
    rows = [step.represent(model, tuple(one[list(part)] for one in batch)) for part in parts]
    leaves = [torch.utils._pytree.tree_flatten(one) for one in rows]
    order = torch.tensor([row for part in parts for row in part]).argsort()
    joined = [torch.cat(column)[order] for column in zip(*[one for one, _ in leaves], strict=True)]
    loss = step.loss(torch.utils._pytree.tree_unflatten(joined, leaves[0][1]), batch)
    loss.backward()
    return loss.detach()


def compare(make, size, *, cut=None, model=None, keep=()):
    """Run a step by autobatch and by the oracle from the same start; return the relative error."""
    model = model or make_model()
    other, batch = copy.deepcopy(model), make_batch()
    runner = autobatch.Runner(make_plan(size), model, make(model), None, cut=cut, keep=keep)
    seed()
    result = runner.accumulate(batch)
    drawn = torch.rand(1), random.random(), np.random.rand()
    parts = result.samples or _neighbours(result.micro_batch_sizes)
    seed()
    loss = run_as_one_graph(other, make(other), batch, parts)
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn, "generators are elsewhere"
    assert abs(float(result.loss - loss)) <= 1e-12 * abs(float(loss))
    assert all(torch.equal(one, its) for one, its in zip(model.buffers(), other.buffers(), strict=True))
    assert (model.image.calls, model.text.calls) == (other.image.calls, other.text.calls)
    return relative_error(gradients_of(model), gradients_of(other))


def _neighbours(sizes):
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.quick
@pytest.mark.parametrize("size", [SAMPLES, 6, 5, 1])
@pytest.mark.parametrize("make", LOSSES)
def test_the_gradient_is_the_whole_batch_s(make, size):
    """With dropout on, in micro-batches of any size, and with the parameters of the loss."""
    assert compare(make, size) < 1e-12


@pytest.mark.parametrize(
    ("size", "parts"),
    [(4, [[0, 3, 6], [11, 1], [2, 4, 5, 7, 8, 9, 10]]), (SAMPLES, [[*range(0, SAMPLES, 2), *range(1, SAMPLES, 2)]])],
)
@pytest.mark.parametrize("make", [clip, ordered])
def test_samples_that_run_together_in_another_order(make, size, parts):
    """Representations come to the loss in the order of the batch, whatever cut= does."""
    assert compare(make, size, cut=lambda batch, largest: parts) < 1e-12


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "options",
    [{"way": "checkpoint"}, {"way": "reentrant checkpoint"}, {"way": "drawing"}, {"norm": nn.BatchNorm1d}],
    ids=str,
)
def test_steps_that_draw_and_move_state(options):
    """The second pass draws what the first drew; state moves once, of a model with BatchNorm too."""
    assert compare(siglip, 4, model=make_model(**options)) < 1e-12


def test_state_that_a_forward_pass_reads():
    """spectral_norm's vectors move with each forward pass, and both passes of a micro-batch read the same."""
    model = make_model()
    nn.utils.parametrizations.spectral_norm(model.image.first)
    other, batch = copy.deepcopy(model), make_batch()
    runner = autobatch.Runner(make_plan(4), model, clip(model), None)
    seed()
    runner.accumulate(batch)
    seed()
    run_as_one_graph(other, clip(other), batch, _neighbours((4, 4, 4)))
    assert relative_error(gradients_of(model), gradients_of(other)) < 1e-12


class Norm(nn.Module):
    """Moves a buffer in each forward pass and another in each backward pass, and draws noise for gradients."""

    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("backwards", torch.zeros(5, dtype=torch.float64))
        self.count, self.seen = 0, None

    def forward(self, rows):
        self.forwards.add_(rows.detach().mean(0))
        rows.register_hook(self.note)
        return rows * 1

    def note(self, gradient):
        self.count += 1
        self.backwards.mul_(0.5).add_(gradient.mean(0))
        self.seen = [self.seen, self.count]
        return gradient + 1e-3 * torch.rand_like(gradient) + 1e-3 * random.random()


def test_what_backward_hooks_move_and_draw():
    """Each forward and each backward pass moves the model once, and backward passes draw after the loss."""
    model, batch = make_model(), make_batch()
    model.norm = Norm()

    def through(model, batch):
        rows = represent(model, batch)
        return {**rows, "images": model.norm(rows["images"])}

    other = copy.deepcopy(model)
    runner = autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(through, clip(model).loss), None)
    seed()
    for _ in range(3):
        runner.accumulate(batch)
    drawn = torch.rand(1), random.random()
    seed()
    for _ in range(3):
        parts = [through(other, tuple(one[list(part)] for one in batch)) for part in _neighbours((4, 4, 4))]
        leaves = [{**rows, "images": rows["images"].detach().requires_grad_()} for rows in parts]
        texts = [rows["texts"][0].detach().requires_grad_() for rows in parts]
        joined = {"images": torch.cat([one["images"] for one in leaves]), "texts": [torch.cat(texts)]}
        clip(other).loss(joined, batch).backward()
        for rows, leaf, text in zip(parts, leaves, texts, strict=True):
            torch.autograd.backward([rows["images"], rows["texts"][0]], [leaf["images"].grad, text.grad])
    assert (torch.rand(1), random.random()) == drawn
    assert relative_error(gradients_of(model), gradients_of(other)) < 1e-12
    assert torch.equal(model.norm.forwards, other.norm.forwards)
    assert torch.allclose(model.norm.backwards, other.norm.backwards, rtol=1e-12, atol=0)
    assert model.norm.seen == other.norm.seen
    assert model.norm.count == 9


def test_a_loss_that_moves_the_model():
    """What the loss writes on the model stays, from its first step on: a buffer, a tensor and an attribute."""
    model, batch = make_model(), make_batch()
    model.register_buffer("center", torch.full((5,), torch.nan, dtype=torch.float64))
    model.queue, model.calls = [torch.zeros(5, dtype=torch.float64)], 0
    other = copy.deepcopy(model)

    def moving(model):
        def loss(rows, batch):
            images = rows["images"].detach().mean(0)
            model.center.copy_(images)
            model.queue[0].add_(images)
            model.calls += 1
            return clip(model).loss(rows, batch)

        return autobatch.WholeBatch(represent, loss)

    runner = autobatch.Runner(make_plan(4), model, moving(model), None)
    seed()
    for _ in range(4):
        runner.accumulate(batch)
    seed()
    for _ in range(4):
        run_as_one_graph(other, moving(other), batch, _neighbours((4, 4, 4)))
    assert (model.calls, model.image.calls) == (other.calls, other.image.calls)
    assert torch.equal(model.center, other.center)
    assert torch.equal(model.queue[0], other.queue[0])


def test_a_generator_of_the_step_s_own():
    """In keep= both passes draw the same from it; without that the step is refused, and nothing has happened."""
    generator = torch.Generator().manual_seed(1)
    model, batch = make_model(), make_batch()

    def noisy(model, batch):
        rows = represent(model, batch)
        return {**rows, "images": rows["images"] * torch.rand(5, generator=generator, dtype=torch.float64)}

    step = autobatch.WholeBatch(noisy, clip(model).loss)
    before = bits_of(model)
    with pytest.raises(InvalidArgument, match="keep="):
        autobatch.Runner(make_plan(4), model, step, None).accumulate(batch)
    assert not differences(bits_of(model), before)
    assert autobatch.Runner(make_plan(4), model, step, None, keep=[generator]).accumulate(batch).retries == 0


def test_memory_that_is_written_for_the_first_time():
    """A tensor that only a later step writes into has no copy then: the step is refused, and the next one runs."""
    model, batch = make_model(), make_batch()
    model.queue, model.is_late = [torch.zeros(5, dtype=torch.float64)], False

    def late(model, batch):
        rows = represent(model, batch)
        if model.is_late:
            model.queue[0].add_(rows["images"].detach().mean(0))
        return rows

    runner = autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(late, clip(model).loss), None)
    for _ in range(2):
        runner.accumulate(batch)
    model.is_late = True
    with pytest.raises(CannotRetry):
        runner.accumulate(batch)
    assert runner.accumulate(batch).retries == 0


def test_what_the_loss_returns_beside_it_comes_back_once():
    """However many micro-batches there are."""
    model, batch = make_model(), make_batch()
    loss = clip(model).loss
    step = autobatch.WholeBatch(represent, lambda rows, batch: (loss(rows, batch), {"rows": len(rows["images"])}))
    for size in (SAMPLES, 4):
        assert autobatch.Runner(make_plan(size), model, step, None).accumulate(batch).aux == ({"rows": SAMPLES},)


def test_batches_of_a_loader_are_one_batch_to_the_loss():
    """run() joins and cuts them."""
    model, batch = make_model(), make_batch()
    seen = []

    def loss(rows, whole):
        seen.append(torch.equal(whole[0], batch[0]))
        return clip(model).loss(rows, whole)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runner = autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(represent, loss), optimizer)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=5)
    [result] = runner.run(loader)
    assert result.micro_batch_sizes == (4, 4, 4)
    assert seen == [True]


def test_batches_that_cannot_be_joined_are_refused():
    """A loss over the whole batch needs one."""
    model, (images, texts) = make_model(), make_batch()
    parts = [(images[:6], texts[:6]), (images[6:], texts[6:], torch.zeros(6))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runner = autobatch.Runner(make_plan(4), model, clip(model), optimizer)
    with pytest.raises(InvalidArgument, match="joined"):
        runner.step_over(parts)


def test_clipping_scaling_and_float32_sums():
    """A scaler scales the loss alone; clipping and the sums of narrow gradients are those of any step."""
    for dtype in (torch.float32, torch.bfloat16):
        model, batch = make_model(dtype), make_batch(dtype=dtype)
        other = copy.deepcopy(model)
        plan = make_plan(4, dtype=dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        runner = autobatch.Runner(plan, model, clip(model), optimizer, scaler=scaler, max_grad_norm=1e9)
        seed()
        result = runner.step(batch)
        seed()
        run_as_one_graph(other, clip(other), batch, _neighbours((4, 4, 4)))
        norm = torch.nn.utils.get_total_norm([one.grad.float() for one in other.parameters() if one.grad is not None])
        assert abs(float(result.gradient_norm / norm) - 1) < (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_inside(dtype):
    """Representations in half precision are the same in both passes."""
    model, batch = make_model(torch.float32), make_batch(dtype=torch.float32)
    other = copy.deepcopy(model)

    def narrow(model, batch):
        with torch.autocast("cpu", dtype):
            return represent(model, batch)

    def step_of(model):
        return autobatch.WholeBatch(narrow, lambda rows, batch: clip(model).loss(_widen(rows), batch))

    runner = autobatch.Runner(make_plan(4, dtype=torch.float32), model, step_of(model), None)
    seed()
    runner.accumulate(batch)
    seed()
    run_as_one_graph(other, step_of(other), batch, _neighbours((4, 4, 4)))
    assert relative_error(gradients_of(model), gradients_of(other)) < 2e-2


def _widen(rows):
    return {"images": rows["images"].float(), "texts": [rows["texts"][0].float()]}


def test_values_that_are_not_finite_are_left_to_the_scaler():
    """Values that are nan in both passes are no difference: the step is skipped, as any other."""
    model, (images, texts) = make_model(torch.float32), make_batch(dtype=torch.float32)
    images[5] = torch.nan
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    runner = autobatch.Runner(make_plan(4, dtype=torch.float32), model, clip(model), optimizer, scaler=scaler)
    runner.step((images, texts))
    assert scaler.get_scale() == 1.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


REFUSED = {
    "a scale beside the rows": lambda model, batch: (model.image(batch[0]), model.scale.exp()),
    "two views in one tensor": lambda model, batch: torch.cat([model.image(batch[0]), model.image(batch[1])]),
    "rows of another width each": lambda model, batch: F.pad(model.image(batch[0]), (0, int(batch[0][0, 0] > 0))),
    "other keys each": lambda model, batch: {str(bool(batch[0][0, 0] > 0)): model.image(batch[0])},
    "a list": lambda model, batch: model.image(batch[0]).tolist(),
    "nothing": lambda model, batch: None,
}


@pytest.mark.parametrize(
    ("kind", "size"),
    [*((kind, 4) for kind in REFUSED), *((kind, SAMPLES) for kind in [*REFUSED][:2]), ("a list", 12), ("nothing", 12)],
)
def test_representations_without_a_row_a_sample_are_refused(kind, size):
    """Also of a batch that runs whole; nothing has happened then."""
    model, batch = make_model(), make_batch()
    batch[0][:, 0] = torch.arange(SAMPLES) - 5.0
    step = autobatch.WholeBatch(REFUSED[kind], lambda rows, batch: model.scale * 1)
    before = bits_of(model)
    with pytest.raises(InvalidArgument, match=r"represent\(\) returned"):
        autobatch.Runner(make_plan(size), model, step, None).accumulate(batch)
    assert not differences(bits_of(model), before)


@pytest.mark.parametrize("size", [SAMPLES, 4], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    "wrap",
    [lambda one: autobatch.Mean(one, 0), autobatch.PerStep, lambda one: {"loss": one}, lambda one: 3],
    ids=["a count of 0", "PerStep", "a dict", "a number"],
)
def test_losses_of_nothing_or_with_terms_are_refused(wrap, size):
    """The loss is one number over the whole batch, in one micro-batch and in several."""
    model, batch = make_model(), make_batch()
    step = autobatch.WholeBatch(represent, lambda rows, batch: wrap(clip(model).loss(rows, batch)))
    with pytest.raises(InvalidArgument, match="loss of WholeBatch"):
        autobatch.Runner(make_plan(size), model, step, None).accumulate(batch)


def test_arguments_that_mean_nothing_are_refused():
    """Parts that cannot be called, and a count."""
    model, batch = make_model(), make_batch()
    with pytest.raises(InvalidArgument, match="represent="):
        autobatch.WholeBatch(model.image(batch[0]), clip(model).loss)
    with pytest.raises(InvalidArgument, match="loss="):
        autobatch.WholeBatch(represent, None)
    with pytest.raises(InvalidArgument, match="weigh="):
        autobatch.fit(model, SAMPLES, batch=batch, step=clip(model), weigh=len)


def test_the_training_loop_s_work_is_refused():
    """A backward pass in either function."""
    model, batch = make_model(), make_batch()
    loss = clip(model).loss

    def lose(rows, batch):
        loss(rows, batch).backward()
        return loss(rows, batch)

    with pytest.raises(InvalidArgument, match="backward"):
        autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(represent, lose), None).accumulate(batch)


def test_compiled_models():
    """Both passes run the same compiled code."""
    model, batch = make_model(torch.float32), make_batch(dtype=torch.float32)
    model.image.compile(backend="aot_eager")
    other = make_model(torch.float32)
    runner = autobatch.Runner(make_plan(4, dtype=torch.float32), model, clip(model), None)
    seed()
    runner.accumulate(batch)
    seed()
    run_as_one_graph(other, clip(other), batch, _neighbours((4, 4, 4)))
    assert relative_error(gradients_of(model), gradients_of(other)) < 1e-5


def test_an_error_names_the_user_s_function():
    """And its samples: in the loss those of the whole batch."""
    model, batch = make_model(), make_batch()

    def fail(*_):
        raise KeyError("mine")

    for parts, note in (((fail, clip(model).loss), "represent"), ((represent, fail), "loss")):
        with pytest.raises(KeyError) as raised:
            autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(*parts), None).accumulate(batch)
        samples = 12 if note == "loss" else 4
        if hasattr(raised.value, "__notes__"):
            assert note in raised.value.__notes__[0]
            assert f"{samples} samples" in raised.value.__notes__[0]


# ------------------------------------------------------------------------------------------------- memory that runs out


def test_a_loss_that_does_not_fit_is_named():
    """It is begun again once; then smaller micro-batches would not help, and everything is as before."""
    model, batch = make_model(), make_batch()
    calls = []

    def lose(rows, batch):
        calls.append(len(batch[0]))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    before = bits_of(model)
    with pytest.raises(DoesNotFit, match="loss over the whole batch"):
        autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(represent, lose), None).accumulate(batch)
    assert calls == [SAMPLES, SAMPLES]
    assert not differences(bits_of(model), before)


def test_fit_says_whether_it_is_the_loss_or_one_sample():
    """The loss runs at the target in every trial."""
    model, batch = make_model(), make_batch(64)

    def lose(rows, batch):
        if len(batch[0]) >= 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
        return clip(model).loss(rows, batch)

    def stand(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    with pytest.raises(DoesNotFit, match="the loss over the whole batch does not fit"):
        autobatch.fit(model, 64, batch=batch, step=autobatch.WholeBatch(represent, lose), progress=False)
    with pytest.raises(DoesNotFit, match="a micro-batch of 1 sample"):
        autobatch.fit(model, 64, batch=batch, step=autobatch.WholeBatch(stand, lose), progress=False)


def test_trials_measure_the_loss_at_the_target():
    """The peak of a small micro-batch is that of the loss, and the step stays below it."""
    target, dtype = 512, torch.float32
    model, batch = make_model(dtype), make_batch(target, dtype)
    plan = make_plan(16, target, dtype)
    assert plan.peak_bytes > 4 * target**2 * 4
    runner = autobatch.Runner(plan, model, clip(model), None)
    result = runner.accumulate(batch)
    assert result.micro_batch_sizes == (16,) * 32
    assert result.peak_bytes <= plan.peak_bytes * 1.01
    assert plan.peak_bytes < 1.3 * result.peak_bytes


def test_fit_leaves_no_trace_and_checks_the_split():
    """As with any step; BatchNorm is named as ever."""
    model, batch = make_model(torch.float32), make_batch(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    before = bits_of(model, optimizer)
    plan = autobatch.fit(
        model,
        SAMPLES,
        batch=batch,
        step=clip(model),
        optimizer=optimizer,
        max_micro_batch=4,
        check="raise",
        reuse=False,
    )
    assert not differences(bits_of(model, optimizer), before)
    assert plan.micro_batch_sizes == (4, 4, 4)
    model = make_model(torch.float32, norm=nn.BatchNorm1d)
    with pytest.raises(InexactSplit, match="BatchNorm"):
        autobatch.fit(model, SAMPLES, batch=batch, step=clip(model), max_micro_batch=4, check="raise", reuse=False)


def test_verify_finds_whole_batches_exact_and_advises_them():
    """The same loss as an ordinary step is not, and the verdict says what to write."""
    model, batch = make_model(), make_batch()
    step = clip(model)
    assert autobatch.verify(model, batch, step).exact
    verdict = autobatch.verify(model, batch, lambda model, batch: step.loss(step.represent(model, batch), batch))
    assert not verdict.exact
    assert "autobatch.WholeBatch(represent, loss)" in str(verdict)


def test_a_plan_of_another_loss_is_not_taken_for_this_one():
    """What the functions do is part of what identifies the step."""
    prints = {make_plan(4, make=make).fingerprint for make in (clip, siglip, simclr)}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda rows: rows[:, :3], "rows of (3,) torch.float64"),
        (lambda rows: [rows], "[rows of (5,) torch.float64]"),
        (lambda rows: (rows, None), "(rows of (5,) torch.float64, None)"),
    ],
)
def test_unlike_representations_of_two_micro_batches_are_shown(change, shown):
    """In their containers, in one line."""
    model, calls = make_model(), []

    def represent_unlike(model, batch):
        calls.append(batch)
        rows = model.image(batch[0])
        return rows if len(calls) == 1 else change(rows)

    runner = autobatch.Runner(make_plan(4), model, autobatch.WholeBatch(represent_unlike, clip(model).loss), None)
    with pytest.raises(InvalidArgument) as raised:
        runner.accumulate(make_batch())
    message = str(raised.value)
    assert shown in message
    assert "rows of (5,) torch.float64 in one" in message
    assert "\n" not in message
