"""A loss in chunks of its classes: the gradient, what reads the logits, and when fit uses it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.records import ChunkedLoss
from autobatch.step.workload import Workload
from autobatch.strategies.chunked_loss import chunked, find_head

CLASSES, WIDTH, LENGTH = 301, 16, 12


class Words(nn.Module):
    """An embedding, a layer and a head, whose weight may be the embedding's."""

    def __init__(self, *, tied: bool = False, bias: bool = True, frozen: bool = False, classes: int = CLASSES) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.head.requires_grad_(requires_grad=False)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(texts)))


def make_texts(count: int = 4, classes: int = CLASSES, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(classes, (count, length), generator=torch.Generator().manual_seed(0))


def make_labels(texts: torch.Tensor) -> torch.Tensor:
    return texts.roll(1, 1).masked_fill(texts % 5 == 0, -100)


def mean_step(model, texts):
    logits = model(texts)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), make_labels(texts).view(-1))


def sum_step(model, texts):
    logits, labels = model(texts).float()[..., :-1, :].contiguous(), make_labels(texts)[:, 1:]
    loss = nn.CrossEntropyLoss(reduction="sum")(logits.reshape(-1, logits.shape[-1]), labels.flatten())
    return loss / (labels != -100).sum()


def rows_step(model, texts):
    logits = torch.flatten(model(texts), 0, 1)
    losses = F.cross_entropy(logits, make_labels(texts).flatten(), reduction="none")
    return (losses * torch.linspace(0.5, 2, len(losses), dtype=losses.dtype)).sum() + losses.square().mean()


def ignoring_step(model, texts):
    return F.cross_entropy(model(texts).flatten(0, 1).to(torch.float64), texts.flatten(), ignore_index=int(texts[0, 0]))


def run(model: nn.Module, step, texts, *, chunks: bool, autocast: torch.dtype | None = None):
    model = copy.deepcopy(model)
    found = ChunkedLoss(head="head", chunks=16, micro_batch_size=1, logits_bytes=0)
    step = chunked(Workload(model, step), found if chunks else None).step
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        loss = step(model, texts)
    (3 * loss).backward()
    return loss.detach(), [one.grad for one in model.parameters()]


def assert_close(plain, again, bound: float):
    (loss, gradients), (loss_again, gradients_again) = plain, again
    assert loss.dtype == loss_again.dtype
    assert abs(loss - loss_again) <= bound * abs(loss)
    for one, other in zip(gradients, gradients_again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).norm() <= bound * one.norm()


@pytest.mark.parametrize("given", [{}, {"tied": True}, {"bias": False}, {"frozen": True}], ids=str)
@pytest.mark.parametrize("step", [mean_step, rows_step, ignoring_step])
def test_loss_and_gradient_are_those_of_the_plain_step(step, given):
    """To 1e-12 in float64, tied or not, with a bias or a frozen head, whatever the reduction is."""
    model = Words(**given).double()
    assert_close(*(run(model, step, make_texts(), chunks=chunks) for chunks in (False, True)), 1e-12)


@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [
        (torch.float32, None, 2e-6),
        (torch.float32, torch.bfloat16, 0.02),
        (torch.float32, torch.float16, 3e-3),
        (torch.bfloat16, None, 0.03),
        (torch.float64, None, 1e-6),
    ],
)
def test_other_types_differ_by_rounding(dtype, autocast, bound):
    """With a loss in float32, as in Transformers: also under autocast."""
    model = Words(tied=True).to(dtype)
    plain, again = (run(model, sum_step, make_texts(), chunks=chunks, autocast=autocast) for chunks in (False, True))
    assert_close(plain, again, bound)


@pytest.mark.parametrize("classes", [2, 15, 17, 32, 33])
def test_every_class_is_in_one_chunk(classes):
    """Also where there are fewer classes than chunks."""
    model = Words(classes=classes).double()
    texts = make_texts(classes=classes)
    assert_close(*(run(model, mean_step, texts, chunks=chunks) for chunks in (False, True)), 1e-12)


