"""``predict``: what it says, that it touches nothing, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from builders.ranks import run_ranks, values_of
from nets import GPT, ConvNet, images, step, tokens
from sampling import sample
from torch import nn
from torch.nn import functional as F
from workloads import bits_of, differences

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.prediction.cards import COMMON, GPUS
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.timeline import combine
from autobatch.prediction.tracing.trace import Circumstances, trace
from autobatch.step.workload import Workload

pytestmark = pytest.mark.predicts


def predict(model=None, batch=None, run=step, **options):
    """A prediction that works, but for the options."""
    model = model or GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {"gpu": "2GiB", "target_batch": 64, **options}
    return autobatch.predict(model, tokens() if batch is None else batch, run, optimizer, **arguments)


@pytest.fixture(scope="module")
def prediction():
    """Of a small transformer, on a card that it fits."""
    return predict(GPT(layers=3))


def test_a_prediction_says_what_fits(prediction):
    """A plan that is marked predicted, within the card, with the margin on top."""
    plan = prediction.plan
    assert plan.predicted
    assert plan.trials == ()
    assert sum(plan.micro_batch_sizes) == 64
    assert (plan.peak_bytes + prediction.context_bytes) * (1 + prediction.margin) <= prediction.gpu.total_bytes
    assert plan.budget_bytes == prediction.gpu.total_bytes - prediction.context_bytes
    assert plan.headroom_bytes == prediction.gpu.total_bytes - int(prediction.gpu.total_bytes / 1.1)
    assert plan.peak_bytes <= plan.limit_bytes
    assert plan.curve.peak_reserved(plan.micro_batch_size) >= plan.peak_bytes
    assert plan.micro_batch_size <= prediction.reach.comfortable <= prediction.reach.tight
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan
    assert "predicted peak" in str(plan)


def test_where_the_memory_goes_adds_up(prediction):
    """To the byte; parameters, gradients and optimizer state are as large as they are."""
    kinds = {part.name: part.byte_count for part in prediction.breakdown}
    point = next(point for point in prediction.points if point.size == prediction.judged_size)
    assert sum(kinds.values()) == point.reserved
    assert prediction.peak_bytes == point.reserved + prediction.context_bytes
    assert list(kinds)[-1] == "held by the allocator beside them"
    parameters = sum(p.nbytes for p in GPT(layers=3).parameters())
    assert kinds["parameter"] == parameters
    assert 2 * parameters <= kinds["optimizer state"] <= 2.1 * parameters
    names = [part.name for part in prediction.modules]
    assert 1 < len(names) == len({*names}) <= 10
    assert any(name.endswith("alike)") for name in names)
    assert prediction.per_sample_bytes > 0


@pytest.mark.slow
def test_common_cards_are_judged(prediction):
    """With the same step; and each that is known, where that is asked for."""
    assert [card.gpu for card in prediction.cards] == [gpu.name for gpu in GPUS if gpu.name in COMMON]
    every = predict(GPT(layers=3), all_cards=True)
    assert [card.gpu for card in every.cards] == [gpu.name for gpu in GPUS]
    assert [card for card in every.cards if card.gpu in COMMON] == [*prediction.cards]
    assert all(card.micro_batch_size == 64 for card in every.cards if card.total_bytes > 2**34)


def test_the_story_has_every_number(prediction):
    """Each in its line, and one line for those in a hurry."""
    story = prediction.explain()
    assert story.startswith(str(prediction))
    assert all(card.gpu in story for card in prediction.cards)
    assert "nothing was run" in str(prediction)


def test_nothing_is_touched():
    """Bit for bit: model, gradients, optimizer, generators, modes, and torch's view of this machine."""
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, images()).backward()
    optimizer.step()
    before, accelerator = bits_of(model, optimizer), torch.accelerator.current_accelerator()
    autobatch.predict(model, images(), step, optimizer, gpu="24GiB", target_batch=16)
    assert differences(bits_of(model, optimizer), before) == []
    assert torch.accelerator.current_accelerator() == accelerator


def test_a_model_on_meta_is_predicted():
    """Larger than this machine: no memory is needed but for the description."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(20_000, 20_000), nn.ReLU(), nn.Linear(20_000, 20_000))
    prediction = autobatch.predict(
        model, torch.zeros(2, 20_000), lambda m, b: m(b).mean(), torch.optim.Adam(model.parameters()), gpu="B200"
    )
    kinds = {part.name: part.byte_count for part in prediction.breakdown}
    assert kinds["parameter"] == 2 * 4 * (20_000**2 + 20_000)


def test_a_card_that_is_too_small_has_no_plan():
    """Said in one line, with what one sample would need."""
    prediction = predict(gpu="1GiB", model=GPT(width=1024, layers=4))
    assert prediction.plan is None
    assert prediction.judged_size == 1
    assert "not even one sample fits" in str(prediction)
    assert prediction.explain()


def test_a_step_that_needs_values_is_refused_with_its_line():
    """The user's own file, line and source."""

    def run(model, batch):
        loss = step(model, batch)
        return loss if loss.item() > 0 else loss * 2

    with pytest.raises(InvalidArgument, match=r"test_predict\.py:\d+: `return loss if loss\.item\(\) > 0"):
        predict(run=run)


