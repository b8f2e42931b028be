"""``prediction.tracing.trace``: a user's step becomes its allocations, and nothing of the user's is touched."""

from __future__ import annotations

import linecache
import re
from collections import Counter

import pytest
import torch
from nets import GPT, ConvNet, images, step, tokens
from sampling import sample
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import bits_of, differences

import autobatch.prediction.tracing.trace as trace_module
from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.prediction.sizing import check_timeline
from autobatch.prediction.timeline import TracedStep
from autobatch.prediction.tracing.failures import TooLong
from autobatch.prediction.tracing.ranks import Parallelism
from autobatch.prediction.tracing.trace import Circumstances, trace, trace_timeline
from autobatch.step.losses import Mean
from autobatch.step.workload import Workload

pytestmark = [pytest.mark.apart, pytest.mark.predicts]


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _adamw(model):
    return torch.optim.AdamW(model.parameters())


def _workload(model, optimizer=_adamw, run=step):
    return Workload(model, run, None, optimizer(model) if optimizer else None)


def _gpt_layout():
    return describe(tokens())


def _bytes_by(traced, kind):
    return sum(size for size, block in zip(traced.sizes, traced.blocks, strict=True) if block.kind == kind)


def _direct_peak(workload, layout, samples):
    return trace(workload, layout, samples).peak()


def _autocast_step(device, dtype):
    def run(model, batch):
        with torch.autocast(device, dtype=dtype):
            return step(model, batch)

    return run


def _channels_last_convnet():
    return ConvNet().to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("make", "run", "example", "optimizer"),
    sample(
        [
            (ConvNet, step, images, _sgd),
            (ConvNet, step, images, _adamw),
            (_channels_last_convnet, step, images, _sgd),
            (ConvNet, _autocast_step("cuda", torch.bfloat16), images, _adamw),
            (GPT, step, tokens, _sgd),
            (GPT, step, tokens, _adamw),
            (GPT, _autocast_step("cuda", torch.float16), tokens, _sgd),
            (lambda: GPT(checkpointed=True), step, tokens, _adamw),
            (lambda: GPT(checkpointed=False), _autocast_step("cuda", torch.bfloat16), tokens, _sgd),
            (lambda: GPT().bfloat16(), step, tokens, _adamw),
        ],
        4,
    ),
)
def test_the_timeline_equals_a_direct_trace_at_any_size(make, run, example, optimizer):
    """Traced at 2 and 67 samples, the step at 5 or 256 is the directly traced one: order, bytes, kinds and modules."""
    workload, layout = _workload(make(), optimizer, run), describe(example())
    timeline = trace_timeline(workload, layout)
    assert not timeline.interpolated
    for n in (5, 67, 256):  # at 67 the second optimizer step was not traced
        direct, predicted = trace(workload, layout, n), timeline.at(n)
        assert (predicted.order, predicted.sizes, predicted.blocks) == (direct.order, direct.sizes, direct.blocks)


def test_what_is_resident_is_the_model_its_gradients_and_its_optimizers_state():
    """Bytes by kind are the model's own: tied weights once, AdamW's state twice the parameters."""
    model = GPT()
    traced = trace(_workload(model), _gpt_layout(), 4)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert _bytes_by(traced, "parameter") == parameters
    assert _bytes_by(traced, "optimizer state") == 2 * parameters  # step counts stay on the host
    assert _bytes_by(traced, "gradient") == 2 * parameters  # in each of two steps
    assert _bytes_by(traced, "input") == 4 * 2 * 4 * 32 * 8  # micro-batches, tensors, samples, length, int64


def test_gradients_stay_from_the_first_micro_batch_to_the_update():
    """Between two backward passes of a step, all gradients are there: the second micro-batch meets them."""
    model = GPT(dropout=0.0)
    traced = trace(_workload(model, _sgd), _gpt_layout(), 2)
    parameters, live, at_input = sum(parameter.nbytes for parameter in model.parameters()), 0, []
    for event in traced.order:
        block = traced.blocks[abs(event) - 1]
        if block.kind == "gradient":
            live += traced.sizes[abs(event) - 1] * (1 if event > 0 else -1)
        if block.kind == "input" and event > 0:
            at_input.append(live)
    assert at_input == [0, 0, parameters, parameters] * 2