READING = {
    "label smoothing": lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1),
    "class weights": lambda logits, labels: F.cross_entropy(logits, labels, torch.linspace(0.5, 2, CLASSES).double()),
    "a soft cap": lambda logits, labels: F.cross_entropy(30 * torch.tanh(logits / 30), labels),
    "classes that are cut off": lambda logits, labels: F.cross_entropy(logits[:, :250], labels % 250),
    "rows chosen by a mask": lambda logits, labels: F.cross_entropy(logits[labels > 9], labels[labels > 9]),
    "own softmax": lambda logits, labels: -logits.log_softmax(-1).gather(1, labels[:, None]).mean(),
    "a metric first": lambda logits, labels: F.cross_entropy(logits, labels * (logits.argmax(1) >= 0)),
    "a metric without gradients": lambda logits, labels: (
        F.cross_entropy(logits, labels * (logits.detach().max() > -9)) + logits.square().mean()
    ),
    "a second term": lambda logits, labels: F.cross_entropy(logits, labels) + logits.logsumexp(-1).square().mean(),
    "probabilities": lambda logits, labels: F.cross_entropy(logits, F.one_hot(labels, CLASSES).double()),
    "two dimensions of rows": lambda logits, labels: F.cross_entropy(
        logits.view(4, LENGTH, CLASSES).transpose(1, 2), labels.view(4, LENGTH)
    ),
    "another view": lambda logits, labels: F.cross_entropy(logits.view(CLASSES, -1).t(), labels % CLASSES),
}


@pytest.mark.parametrize("loss", READING.values(), ids=READING)
def test_whatever_reads_the_logits_gets_those_of_the_layer(loss):
    """The step is the plain one then, and never has something else in their place."""

    def step(model, texts):
        return loss(model(texts).flatten(0, 1), texts.flatten())

    model = Words().double()
    assert_close(*(run(model, step, make_texts(), chunks=chunks) for chunks in (False, True)), 1e-12)


def test_values_that_leave_the_step_are_those_of_the_layer():
    """A user who returns the logits beside the loss has them in ``result.aux``."""
    model, texts = Words(), make_texts()
    plan = autobatch.fit(model, 4, batch=texts, step=mean_step, check=None, reuse=False, budget="1GiB")
    found = ChunkedLoss(head="head", chunks=16, micro_batch_size=1, logits_bytes=0)

    def step(model, texts):
        logits = model(texts)
        return F.cross_entropy(logits.flatten(0, 1), texts.flatten()), logits

    result = autobatch.Runner(plan.model_copy(update={"chunked_loss": found}), model, step, None).accumulate(texts)
    assert torch.equal(torch.cat([*result.aux]), model(texts))


def test_a_step_that_writes_into_its_logits_is_refused():
    """A loss of the earlier values would be another one."""

    def step(model, texts):
        logits = model(texts).flatten(0, 1)
        logits[:, 0] = -100.0
        return F.cross_entropy(logits, texts.flatten())

    with pytest.raises(autobatch.InvalidArgument, match="writes into its logits"):
        run(Words(), step, make_texts(), chunks=True)


def test_logits_that_are_read_after_the_update_are_refused():
    """The layer's new weight would make others; before the update they are those of the layer."""
    model, texts = Words(), make_texts()
    found = ChunkedLoss(head="head", chunks=16, micro_batch_size=1, logits_bytes=0)
    kept = list[torch.Tensor]()

    def step(model, texts):
        kept.append(model(texts))
        return F.cross_entropy(kept[-1].flatten(0, 1), texts.flatten())

    for _ in range(2):
        chunked(Workload(model, step), found).step(model, texts).backward()
    assert torch.equal(kept[0], model(texts))
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(autobatch.InvalidArgument, match="optimizer"):
        kept[1].argmax(-1)