def _pad_to_128(model, batch):
    return model(F.pad(batch, (0, 0, 0, -len(batch) % 128))).square().mean()


def _wide():
    return nn.Sequential(nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 16))


@pytest.mark.parametrize("gpu", sample(["2GiB", "1.1GiB"], 2))
def test_a_prediction_holds_where_the_step_is_no_line(gpu):
    """Padding to 128 takes the same at 2 and 67 samples; at the size of the plan it is what a trace there says."""
    model = _wide()
    found = autobatch.predict(model, torch.zeros(2, 16), _pad_to_128, gpu=gpu, target_batch=4096, what_if=True)
    assert found.interpolated
    assert found.proven_at == found.judged_size == found.plan.micro_batch_size > 512
    layout, workload = describe(torch.zeros(2, 16)), Workload(model, _pad_to_128)
    direct = run_apart(lambda: trace(workload, layout, found.judged_size))
    assert found.peak_bytes - found.context_bytes >= combine([direct]).at(found.judged_size).peak() > 2**25
    assert all(change.peak_bytes > 2**25 for change in found.changes)


def test_a_step_that_is_a_line_is_proven_at_the_size_of_the_plan(prediction):
    """By one more trace, and the story says so."""
    assert prediction.proven_at == prediction.judged_size == prediction.plan.micro_batch_size
    assert prediction.doubt == ""
    assert f"the step was traced at {prediction.proven_at} samples" in prediction.explain()


def test_an_error_at_the_predicted_size_comes_out_as_it_was_raised():
    """A plan for this size would meet it; the note says with how many samples."""

    def run(model, batch):
        if len(batch) > 70:
            raise ValueError("too many for me")
        return model(batch).mean()

    with pytest.raises(ValueError, match="too many for me") as caught:
        autobatch.predict(nn.Linear(4, 4), torch.zeros(2, 4), run, gpu="24GiB", target_batch=256)
    assert "with 256 samples" in caught.value.__notes__[0]


def _with_outputs(model, batch):
    outputs = model(batch)
    return outputs.square().mean(), outputs


@pytest.mark.slow
def test_what_is_kept_beside_the_loss_is_of_all_micro_batches_of_two_steps():
    """As a trace of as many says it, within what the allocator rounds: a result lives until the next one is there."""
    model = nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 8192))
    batch, target = torch.zeros(2, 1024), 16384
    found = autobatch.predict(model, batch, _with_outputs, gpu="3.5GiB", target_batch=target)
    count = found.plan.accumulation_steps
    assert count > 3
    workload, circumstances = Workload(model, _with_outputs), Circumstances(micro_batches=count)
    direct = run_apart(lambda: trace(workload, describe(batch), found.judged_size, circumstances))
    estimate = Estimate(combine([direct])).on_card(found.gpu)
    [point] = [point for point in found.points if point.size == found.judged_size]
    assert point.allocated == pytest.approx(estimate.allocated(found.judged_size), rel=0.005)
    # Where such tensors lie, and what is held beside them, is the allocator's: they are added in whole segments.
    assert 0.97 <= point.reserved / estimate.reserved(found.judged_size) <= 1.05
    kinds = {part.name: part.byte_count for part in found.breakdown}
    assert kinds["aux"] == pytest.approx(2 * target * 8192 * 4, rel=0.02)


class _Padded(nn.Linear):
    """Its loss is the mean of what it returns."""


def test_a_predicted_plan_warns_as_one_that_was_tried_does():
    """Of the loss that is taken, of the optimizer that is not there, and of samples that were inferred."""
    tried = autobatch.fit(_Padded(4, 4), 16, device="cpu")
    predicted = autobatch.predict(_Padded(4, 4), gpu="24GiB", target_batch=16).plan
    both = set(tried.warnings) & set(predicted.warnings)
    assert {sentence.split(":")[0] for sentence in both} >= {
        "no optimizer= was given",
        "no step= was given and the output holds no loss",
        "no batch= was given",
    }
    assert predicted.warnings[-1].startswith("predicted: ")