def test_modules_are_named_in_forward_and_backward():
    """Every submodule with an operator has activations, and backward blocks carry the name of the same module."""
    traced = trace(_workload(ConvNet()), describe(images()), 2)
    phases = {(block.module, block.phase) for block in traced.blocks}
    for name in ("stem.0", "body.1.first", "body.2.second_norm", "head"):
        assert {(name, "forward"), (name, "backward"), (name, "before")} <= phases


def test_everything_is_freed_but_what_stays():
    """After the last step only parameters, buffers, optimizer state and the loss that it returned are alive."""
    traced = trace(_workload(ConvNet()), describe(images()), 2)
    alive = set()
    for event in traced.order:
        alive.add(event - 1) if event > 0 else alive.remove(-event - 1)
    losses = [block for block in alive if traced.blocks[block].kind == "activation"]
    assert [traced.sizes[block] for block in losses] == [4]  # of both micro-batches
    assert {traced.blocks[block].kind for block in alive.difference(losses)} == {
        "parameter",
        "buffer",
        "optimizer state",
        "cuBLAS workspace",
    }


def test_checkpointing_lowers_the_peak():
    """Recomputed activations are not there all at once, with either kind; as many are made in backward instead."""
    plain, reentrant, other = (
        _direct_peak(_workload(GPT(layers=4, checkpointed=how)), _gpt_layout(), 16) for how in (None, True, False)
    )
    assert reentrant < 0.8 * plain
    assert other < 0.8 * plain


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_means_the_gpu_whatever_it_names(device):
    """A region for CUDA, or for the model's own device, halves activations and keeps a copy of each weight once."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight

    def run(module, batch):
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            return module(batch).float().mean()

    traced = trace(Workload(model, run), describe(torch.zeros(2, 64)), 100)
    made = Counter(size for size, block in zip(traced.sizes, traced.blocks, strict=True) if block.kind == "activation")
    assert made[64 * 64 * 2] == 4  # one copy for two layers, in each of four micro-batches
    assert made[100 * 64 * 4] == 0 or made[100 * 64 * 2] > 0


def test_gradients_in_bfloat16_are_summed_in_float32():
    """As the Runner does it: a sum takes 4 bytes a parameter, and is rounded once."""
    model = nn.Linear(32, 32, bias=False).bfloat16()
    traced = trace(Workload(model, lambda m, b: m(b).float().mean()), describe(torch.zeros(2, 32).bfloat16()), 2)
    gradients = [s for s, block in zip(traced.sizes, traced.blocks, strict=True) if block.kind == "gradient"]
    assert sorted(set(gradients)) == [32 * 32 * 2, 32 * 32 * 4]


def test_a_models_values_are_never_needed():
    """A model on the meta device gives the same trace."""
    with torch.device("meta"):
        model = GPT()
    assert trace(_workload(model), _gpt_layout(), 3) == trace(_workload(GPT()), _gpt_layout(), 3)


def test_nothing_of_the_users_changes():
    """Weights, buffers, gradients, optimizer state, generators, hooks, attributes: bit for bit as before."""

    class Counting(ConvNet):
        def __init__(self):
            super().__init__()
            self.seen, self.calls = [], 0

        def forward(self, inputs):
            self.calls += 1
            self.seen.append(inputs.shape)
            self.last = torch.rand(1)
            return super().forward(inputs)

    model = Counting()
    optimizer = _adamw(model)
    step(model, images()).backward()
    optimizer.step()
    model.head.register_forward_hook(lambda *_: None)
    before, contents = bits_of(model, optimizer), {name: vars(m) for name, m in model.named_modules()}
    trace(Workload(model, step, None, optimizer), describe(images()), 2)  # in this process, unlike a timeline's
    assert differences(bits_of(model, optimizer), before) == []
    assert all(vars(module) is contents[name] for name, module in model.named_modules())
    assert len(model.seen) == 1


def test_nothing_changes_when_the_step_fails_either():
    """An error in the middle of the step leaves the model as it was."""
    model = ConvNet()
    before = bits_of(model)

    def run(module, batch):
        module.head = None
        step(module, batch)

    with pytest.raises(TypeError):
        trace(Workload(model, run), describe(images()), 2)
    assert differences(bits_of(model), before) == []


def test_a_step_may_close_over_the_model_and_a_loss_with_weights():
    """What the step reaches without its argument is traced just as well."""
    model, criterion = ConvNet(), nn.CrossEntropyLoss(weight=torch.ones(10))

    def run(_, batch):
        return criterion(model(batch[0]), batch[1])

    expected = _direct_peak(_workload(model), describe(images()), 8)
    found = _direct_peak(_workload(model, run=run), describe(images()), 8)
    assert abs(found - expected) <= 1024  # the weights of ten classes


def test_devices_that_the_step_names_are_the_fake_one():
    """Moving to "cuda", to the model's device or by cuda() moves nothing."""
    model = ConvNet()

    def run(module, batch):
        inputs, labels = batch
        assert inputs.is_cuda
        device = torch.device("cuda", 0)
        return F.cross_entropy(module(inputs.to(device)), labels.cuda() + torch.zeros(1, device="cuda").long())

    assert trace(_workload(model, run=run), describe(images()), 2).samples == 2