def test_a_write_into_the_input_of_a_frozen_head_is_refused():
    """Without chunks its gradient does not need that input, and the loss is of the earlier values."""

    def step(model, texts):
        hidden = model.body(model.embed(texts)) * 1
        logits = model.head(hidden)
        hidden.mul_(2)
        return F.cross_entropy(logits.flatten(0, 1), texts.flatten())

    run(Words(frozen=True), step, make_texts(), chunks=False)
    with pytest.raises(autobatch.InvalidArgument, match="input of their layer"):
        run(Words(frozen=True), step, make_texts(), chunks=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_labels_may_be_those_of_the_model(mode):
    """Its passes without gradients are the plain ones."""

    def step(model, texts):
        with mode():
            labels = model(texts).argmax(-1)
        return F.cross_entropy(model(texts).flatten(0, 1), labels.flatten().clone())

    model = Words().double()
    assert_close(*(run(model, step, make_texts(), chunks=chunks) for chunks in (False, True)), 1e-12)


def test_a_function_that_torch_does_not_see_is_refused():
    """It would find no values, and its gradient would be lost."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return torch.zeros(())

        @staticmethod
        def backward(ctx, gradient):
            return torch.zeros(4, LENGTH, CLASSES)

    with pytest.raises(autobatch.InvalidArgument, match="function of its own"):
        run(Words(), lambda model, texts: Own.apply(model(texts)), make_texts(), chunks=True)


def test_a_label_that_is_no_class_raises_as_without_chunks():
    """The error is torch's."""
    with pytest.raises(IndexError):
        run(
            Words(),
            lambda model, texts: F.cross_entropy(model(texts).flatten(0, 1), texts.flatten() + CLASSES),
            make_texts(),
            chunks=True,
        )


# ---------------------------------------------------------------------------------------------------------- in fit

TEXTS = make_texts(4, 2001, 64)


def fit(model: nn.Module, step=mean_step, part: float = 1.0, **options) -> autobatch.Plan:
    """Part of what a micro-batch of one sample needs beside what is resident."""
    given = {"batch": TEXTS, "step": step, "check": None, "reuse": False, "headroom": 0, "max_micro_batch": 1}
    plain = autobatch.fit(model, 4, **given, budget="4GiB")
    resident = plain.trials[0].resident_bytes
    budget = resident + int(part * (plain.peak_bytes - resident))
    return autobatch.fit(model, 4, **given, budget=budget, **{"strategies": ["chunk_loss"], **options})


def make_large(**given) -> Words:
    torch.manual_seed(0)
    return Words(classes=2001, **given).double()


@pytest.mark.parametrize("tied", [True, False])
def test_fit_chunks_a_loss_whose_logits_are_the_peak(tied):
    """The Runner's gradient is the whole batch's, inside the budget, and the model is left as it was."""
    model = make_large(tied=tied)
    plan = fit(model, part=0.6)
    assert plan.chunked_loss is not None
    assert plan.chunked_loss.head == "head"
    assert "loss in chunks" in str(plan)
    assert str(plan.chunked_loss) in plan.explain()
    assert [(trial.outcome, trial.chunked) for trial in plan.trials] == [("oom", False), ("fits", True)]
    plan = autobatch.Plan.model_validate_json(plan.model_dump_json())
    whole, names = copy.deepcopy(model), [*model.state_dict()]
    mean_step(whole, TEXTS).backward()
    runner = autobatch.Runner(plan, model, mean_step, None, weigh=lambda texts: (make_labels(texts) != -100).sum())
    result = runner.accumulate(TEXTS)
    assert result.retries == 0
    assert result.peak_bytes <= plan.budget_bytes
    assert [*model.state_dict()] == names
    assert not any("forward" in vars(module) for module in model.modules())
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 1e-12 * one.grad.norm()


def test_fit_leaves_the_loss_whole_where_a_sample_fits():
    """Chunks cost time."""
    assert fit(make_large(), part=1.1).chunked_loss is None


@pytest.mark.parametrize("part", [0.9, 0.5])
@pytest.mark.parametrize(
    "step",
    [
        lambda model, texts: model(texts).logsumexp(-1).mean(),
        lambda model, texts: F.cross_entropy(model(texts).flatten(0, 1), texts.flatten(), label_smoothing=0.1),
    ],
    ids=["another loss", "an option"],
)
def test_a_loss_that_cannot_be_chunked_is_left_alone(step, part):
    """DoesNotFit says why, and what would help."""
    with pytest.raises(autobatch.DoesNotFit, match="linear_cross_entropy"):
        fit(make_large(), step, part)


def test_a_step_with_a_gradient_in_its_forward_pass_is_left_alone():
    """Which is what the message says."""

    def step(model, texts):
        loss = mean_step(model, texts)
        return loss + torch.autograd.grad(loss, model.head.bias, retain_graph=True)[0].square().sum()

    with pytest.raises(autobatch.DoesNotFit, match="computes a gradient in its forward pass"):
        fit(make_large(), step, part=0.6)


def test_a_model_without_a_head_is_named_where_chunks_were_asked_for():
    """Whoever passes ``"auto"`` need not have one."""
    model = make_large()
    nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(autobatch.DoesNotFit, match=r"no nn\.Linear of the model"):
        fit(model, part=0.6)


def test_a_loss_over_the_whole_batch_is_left_alone():
    """Its samples are represented, and have no loss."""
    step = autobatch.WholeBatch(lambda model, texts: model(texts), lambda rows, _: rows.logsumexp(-1).mean())
    with pytest.raises(autobatch.DoesNotFit, match="over the whole batch does not fit"):
        fit(make_large(), step, part=0.5)


def test_blocks_are_recomputed_too_where_chunks_are_not_enough():
    """Both in one plan, and the step is that of the whole batch."""
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(WIDTH, 200), nn.Tanh(), nn.Linear(200, WIDTH)) for _ in range(12)]
    model = nn.Sequential(nn.Embedding(2001, WIDTH), *body, nn.Linear(WIDTH, 2001)).double()
    plan = fit(model, part=0.35, strategies="auto")
    assert plan.chunked_loss is not None
    assert plan.checkpointing is not None
    whole = copy.deepcopy(model)
    mean_step(whole, TEXTS).backward()
    count = lambda texts: (make_labels(texts) != -100).sum()  # noqa: E731
    result = autobatch.Runner(plan, model, mean_step, None, weigh=count).accumulate(TEXTS)
    assert result.peak_bytes <= plan.budget_bytes
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 1e-12 * one.grad.norm()