@pytest.mark.slow
def test_a_split_that_is_not_exact_is_warned_of():
    """As fit would, by the layers' names; a step that is not split has nothing to be warned of."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))

    def predict(target):
        batch = torch.empty(4, 64)
        return autobatch.predict(
            model, batch, lambda m, b: m(b).mean(), None, gpu="1GiB", target_batch=target, margin=0.0
        )

    split, whole = predict(10_000_000), predict(64)
    assert split.plan.accumulation_steps > 1
    assert "splitting is not exact here: BatchNorm in train mode (1)" in split.plan.warnings[0]
    assert not [warning for warning in whole.plan.warnings if "BatchNorm" in warning]
    assert (split.plan.model, whole.plan.made_at > 0) == ("Sequential", True)


def step_back(model, batch):
    loss = model(batch).mean()
    loss.backward()
    return loss


def test_what_the_runner_would_refuse_is_refused_here():
    """In the same words: another network that is trained, unless it is frozen; and a step that goes back itself."""
    model, other, batch = nn.Linear(4, 4), nn.Linear(4, 4), torch.zeros(2, 4)

    def run(model, batch):
        return (model(batch) + other(batch)).mean()

    with pytest.raises(InvalidArgument, match=r"trains a parameter of shape \(4, 4\) that is in neither the model nor"):
        autobatch.predict(model, batch, run, gpu="L4")
    with pytest.raises(InvalidArgument, match="the step calls backward: return the loss"):
        autobatch.predict(model, batch, step_back, gpu="L4")
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    assert autobatch.predict(model, batch, run, optimizer, gpu="L4").plan
    other.requires_grad_(False)
    assert autobatch.predict(model, batch, run, gpu="L4").plan


def test_a_prediction_for_several_ranks_is_of_the_largest_share():
    """The target is of all ranks; record, plan and texts say so, and the plan's sizes sum to the first rank's share."""
    found = predict(GPT(layers=3), target_batch=258, world_size=4, data_parallel="fsdp2", gpu="L4")
    assert (found.target_batch, found.world_size, found.data_parallel) == (258, 4, "fsdp2")
    assert (found.shares, found.share, found.units) == ((65, 65, 64, 64), 65, ("blocks.0", "blocks.1", "blocks.2"))
    plan = found.plan
    assert (plan.target_batch, plan.world_size, plan.rank, plan.shares) == (258, 4, 0, found.shares)
    assert sum(plan.micro_batch_sizes) == 65
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan
    assert type(found).model_validate_json(found.model_dump_json()) == found
    assert "rank 0 of 4: 65 of 258 = 1 x 65" in str(found)
    assert "258 samples a step on 4 ranks, each with a shard of it (fsdp2)" in found.explain()
    assert "called with 3 modules (blocks.0 to blocks.2), then the model" in found.explain()
    assert "65 samples a step on the first of 4 ranks, 258 in all" in found.explain_cards()
    assert "The ranks" in found._repr_html_()
    assert max(card.micro_batch_size for card in found.cards) == 65


@pytest.mark.slow
def test_sharding_takes_less_and_replicas_take_more():
    """Of the model, by kind: a quarter of it on each of four ranks, or all of it and buckets of its gradients."""
    kinds = {}
    for strategy in (None, "ddp", "fsdp2"):
        ranks = {} if strategy is None else {"world_size": 4, "data_parallel": strategy}
        found = predict(GPT(layers=3), target_batch=8 * (4 if ranks else 1), **ranks)
        kinds[strategy] = {part.name: part.byte_count for part in found.breakdown}
        assert found.proven_at == found.judged_size
    whole = kinds[None]["parameter"]
    trained = sum(p.numel() for p in GPT(layers=3).parameters())
    assert kinds["ddp"]["bucket"] == 4 * trained + 4 * (trained + 1)
    assert kinds["ddp"]["parameter"] == whole
    assert kinds["fsdp2"]["parameter"] == pytest.approx(whole / 4, rel=0.01)
    assert kinds["fsdp2"]["optimizer state"] == pytest.approx(kinds[None]["optimizer state"] / 4, rel=0.01)


def predict_wrapped():
    """The same for a wrapped model, and for the model inside it with the ranks named."""
    model = GPT(layers=1)
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(model.parameters())

    def ask(model, **ranks):
        found = autobatch.predict(model, tokens(), step, optimizer, gpu="2GiB", target_batch=64, **ranks)
        return found.peak_bytes, found.shares, found.data_parallel

    return ask(wrapped), ask(model, world_size=2, data_parallel="ddp")


def test_a_wrapped_model_is_unwrapped():
    """It says how many ranks there are; nothing is sent, so one of them may ask alone."""
    for answers in values_of(run_ranks(predict_wrapped)):
        assert len(set(answers)) == 1
        assert answers[0][1:] == ((32, 32), "ddp")


@pytest.mark.parametrize("strategy", sample(["ddp", "fsdp2"], 2))
def test_nothing_of_a_rank_is_left(strategy):
    """Parameters, hooks and generators are as before, in a process that has no group."""
    model = GPT()
    before, hooks = bits_of(model), [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    predict(model, world_size=3, data_parallel=strategy)
    assert not differences(before, bits_of(model))
    assert hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert not torch.distributed.is_initialized()