_VALUES = [
    lambda model, batch: step(model, batch) * batch[0].sum().item(),
    lambda model, batch: step(model, batch) if batch[0].sum() > 0 else None,
    lambda model, batch: step(model, (batch[0][batch[1] > 0], batch[1][batch[1] > 0])),
    lambda model, batch: step(model, batch) * float(batch[0].detach().cpu().numpy().sum()),
    lambda model, batch: step(model, batch) * batch[0].flatten().tolist()[0],
]


@pytest.mark.parametrize("run", _VALUES)
def test_a_step_that_needs_values_is_refused_by_its_own_line(run):
    """The message names file, line and source of the user's code."""
    with pytest.raises(InvalidArgument) as caught:
        trace(_workload(ConvNet(), run=run), describe(images()), 2)
    line = run.__code__.co_firstlineno
    assert f"{__file__}:{line}: `{linecache.getline(__file__, line).strip()}`" in str(caught.value)


def test_an_error_in_the_backward_pass_is_told_and_does_not_abort():
    """A hook that raises while autograd runs comes out with its line."""

    def run(model, batch):
        logits = model(batch[0])
        logits.register_hook(lambda gradient: gradient.sum().item())
        return F.cross_entropy(logits, batch[1])

    with pytest.raises(InvalidArgument, match=re.escape("gradient.sum().item()")):
        trace(_workload(ConvNet(), run=run), describe(images()), 2)


@pytest.mark.parametrize(
    "make",
    sample(
        [
            torch.optim.Adafactor,
            torch.optim.Adagrad,
            torch.optim.ASGD,
            torch.optim.NAdam,
            torch.optim.RMSprop,
            lambda p: torch.optim.AdamW(p, fused=True),
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
            lambda p: torch.optim.AdamW(p, foreach=False),
        ],
        3,
    ),
)
def test_any_of_torchs_optimizers_is_rebuilt(make):
    """State is made on the fake device by the optimizer's own class and options."""
    model = nn.Linear(8, 8)
    workload = Workload(model, lambda m, b: m(b).mean(), None, make(model.parameters()))
    assert _bytes_by(trace(workload, describe(torch.zeros(2, 8)), 2), "optimizer state") > 0


def test_a_scaler_adds_what_unscaling_takes():
    """The scaled loss and the unscaling's few scalars, and no more."""
    layout = _gpt_layout()
    plain, scaled = (trace(_workload(GPT()), layout, 2, Circumstances(scaler=scaler)) for scaler in (False, True))
    assert 0 < sum(scaled.sizes) - sum(plain.sizes) < 1024


def test_counts_that_only_values_tell_are_not_read():
    """A step that states its own count is traced: the count changes no allocation."""

    def run(model, batch):
        return Mean(step(model, batch), count=(batch[1] != -100).sum())

    assert trace(_workload(ConvNet(), run=run), describe(images()), 2).samples == 2


@pytest.mark.slow
def test_a_step_that_loops_over_samples_is_interpolated_and_not_traced_without_end(monkeypatch):
    """Another number of operators at each size cannot be aligned: the record says so, traced sizes stay exact.

    Sizes are traced until the next one would have too many events; beyond, it is a line.
    """
    model = nn.Linear(16, 16)

    def run(module, batch):
        return torch.stack([module(sample).tanh().mean() for sample in batch]).mean()

    monkeypatch.setattr(trace_module, "_MOST_EVENTS", 1000)
    monkeypatch.setattr(trace_module, "SIZES", (2, 17))
    workload, layout = Workload(model, run, None, _sgd(model)), describe(torch.zeros(2, 16))
    timeline = trace_timeline(workload, layout)
    assert timeline.interpolated
    assert timeline.traced[-1].samples == 17  # traced in any case
    assert [step.samples for step in timeline.traced][:3] == [2, 4, 8]
    assert timeline.at(8).sizes == trace(workload, layout, 8).sizes
    assert timeline.measure(12, TracedStep.peak) == pytest.approx(_direct_peak(workload, layout, 12), rel=0.01)
    assert timeline.measure(160, TracedStep.peak) > 3 * timeline.measure(16, TracedStep.peak)