def test_the_plan_of_another_model_is_refused():
    """Its head is not there, or it is compiled."""
    plan = fit(make_large(), part=0.6)
    for model in (nn.Sequential(nn.Linear(2, 2)), torch.compile(make_large(), backend="eager")):
        with pytest.raises(autobatch.InvalidArgument, match="loss of head in chunks"):
            autobatch.Runner(plan, model, mean_step, None)


def test_the_head_is_the_layer_with_the_most_outputs():
    """More than its inputs, and with its own forward pass."""
    model = Words()
    assert find_head(model) == "head"
    assert find_head(model.body) == ""
    model.head.forward = model.head.forward
    assert find_head(model) == ""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_are_chunked(kind):
    """A tied head and one that is not, with the model's own loss and with one in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "vocab_size": CLASSES}
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **ids))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes, **ids)
        model = transformers.LlamaForCausalLM(config)
    model, texts = model.double().eval(), make_texts()
    found = ChunkedLoss(head="lm_head", chunks=16, micro_batch_size=1, logits_bytes=0)
    assert find_head(model) == "lm_head"

    def step(model, texts):
        return model(input_ids=texts, labels=make_labels(texts), num_items_in_batch=17).loss

    def lose(logits, labels, vocab_size, **_):
        return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten(), reduction="sum")

    for own, bound in ((None, 1e-6), (lose, 1e-12)):
        ends = []
        for chosen in (None, found):
            one = copy.deepcopy(model)
            if own is not None:
                one.loss_function = own
            loss = chunked(Workload(one, step), chosen).step(one, texts)
            loss.backward()
            ends.append((loss.detach(), [parameter.grad for parameter in one.parameters()]))
        assert_close(*ends, bound)