def test_a_step_whose_operators_do_not_depend_on_samples_is_traced_at_all_sizes(monkeypatch):
    """However many operators it has: what bends with the square needs the far sizes."""
    monkeypatch.setattr(trace_module, "_MOST_EVENTS", 10)
    monkeypatch.setattr(trace_module, "_LADDER", (4, 256, 1024))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    timeline = trace_timeline(_workload(model, run=_contrast), describe((torch.zeros(2, 16), torch.zeros(2))))
    assert [step.samples for step in timeline.traced] == [2, 4, 67, 256, 1024]


def test_an_encoder_in_eval_mode_takes_its_usual_way():
    """Its packed one needs the mask's values; torch's switch is as before afterwards."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def run(model, batch):
        model[0].eval()
        with torch.no_grad():
            hidden = model[0](batch, src_key_padding_mask=torch.zeros(batch.shape[:2], device=batch.device).bool())
        return model[1](hidden).mean()

    model = nn.Sequential(encoder, nn.Linear(16, 4))
    assert trace(Workload(model, run), describe(torch.zeros(2, 5, 16)), 2).samples == 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_gradients_that_meet_are_added_in_place():
    """Autograd adds to the first gradient where nobody else holds it; an observer must not see a copy."""
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def run(module, batch):
        hidden = module[0](batch)
        return (module[1](hidden) + module[2](hidden)).mean()

    traced = trace(Workload(model, run), describe(torch.zeros(2, 64)), 50)
    size = 50 * 64 * 4
    backward = [s for s, block in zip(traced.sizes, traced.blocks, strict=True) if block.phase == "backward"]
    # mean's gradient, and one from each of the two layers; their sum would be one more
    assert backward.count(size) == 4 * 3


def test_a_parameter_outside_of_all_modules_is_refused():
    """Its gradient would go to the user's own tensor."""
    scale = nn.Parameter(torch.ones(10))
    with pytest.raises(InvalidArgument, match=r"parameter of shape \(10,\)"):
        trace(Workload(ConvNet(), lambda m, b: F.cross_entropy(m(b[0]) * scale, b[1])), describe(images()), 2)
    assert scale.grad is None


def test_wrappers_for_several_devices_are_refused():
    """The module inside is what one rank runs."""
    with pytest.raises(InvalidArgument, match="DataParallel"):
        trace(Workload(nn.DataParallel(ConvNet()), step), describe(images()), 2)


def _contrast(model, batch):
    hidden = model(batch[0])
    return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden), device=hidden.device))


def _pad(model, batch):
    return _pad_to(8)(model, batch)


def _pad_to(multiple):
    def run(model, batch):
        inputs = batch[0]
        return model(F.pad(inputs, (0, 0, 0, -len(inputs) % multiple))).square().mean()

    return run


def _split(model, batch):
    parts = [checkpoint(model, part, use_reentrant=False).square().sum() for part in batch[0].split(16)]
    return sum(parts) / len(batch[0])


@pytest.mark.parametrize("run", sample([_contrast, _pad, _split], 3))
def test_what_is_no_line_in_the_samples_is_not_called_exact(run, monkeypatch):
    """The square of the samples, padding and chunks are no line at 2 and 67: between traced sizes they are near."""
    monkeypatch.setattr(trace_module, "_LADDER", (256, 1024))  # beside 67, those on both sides of what is asked below
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    layout = describe((torch.zeros(2, 16), torch.zeros(2)))
    workload = _workload(model, run=run)
    timeline = trace_timeline(workload, layout)
    assert timeline.interpolated
    for samples in (100, 600):
        direct = trace(workload, layout, samples).peak()
        assert timeline.measure(samples, TracedStep.peak) == pytest.approx(direct, rel=0.5)


@pytest.mark.parametrize("multiple", sample([128, 1000], 2))
def test_what_looks_like_a_line_at_two_sizes_is_seen_at_a_third(multiple):
    """Padding to more than the larger of the two takes the same at both; where it is checked it is exact."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    layout = describe((torch.zeros(2, 16), torch.zeros(2)))
    workload = _workload(model, run=_pad_to(multiple))
    lines, in_between = trace_timeline(workload, layout), _direct_peak(workload, layout, 600)
    for samples in (256, 2600, 4096):
        changed = check_timeline(lines, workload, layout, samples, Circumstances())
        if multiple > samples:
            assert changed is None
            continue
        assert changed.interpolated
        assert changed.measure(samples, TracedStep.peak) == _direct_peak(workload, layout, samples)
        assert changed.measure(600, TracedStep.peak) == pytest.approx(in_between, rel=0.7)
        assert changed.at(samples).peak() != lines.at(samples).peak()


@pytest.mark.slow
def test_chunks_too_large_for_two_sizes_are_seen_and_too_many_are_not_traced(monkeypatch):
    """A step that takes 100 samples at a time runs more operators than can be traced, at a size that is far enough."""
    monkeypatch.setattr(trace_module, "_MOST_EVENTS", 4000)  # with those that ship this takes 15 s
    model = nn.Linear(16, 16)

    def run(module, batch):
        return sum(module(part).square().sum() for part in batch.split(100)) / len(batch)

    workload, layout = Workload(model, run, None, _sgd(model)), describe(torch.zeros(2, 16))
    lines = trace_timeline(workload, layout)
    assert not lines.interpolated
    changed = check_timeline(lines, workload, layout, 250, Circumstances())
    assert changed.measure(250, TracedStep.peak) == _direct_peak(workload, layout, 250)
    with pytest.raises(TooLong, match="more than 2000 times"):
        check_timeline(lines, workload, layout, 10**6, Circumstances())
    with pytest.raises(TooLong, match="too many to trace"):
        check_timeline(changed, workload, layout, 10**6, Circumstances())


def test_what_grows_in_the_second_micro_batch_only_is_found():
    """The same bytes as in the first one at two samples: the second is traced at both sizes."""
    model = nn.Linear(16, 16)
    calls = []

    def run(module, batch):
        calls.append(len(batch))
        used = batch if len(calls) > 1 else batch[:2].clone()
        return module(used.clone()).square().mean()

    workload, layout = Workload(model, run, None, _sgd(model)), describe(torch.zeros(2, 16))
    timeline = trace_timeline(workload, layout)
    for samples in (2, 5, 40):
        calls.clear()
        direct = trace(workload, layout, samples)
        assert timeline.measure(samples, TracedStep.peak) == direct.peak()


CIRCUMSTANCES = {
    "scaler": Circumstances(scaler=True),
    "one micro-batch": Circumstances(micro_batches=1),
    "one step": Circumstances(steps=1),
    "ddp": Circumstances(parallelism=Parallelism("ddp", 2)),
    "fsdp2": Circumstances(parallelism=Parallelism("fsdp2", 2)),
}


@pytest.mark.parametrize("optimizer", sample([None, _adamw], 4))
@pytest.mark.parametrize("name", sample(CIRCUMSTANCES, 2))
def test_the_timeline_equals_a_direct_trace_under_all_circumstances(name, optimizer):
    """At the larger size that was traced, whose second optimizer step was not, and beyond it."""
    workload, layout = _workload(GPT(), optimizer), _gpt_layout()
    timeline = trace_timeline(workload, layout, CIRCUMSTANCES[name])
    assert not timeline.interpolated
    for n in (67, 100):
        direct, predicted = trace(workload, layout, n, CIRCUMSTANCES[name]), timeline.at(n)
        assert (predicted.order, predicted.sizes, predicted.blocks) == (direct.order, direct.sizes, direct.blocks)


class Stateful(nn.Module):
    """Keeps what it has made of the last batch in a buffer, as recurrent memory is kept."""

    def __init__(self, *, begins_empty):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("last", None if begins_empty else torch.zeros(2, 16))

    def forward(self, batch):
        hidden = self.layer(batch)
        self.last = hidden.detach()
        return hidden


@pytest.mark.parametrize("begins_empty", sample([True, False], 3))
@pytest.mark.parametrize("circumstances", [Circumstances(), Circumstances(micro_batches=1)])
def test_a_buffer_that_grows_with_the_samples_is_copied_as_it_is(begins_empty, circumstances):
    """The second step begins with a copy of what the first has left, which no step before it shows."""
    workload = _workload(Stateful(begins_empty=begins_empty), run=lambda model, batch: model(batch).square().mean())
    layout = describe(torch.zeros(2, 16))
    timeline = trace_timeline(workload, layout, circumstances)
    for samples in (2, 67, 100):
        direct = trace(workload, layout, samples, circumstances)
        assert timeline.measure(samples, TracedStep.peak) == direct.peak()


@pytest.mark.parametrize("memory", sample([0, 64, 128], 3))
def test_similarities_within_a_batch_and_to_a_memory_are_no_line(memory):
    """A matrix of n rows and n columns more than the memory has lies on a line through any two sizes."""
    model, stored = nn.Linear(16, 16), torch.zeros(memory, 16)

    def run(module, batch):
        hidden = module(batch)
        return (hidden @ torch.cat([hidden, stored.to(hidden.device)]).T).logsumexp(1).mean()

    assert trace_timeline(_workload(model, run=run), describe(torch.zeros(2, 16))).interpolated


class Remembers(nn.Module):
    """Makes a mask of its first batch, and goes another way from the third one on, as what is warmed up does."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.masks = nn.Linear(16, 16), 0, {}

    def forward(self, batch):
        self.calls += 1
        if len(batch) not in self.masks:
            self.masks[len(batch)] = batch.new_ones(len(batch), 16)
        hidden = self.layer(batch * self.masks[len(batch)])
        return hidden if self.calls < 3 else hidden + hidden.tanh()


def test_a_second_step_that_is_no_repetition_is_traced_at_both_sizes():
    """What it takes at more samples does not follow from the first step's."""
    model, layout = Remembers(), describe(torch.zeros(2, 16))
    workload = _workload(model, run=lambda model, batch: model(batch).square().mean())
    timeline = trace_timeline(workload, layout)
    assert not timeline.interpolated
    for samples in (5, 67):
        model.calls, model.masks = 0, {}
        direct, predicted = trace(workload, layout, samples), timeline.at(samples)
        assert (predicted.order, predicted.sizes, predicted.blocks) == (direct.order, direct.sizes, direct.blocks)


def test_memory_that_a_module_drops_is_held_as_the_runner_holds_it():
    """A buffer that a micro-batch replaces is free at once, but for the one from before the step."""

    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.register_buffer("queue", torch.zeros(1000, 16))

        def forward(self, inputs):
            hidden = self.layer(inputs)
            self.queue = torch.cat([hidden.detach(), self.queue])[:1000].clone()
            return (hidden @ self.queue.T).square().mean()

    traced = trace(Workload(Queue(), lambda model, batch: model(batch)), describe(torch.zeros(2, 16)), 4)
    blocks = [*enumerate(traced.blocks)]
    queue = next(i for i, block in blocks if block.phase == "forward" and traced.sizes[i] == 1000 * 16 * 4)
    inputs = [i for i, block in blocks if block.kind == "input"]
    backward = next(i for i, block in blocks if i > inputs[1] and block.phase == "backward")
    made, freed = (traced.order.index(sign * (queue + 1)) for sign in (1, -1))
    assert made < traced.order.index(inputs[1] + 1) < freed < traced.order.index(backward + 1)


def test_what_stands_beside_the_loss_is_told_apart():
    """It stays until the last micro-batch has run; what was there before the forward pass is not counted with it."""
    model = nn.Linear(64, 64)

    def run(module, batch):
        outputs = module(batch)
        return outputs.square().mean(), {"outputs": outputs, "count": torch.zeros(3), "weight": module.weight}

    traced = trace(Workload(model, run, None, _sgd(model)), describe(torch.zeros(2, 64)), 10)
    aux = [index for index, block in enumerate(traced.blocks) if block.kind == "aux"]
    assert [traced.sizes[index] for index in aux] == [10 * 64 * 4] * 4
    # The result of the first step is there until that of the second takes its place.
    last_made = traced.order.index(aux[3] + 1)
    assert all(-(index + 1) not in traced.order[:last_made] for index in aux)


def test_a_model_in_eval_mode_is_traced_in_train_mode_and_stays_as_it_is():
    """As trials and the Runner run it: dropout's masks are memory."""
    model = GPT().eval()
    assert trace(_workload(model), _gpt_layout(), 2).sizes == trace(_workload(GPT()), _gpt_layout(), 2).sizes
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "make", sample([torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop], 3), ids=lambda make: make.__name__
)
def test_an_optimizer_takes_all_parameters_at_once_as_on_a_card(make):
    """Where nobody has chosen torch chooses foreach on CUDA; a choice of the user's stands."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)])
    layout = describe((torch.zeros(2, 256), torch.zeros(2, dtype=torch.long)))

    def peak(**options):
        optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1, **options)
        return trace(Workload(model, step, None, optimizer), layout, 2).peak()

    assert peak() == peak(foreach=True) > peak(foreach=False)
