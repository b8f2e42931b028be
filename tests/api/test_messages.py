"""The text of every error: the user's own inputs, what happened, what to do. Only public doors are used."""

from __future__ import annotations

import itertools
import re
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from calls import fit, make_runner
from texts import Reader, count_tokens, length_of, make_texts, read_step
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset, TensorDataset
from workloads import Everything, Plain, make_batch, mean_step

import autobatch
from autobatch import errors
from autobatch.testing import FakeDevice

ROWS = torch.zeros(4, 2)
ONE_LINE = 400  # characters; what is longer tells a story: DoesNotFit, CannotRetry


def make_stepping_runner():
    """A runner whose step steps the runner's own optimizer."""
    holder = []
    runner = make_runner(step=lambda model, batch: holder[0].step() or mean_step(model, batch))
    holder.append(runner._workload.optimizer)
    return runner


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class SteplessSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def run_out_in_update():
    """Memory ends inside the optimizer's step."""
    model = Plain(torch.float32)
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step)
    autobatch.Runner(plan, model, mean_step, SteplessSGD(model.parameters())).step(make_batch(16))


def run_out_at_one():
    """Memory ends at one sample of a step."""
    device = FakeDevice(lambda n: 10 + n, total_bytes=100)
    runner = make_runner(device=device)
    device.curve = lambda n: 101
    runner.step(make_batch(16))


def save_and_load(text, tmp_path):
    """Load a file with this text."""
    (tmp_path / "plan.json").write_text(text)
    autobatch.Plan.load(tmp_path / "plan.json")


def run_odd_batch():
    """A batch that needs a piece of three where two are allowed."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    plan = autobatch.fit(model, 8, batch=make_batch(4), step=mean_step, max_micro_batch=2, check=None)
    autobatch.Runner(plan, model, mean_step, torch.optim.SGD(model.parameters())).step(make_batch(5))


def predict(model=None, **options):
    """A prediction for an L4."""
    return autobatch.predict(model or Plain(), make_batch(4), mean_step, gpu="L4", **options)


def make_sharded():
    """A model whose parameter says that it is sharded; without a process group none can be."""

    class DTensor(torch.Tensor):
        pass

    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(torch.zeros(4, 6).as_subclass(DTensor))
    return model


def divide_anew():
    """A weight that does not add up is seen in the first step."""
    make_runner(weigh=lambda b: 5.0).step(make_batch(16))


def part_beside_a_mean(model, batch):
    """The mean's total is not known before."""
    loss = mean_step(model, batch)
    return {"mean": autobatch.Mean(loss, count=len(batch[0])), "part": autobatch.Part(loss / 4)}


def two_counts(model, batch):
    """Two terms whose totals cannot be distinguished in one gradient."""
    loss = mean_step(model, batch)
    count = len(batch[0])
    return {"left": autobatch.Mean(loss, count=count), "right": autobatch.Mean(loss, count=2 * count)}


def count_by_turns():
    """Every second micro-batch states no count."""
    calls = itertools.count()

    def step(model, batch):
        loss = mean_step(model, batch)
        return loss if next(calls) % 2 else autobatch.Mean(loss, count=3)

    return step


def weigh_other_terms():
    """Each call counts another term."""
    calls = itertools.count()
    return lambda batch: {f"term {next(calls)}": 1.0}


def count_without_room(batch):
    """Memory ends in the count itself."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def step_through(head):
    """A step with a layer that neither the model nor the optimizer knows."""
    return lambda model, batch: F.cross_entropy(head(model(batch[0])), batch[1])


def write_into_batch(model, batch):
    """Normalise in place."""
    batch[0].mul_(2)
    return mean_step(model, batch)


def call_backward(model, batch):
    """Call backward, as in a loop of one's own."""
    loss = mean_step(model, batch)
    loss.backward(retain_graph=True)
    return loss


def write_gradients(model, batch):
    """Set a gradient."""
    model.head.bias.grad = torch.zeros(4)
    return mean_step(model, batch)


def accumulate_while_accelerate_does():
    """In a loop under ``accelerator.accumulate()``."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    runner = make_runner()
    try:
        with Accelerator(cpu=True, gradient_accumulation_steps=2).accumulate():
            runner.accumulate(make_batch(16))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def fit_with(optimizer=None, hook=lambda parameter: None):
    """A fit with an optimizer of its own, or a hook on the first parameter."""
    model = Plain(torch.float32)
    hook(next(model.parameters()))
    fit(model=model, optimizer=optimizer and optimizer(model.parameters()))


def hook_late(hook):
    """A step after a hook was put on a parameter that only the optimizer holds."""
    scale, runner = nn.Parameter(torch.ones(3)), make_runner()
    runner._workload.optimizer.add_param_group({"params": [scale]})
    hook(scale)
    runner.step(make_batch(16))


def run_cut(groups):
    """A step of a batch of 16 that is divided into these."""
    make_runner(cut=lambda batch, largest: groups).step(make_batch(16))


def fit_texts(lengths=length_of, batch=None, **options):
    """A fit with lengths, but for the changes."""
    texts = make_texts() if batch is None else batch
    given = {"step": read_step, "weigh": count_tokens, "max_micro_batch": 2, "check": None, **options}
    model = Reader()
    return model, autobatch.fit(model, 12, batch=texts, cut=autobatch.by_length(lengths), **given)


def run_texts(batch, **given):
    """A step of a plan with lengths."""
    model, plan = fit_texts()
    options = {"weigh": count_tokens, "cut": autobatch.by_length(length_of), **given}
    autobatch.Runner(plan, model, read_step, None, **options).accumulate(batch)


TABLE = [
    (
        lambda: fit_texts(3),
        "InvalidArgument",
        "by_length(3): length_of cannot be called; pass length_of(batch) -> one length a sample",
    ),
    (
        lambda: fit_texts(lambda batch: [1]),
        "InvalidArgument",
        (
            "length_of() gave 1 lengths for 12 samples: return one whole number a sample, such as lambda batch: "
            'batch["attention_mask"].sum(1)'
        ),
    ),
    (
        lambda: fit_texts(batch=make_texts([6, 6])),
        "InvalidArgument",
        (
            "all samples of the example batch are 6 long, so that it does not show what padding is: pass a batch with "
            "shorter samples, or cut=autobatch.by_length(length_of, dims={'batch[\"tokens\"]': 1, "
            "'batch[\"mask\"]': 1, 'batch[\"labels\"]': 1}, padding='right')"
        ),
    ),
    (
        lambda: fit_texts(batch={**make_texts(), "sound": torch.zeros(12, 60)}),
        "InvalidArgument",
        (
            'the padded length of a batch whose longest sample is 24 could be 24 (batch["labels"]) or 60 '
            '(batch["sound"]): pass cut=autobatch.by_length(length_of, dims={\'batch["tokens"]\': 1, '
            "'batch[\"mask\"]': 1, 'batch[\"labels\"]': 1, 'batch[\"sound\"]': 1}, padding='right'), with the "
            "dimensions that are padded"
        ),
    ),
    (
        lambda: run_texts(make_texts([25, 3])),
        "InvalidArgument",
        (
            "a sample is 25 long, and the longest that fit() tried is 24: nothing untried is run; cut the sample, or "
            "give fit() an example batch with the longest sample"
        ),
    ),
    (
        lambda: run_texts(make_texts(), cut=None),
        "InvalidArgument",
        "the plan was made with cut=by_length(), and this Runner has another cut=: pass the same cut= to both",
    ),
    (
        lambda: make_runner(cut=autobatch.by_length(length_of)),
        "InvalidArgument",
        (
            "the plan was made without by_length(), so nothing is known of shorter samples: pass the same cut= to "
            "fit() and Runner"
        ),
    ),
    (lambda: fit(target_batch=0), "InvalidArgument", "target_batch=0 must be an int of at least 1: it counts samples"),
    (
        lambda: fit(max_micro_batch=1.5),
        "InvalidArgument",
        "max_micro_batch=1.5 must be an int of at least 1: it counts samples",
    ),
    (
        lambda: fit(target_batch=10**9),
        "InvalidArgument",
        (
            "target_batch=1000000000 is more than the 100000000 samples that one optimizer step may have: count what "
            "dimension 0 counts, such as images or texts, not tokens or bytes"
        ),
    ),
    (
        lambda: autobatch.predict(Plain(), make_batch(4), mean_step, gpu="L4", target_batch=10**18),
        "InvalidArgument",
        (
            "target_batch=1000000000000000000 is more than the 100000000 samples that one optimizer step may have: "
            "count what dimension 0 counts, such as images or texts, not tokens or bytes"
        ),
    ),
    *(
        (
            lambda model=model: autobatch.predict(model, ROWS, gpu="L4"),
            "InvalidArgument",
            f"{shown} is not a torch.nn.Module",
        )
        for model, shown in (
            (None, "model=None"),
            ("Linear", "model='Linear'"),
            (len, "model=a builtin_function_or_method"),
            (nn.Linear, "model=the class Linear"),
            ([nn.Linear(2, 2)], "model=a list"),
        )
    ),
    (
        lambda: autobatch.map(nn.Linear, ROWS),
        "InvalidArgument",
        "fn=the class Linear has no weights yet: pass an instance of it",
    ),
    (
        lambda: predict(world_size=0),
        "InvalidArgument",
        "world_size=0 must be an int from 1 to 10000: it counts ranks",
    ),
    (
        lambda: predict(world_size=4, data_parallel="zero3"),
        "InvalidArgument",
        "data_parallel='zero3' is not known; one of 'ddp', 'fsdp2'",
    ),
    (
        lambda: predict(data_parallel="fsdp2"),
        "InvalidArgument",
        "data_parallel='fsdp2' is of several ranks: pass world_size=2 or more, or leave it out",
    ),
    (
        lambda: predict(world_size=4, target_batch=3),
        "InvalidArgument",
        (
            "target_batch=3 is less than one sample for each of 4 ranks: pass target_batch=4 or more, or run on fewer "
            "ranks"
        ),
    ),
    (
        lambda: predict(make_sharded(), world_size=4),
        "InvalidArgument",
        (
            "the parameter weight is sharded (DTensor): predict with the model as it is before fully_shard(), and with "
            "world_size= and data_parallel='fsdp2'"
        ),
    ),
    (
        lambda: fit(target_batch=10**8, max_micro_batch=3),
        "InvalidArgument",
        (
            "target_batch=100000000 would be 33333334 micro-batches of at most 3, more than the 1000000 that one "
            "optimizer step may have: ask for fewer samples, or allow larger micro-batches"
        ),
    ),
    (
        lambda: fit(objective="speed"),
        "InvalidArgument",
        "objective='speed' is not known; one of 'throughput', 'memory'",
    ),
    (lambda: fit(check="stop"), "InvalidArgument", "check='stop' is not known; one of 'warn', 'raise', None"),
    (
        lambda: fit(budget="8 apples"),
        "InvalidArgument",
        "budget='8 apples' is no size: pass bytes as an int, or a text such as '8GiB' or '512MiB'",
    ),
    (
        lambda: fit(headroom=2.0),
        "InvalidArgument",
        "headroom=2.0: a fraction must be at least 0 and less than 1, such as 0.1; for bytes pass an int or '512MiB'",
    ),
    (
        lambda: fit(budget="1MiB", headroom="2MiB"),
        "InvalidArgument",
        "headroom='2MiB' leaves nothing of a budget of 1.0 MiB",
    ),
    (
        lambda: fit(device="cuda"),
        "InvalidArgument",
        "device='cuda', but the model is on cpu; move the model first, or leave device= out",
    ),
    (lambda: fit(model=nn.ReLU()), "InvalidArgument", "ReLU has no parameters: there is nothing to train"),
    (
        lambda: fit(model=nn.Linear(2, 2, device="meta")),
        "InvalidArgument",
        "Linear is on the meta device, which has no memory to run in; move it with to_empty() first",
    ),
    (
        lambda: fit(batch={"x": torch.zeros(8, 6), "y": [torch.zeros(8), torch.zeros(7)]}),
        "InvalidArgument",
        (
            'the number of samples is unclear: batch["x"] has 8, batch["y"][1] has 7; each needs one entry a sample '
            "(what all samples share can live in the step; samples that are joined, as graphs are, go into a type for "
            "autobatch.batches.register)"
        ),
    ),
    (lambda: fit(batch=torch.zeros(0, 6)), "InvalidArgument", "batch has 0 samples: pass a batch of at least one"),
    (
        lambda: fit(batch={"name": "a"}),
        "InvalidArgument",
        "the batch has no samples to count: no tensor or array with dimensions, no list of samples",
    ),
    (
        lambda: fit(batch=[torch.zeros(8, 6), torch.zeros(8, 6)]),
        "InvalidArgument",
        (
            "batch is a list of 2 alike entries, with tensors of 8 rows, and may hold one entry a sample, or fields: "
            "pass autobatch.batches.Samples(batch) or autobatch.batches.Fields(batch) in its stead, or samples stacked "
            "into one tensor"
        ),
    ),
    (
        lambda: fit(batch={"x": torch.zeros(2, 6), "pair": [torch.zeros(2), torch.zeros(2)]}),
        "InvalidArgument",
        (
            'batch["pair"] has 2 entries, every tensor in it has 2 rows, and the batch has 2 samples: pass another '
            'number of samples, or autobatch.batches.Samples(batch["pair"]) or autobatch.batches.Fields(batch["pair"]) '
            "in its stead"
        ),
    ),
    (
        lambda: fit(batch=SimpleNamespace(x=torch.zeros(8, 6))),
        "InvalidArgument",
        (
            "the batch has no samples to count: no tensor or array with dimensions, no list of samples; a "
            "SimpleNamespace is no container that autobatch knows: pass a dict of what it holds, or call "
            "autobatch.batches.register(SimpleNamespace, count=..., take=...) once"
        ),
    ),
    (
        lambda: fit(batch=(torch.zeros(8, 6), SimpleNamespace(y=torch.zeros(8)))),
        "InvalidArgument",
        (
            "batch[1] is a SimpleNamespace, no container that autobatch knows, and a tensor in it has 8 rows, as the "
            "batch has samples: pass a dict of what it holds, or call autobatch.batches.register(SimpleNamespace, "
            "count=..., take=...) once"
        ),
    ),
    (
        lambda: autobatch.batches.register(dict, count=len, take=len),
        "InvalidArgument",
        "register() takes a class of your own, such as a batch of graphs, not dict",
    ),
    (
        lambda: autobatch.batches.register(SimpleNamespace, count=len, take=None),
        "InvalidArgument",
        "register(SimpleNamespace, take=...) needs a function, not a NoneType",
    ),
    (
        lambda: fit(batch=TensorDataset(torch.zeros(0, 6))),
        "InvalidArgument",
        "TensorDataset gave no samples: pass a dataset that does, or a batch",
    ),
    (
        lambda: fit(batch=Stream()),
        "InvalidArgument",
        "Stream gave no samples: pass a dataset that does, or a batch",
    ),
    (
        lambda: fit(model=nn.Sequential(nn.Conv2d(3, 8, 3)), batch=None, step=None),
        "NeedsBatch",
        (
            "Sequential's first layer, 0 (Conv2d), takes 3 channels and leaves height and width open: pass yours as "
            "batch=torch.zeros(1, 3, 224, 224)"
        ),
    ),
    (
        lambda: fit(step=lambda m, b: 1.0),
        "InvalidArgument",
        "step() returned float; it must return a scalar tensor, the mean loss, or (loss, aux)",
    ),
    (
        lambda: fit(step=lambda m, b: m(b[0])),
        "InvalidArgument",
        (
            "step() returned a loss of shape (2, 4); take its mean first: a scalar is needed; other values go "
            "beside it, as (loss, aux)"
        ),
    ),
    (
        lambda: fit(step=lambda m, b: m(b[0]).mean().detach()),
        "InvalidArgument",
        "step() returned a loss without a graph (detached, under no_grad, or every parameter is frozen)",
    ),
    (
        lambda: fit(weigh=lambda b: -1.0),
        "InvalidArgument",
        "weigh() gave -1.0 for a micro-batch of 4; it must be a number from 0 to 1e100",
    ),
    (
        divide_anew,
        "InvalidArgument",
        (
            "weigh() is not additive: it gave 5 for [16] samples and 20 for the same samples as [4, 4, 4, 4]; it must "
            "count something, such as tokens, that adds up"
        ),
    ),
    (
        lambda: fit(model=Everything(), max_micro_batch=8, check="raise"),
        "InexactSplit",
        (
            "splitting is not exact: 4 samples in 1 division, relative error 1.2e+00 (tied: 1.2e+00, embed: 9.9e-01, "
            "norm: 9.6e-01 and 2 more modules): BatchNorm in train mode (norm) normalises each micro-batch by itself; "
            "GroupNorm, or BatchNorm in eval mode, is exact"
        ),
    ),
    (
        lambda: fit(batch=make_batch(1), max_micro_batch=8, check="raise"),
        "InexactSplit",
        (
            "it could not be checked whether splitting is exact: the batch has one sample, and one cannot be split; "
            "check='warn' plans without"
        ),
    ),
    (
        lambda: fit(step=lambda m, b: {}),
        "InvalidArgument",
        "step() returned an empty dict: it must hold the step's losses",
    ),
    (
        lambda: fit(step=lambda m, b: autobatch.Sum(m(b[0]).sum(), "many")),
        "InvalidArgument",
        "Sum(count=) is str; it must be one number",
    ),
    (
        lambda: fit(step=lambda m, b: autobatch.Mean(m(b[0]).mean(), count=True)),
        "InvalidArgument",
        "Mean(count=) is bool; it must be one number",
    ),
    (
        lambda: fit(step=lambda m, b: autobatch.Sum(m(b[0]).sum(), (b[0] > 0).any())),
        "InvalidArgument",
        "Sum(count=) is a tensor of shape () and torch.bool; it must be one number",
    ),
    (
        lambda: fit(step=lambda m, b: autobatch.Mean(m(b[0]).mean(), count=-1)),
        "InvalidArgument",
        "Mean(count=) is -1.0; it must be a number from 0 to 1e100",
    ),
    (
        lambda: fit(step=lambda m, b: {"loss": m(b[0]).mean(), "logits": m(b[0]).detach().mean()}),
        "InvalidArgument",
        (
            "the term 'logits' of step() returned a loss without a graph (detached, under no_grad, or every "
            "parameter is frozen); other values go beside it: return (losses, aux)"
        ),
    ),
    (
        lambda: make_runner(step=two_counts).step(make_batch(16)),
        "InvalidArgument",
        (
            "step() states different counts for its terms ('left': 4, 'right': 8), and their totals must be "
            "known before the first backward pass: pass weigh= that returns a dict of counts by term"
        ),
    ),
    (
        lambda: make_runner(step=two_counts, weigh=lambda b: {"left": len(b[0])}).step(make_batch(16)),
        "InvalidArgument",
        (
            "weigh() gives counts for the terms ['left'], and step() returned ['left', 'right']: the names "
            "must be the same (PerStep and Part terms have no count)"
        ),
    ),
    (
        lambda: make_runner(step=part_beside_a_mean).step(make_batch(16)),
        "InvalidArgument",
        (
            "step() returns a Part ('part') beside a Mean or Sum, whose total is known only after the last "
            "micro-batch: pass weigh= that counts before, or return Parts only"
        ),
    ),
    (
        lambda: make_runner().load_state_dict({**make_runner().state_dict(), "target_batch": 256}),
        "InvalidArgument",
        (
            "the state is of a plan with target_batch=256, and this Runner's has target_batch=16: make it with the "
            "plan with which it was saved (plan.save(path), Plan.load(path))"
        ),
    ),
    (
        lambda: make_runner().load_state_dict({"epoch": 3}),
        "InvalidArgument",
        "state={'epoch': 3}: pass what state_dict() of a Runner returned",
    ),
    (
        lambda: make_runner(backward="backward"),
        "InvalidArgument",
        "backward='backward' cannot be called with a loss: pass backward(loss), such as accelerator.backward",
    ),
    (
        lambda: make_runner(backward=lambda loss: None).step(make_batch(16)),
        "InvalidArgument",
        ("backward= ran no backward pass: it has to run one, such as loss.backward(), on the loss that it is given"),
    ),
    (
        lambda: make_runner(backward=lambda loss: (loss / 4).backward()).step(make_batch(16)),
        "InvalidArgument",
        (
            "backward= multiplies the loss by 0.25, and the Runner has divided it by the whole step's count already: "
            "switch the framework's own accumulation off, such as gradient_accumulation_steps=1"
        ),
    ),
    (
        lambda: make_runner(step=count_by_turns()).step(make_batch(16)),
        "InvalidArgument",
        "step() states a count (Mean, Sum) for one micro-batch and none for another: always state it",
    ),
    (
        lambda: make_runner(step=lambda m, b: autobatch.Mean(mean_step(m, b), count=7), weigh=lambda b: len(b[0])).step(
            make_batch(16)
        ),
        "InvalidArgument",
        (
            "step() states a count of 7 for a micro-batch for which weigh() gives 4: let weigh= count the "
            "same (by term, as a dict, where terms have different counts), or leave weigh= out"
        ),
    ),
    (
        lambda: make_runner(weigh=lambda b: bool((b[0] > 0).any())).step(make_batch(16)),
        "InvalidArgument",
        "weigh() returned bool; it must return one number, or a dict of them by term",
    ),
    (
        lambda: make_runner(weigh=lambda b: {}).step(make_batch(16)),
        "InvalidArgument",
        "weigh() returned an empty dict: it must name the step's terms, or return one number",
    ),
    (
        lambda: make_runner(weigh=lambda b: "all").step(make_batch(16)),
        "InvalidArgument",
        "weigh() returned str; it must return one number, or a dict of them by term",
    ),
    (
        lambda: make_runner(weigh=weigh_other_terms()).step(make_batch(16)),
        "InvalidArgument",
        (
            "weigh() gave counts for 'term 0' in one micro-batch and for 'term 1' in another: name the same "
            "terms each time, with 0 where there is nothing to count"
        ),
    ),
    (
        lambda: make_runner(step=write_into_batch).step(make_batch(16)),
        "InvalidArgument",
        ("step() wrote into its batch in place, so a retry, or the next epoch, would see it changed; work on a copy"),
    ),
    (
        lambda: make_runner(step=call_backward).step(make_batch(16)),
        "InvalidArgument",
        (
            "step() calls backward; return the loss, the Runner does the rest (for a gradient inside the step use "
            "torch.autograd.grad)"
        ),
    ),
    (
        lambda: make_stepping_runner().step(make_batch(16)),
        "InvalidArgument",
        "step() calls optimizer.step(); return the loss, the Runner does the rest",
    ),
    (
        lambda: make_runner(step=write_gradients).step(make_batch(16)),
        "InvalidArgument",
        "step() changed .grad: leave backward() and zero_grad() to the Runner, return the loss only",
    ),
    (
        lambda: make_runner(step=lambda m, b: (mean_step(m, b), mean_step(m, b))).step(make_batch(16)),
        "InvalidArgument",
        (
            "step() returned a second loss, of which no gradient would be taken: return both by name, as "
            '{"left": loss, "right": other}, or (loss, other.detach())'
        ),
    ),
    (
        lambda: fit(step=step_through(nn.Linear(4, 4))),
        "InvalidArgument",
        (
            "step() trains a parameter of shape (4, 4) that is in neither the model nor the optimizer, so a retry "
            "could not take its gradient back: put it into one of them, or freeze it with requires_grad_(False)"
        ),
    ),
    (
        lambda: make_runner(step=step_through(nn.Linear(4, 4))).accumulate(make_batch(16)),
        "InvalidArgument",
        (
            "step() trains a parameter of shape (4, 4) that is in neither the model nor the optimizer, so a retry "
            "could not take its gradient back: put it into one of them, or freeze it with requires_grad_(False)"
        ),
    ),
    (
        lambda: make_runner().step((nn.Linear(6, 6)(make_batch(16)[0]), make_batch(16)[1])),
        "InvalidArgument",
        (
            "a tensor of shape (16, 6) in the batch carries a graph, from which micro-batches are cut off: compute it "
            "inside step(), or detach() it"
        ),
    ),
    (
        lambda: make_runner(weigh=count_without_room).step(make_batch(16)),
        "DoesNotFit",
        (
            "ran out of memory while counting with weigh() (OutOfMemoryError: CUDA out of memory. Tried to allocate "
            "20.00 MiB); the step was undone"
        ),
    ),
    (
        lambda: fit_with(optimizer=torch.optim.LBFGS),
        "InvalidArgument",
        (
            "LBFGS calls a closure several times a step: leave it out (optimizer=None), and call "
            "runner.accumulate(batch) in your closure, after zero_grad(); its loss and .grad are the whole batch's"
        ),
    ),
    (
        lambda: fit_with(hook=lambda p: p.register_post_accumulate_grad_hook(lambda _: None)),
        "InvalidArgument",
        (
            "parameter body.0.weight has a post-accumulate-grad hook: an update inside the backward pass "
            "happens at every micro-batch and cannot be undone; remove the hook, and use an optimizer that is stepped "
            "after the backward pass, such as torch.optim.AdamW, in place of a layerwise one"
        ),
    ),
    (
        lambda: fit_with(hook=lambda p: p.register_hook(lambda _: None)),
        "InvalidArgument",
        (
            "parameter body.0.weight has a gradient hook, which would run on the part of each micro-batch "
            "instead of on the whole gradient; remove it, and do its work on .grad between "
            "runner.accumulate(batch) and your update"
        ),
    ),
    (
        lambda: hook_late(lambda p: p.register_post_accumulate_grad_hook(lambda _: None)),
        "InvalidArgument",
        (
            "the optimizer's parameter of shape (3,) has a post-accumulate-grad hook: an update inside the backward "
            "pass happens at every micro-batch and cannot be undone; remove the hook, and use an optimizer that is "
            "stepped after the backward pass, such as torch.optim.AdamW, in place of a layerwise one"
        ),
    ),
    (
        lambda: make_runner(scaler=object()),
        "InvalidArgument",
        "scaler is an object: pass a torch.amp.GradScaler",
    ),
    (
        lambda: make_runner(scheduler=object()),
        "InvalidArgument",
        "scheduler is an object without step(): pass a scheduler, or leave it out",
    ),
    (
        accumulate_while_accelerate_does,
        "InvalidArgument",
        (
            "accumulate() inside accelerator.accumulate(), where optimizer.step() does nothing for this batch: the "
            "gradient of the next one would be added, and nothing would divide the sum; leave accelerator.accumulate() "
            "out and pass the whole batch, or set gradient_accumulation_steps=1"
        ),
    ),
    (
        lambda: make_runner().step_over(make_batch(16)[0]),
        "InvalidArgument",
        "step_over() takes several batches, such as a list of them; for one batch call step()",
    ),
    (
        lambda: fit(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters())),
        "InvalidArgument",
        (
            "SGD holds none of the parameters of Plain: nothing would be trained; make the optimizer from "
            "model.parameters(), after the model was moved or converted"
        ),
    ),
    (
        lambda: make_runner(max_grad_norm=0.0),
        "InvalidArgument",
        "max_grad_norm=0.0 must be a float greater than 0, or None for no clipping",
    ),
    (
        lambda: make_runner(optimizer=False, max_grad_norm=1.0),
        "InvalidArgument",
        "max_grad_norm= belongs to the update, and this Runner has no optimizer: clip after runner.accumulate(batch)",
    ),
    (
        lambda: make_runner(optimizer=False, scheduler=StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters()), 1)),
        "InvalidArgument",
        ("scheduler= belongs to the update, and this Runner has no optimizer: step it yourself after your update"),
    ),
    (
        lambda: make_runner(optimizer=False).step(make_batch(16)),
        "InvalidArgument",
        "this Runner has no optimizer; use accumulate(batch) and do the update yourself",
    ),
    (
        lambda: make_runner().step_over([make_batch(8), tuple(part[:0] for part in make_batch(8))]),
        "InvalidArgument",
        "batch[0] has 0 samples: pass a batch of at least one (batch 2 of the 2 that this step was given)",
    ),
    (lambda: make_runner().step_over([]), "InvalidArgument", "step_over() was given no batches"),
    (
        lambda: make_runner(cut=8),
        "InvalidArgument",
        (
            "cut= is an int, which cannot be called: pass autobatch.by_length(length_of), or cut(batch, largest) -> "
            "lists of sample indices"
        ),
    ),
    (
        lambda: run_cut(None),
        "InvalidArgument",
        "cut() returned a NoneType: return lists of sample indices, such as [[0, 2], [1, 3]]",
    ),
    (
        lambda: run_cut([*range(16)]),
        "InvalidArgument",
        "cut() gave an int as a group of samples: return lists of sample indices, such as [[0, 2], [1, 3]]",
    ),
    (
        lambda: run_cut([[0, 16]]),
        "InvalidArgument",
        "cut() gave 16 as the index of a sample: the batch has 16, with the indices 0 to 15",
    ),
    (
        lambda: run_cut([range(16), [3]]),
        "InvalidArgument",
        (
            "cut() gave sample 3 twice: each sample of the batch belongs to one group, or the gradient would be that "
            "of another batch"
        ),
    ),
    (
        lambda: run_cut([range(4), range(6, 16)]),
        "InvalidArgument",
        (
            "cut() left out 2 of 16 samples, such as sample 4: each sample of the batch belongs to one group, or the "
            "gradient would be that of another batch"
        ),
    ),
    (
        lambda: fit().settings("keras"),
        "InvalidArgument",
        (
            "settings('keras'): not known; one of 'huggingface', 'lightning', 'accelerate', 'deepspeed', 'torchtitan', "
            "'megatron'"
        ),
    ),
    (
        lambda: fit().settings("megatron", sequence_length=96),
        "InvalidArgument",
        "settings('megatron') are in samples: leave out sequence_length=, which is for 'torchtitan'",
    ),
    (
        lambda: fit().model_copy(update={"world_size": 3}).settings("lightning"),
        "InvalidArgument",
        "settings('lightning'): a target batch of 16 cannot be shared equally by 3 ranks; take a multiple of 3",
    ),
    (
        run_out_at_one,
        "DoesNotFit",
        (
            "step 0 ran out of memory in the forward pass at a micro-batch of one sample; 101 bytes of a budget of 100 "
            "bytes were held before it; OutOfMemoryError: fake device out of memory. Tried to hold 101 bytes for 1 "
            "sample in 100 bytes; everything is as before the step: free memory or give fit() a larger budget="
        ),
    ),
    (
        lambda: fit(model=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), target_batch=9, max_micro_batch=2),
        "DoesNotFit",
        (
            "max_micro_batch=2 leaves a micro-batch of one sample of target_batch=9, and BatchNorm in train mode (1) "
            "cannot run one sample: pass max_micro_batch=3 or more"
        ),
    ),
    (
        run_odd_batch,
        "DoesNotFit",
        (
            "a batch of 5 samples in micro-batches of at most 2 (the plan's max_micro_batch) leaves one of a single "
            "sample, and BatchNorm in train mode (1) cannot run one sample: pass an even number of samples, or plan "
            "with fit(max_micro_batch=3) or more"
        ),
    ),
    (lambda: fit(reuse="no"), "InvalidArgument", "reuse='no' must be True or False"),
    (
        lambda: fit(target_batch=10**400),
        "InvalidArgument",
        (
            "target_batch=an int of about 401 digits is more than the 100000000 samples that one optimizer step may "
            "have: count what dimension 0 counts, such as images or texts, not tokens or bytes"
        ),
    ),
    (
        lambda: fit(batch=5),
        "InvalidArgument",
        (
            "the batch has no samples to count: no tensor or array with dimensions, no list of samples; pass what a "
            "loader yields, not batch=5"
        ),
    ),
    (
        lambda: fit(batch=iter([make_batch(4)])),
        "InvalidArgument",
        (
            "the batch has no samples to count: no tensor or array with dimensions, no list of samples; a "
            "list_iterator can be read only once: pass one batch of it, such as next(iterator)"
        ),
    ),
    (
        lambda: fit(batch={"x": deque([1, 2])}),
        "InvalidArgument",
        (
            "the batch has no samples to count: no tensor or array with dimensions, no list of samples; a deque is not "
            "read as samples: pass a list"
        ),
    ),
    (
        lambda: fit(batch=torch.zeros(4, 6, device="meta")),
        "InvalidArgument",
        (
            "a tensor of shape (4, 6) in the batch is on the meta device and has no values to run: pass real samples "
            "(predict() needs no values)"
        ),
    ),
    (
        lambda: fit(step=lambda m, b: m(b[0]).mean() * 1j),
        "InvalidArgument",
        "step() returned a complex loss; a real one is needed, such as its abs() or its real part",
    ),
    (
        lambda: autobatch.batches.Samples("abc"),
        "InvalidArgument",
        "autobatch.batches.Samples() takes a list of entries, not a str",
    ),
    (
        lambda: fit(device=FakeDevice(lambda n: -5, 100)),
        "InvalidArgument",
        "curve(0) of the FakeDevice gave -5: it must give bytes, a finite number of at least 0",
    ),
    (
        lambda: make_runner(scheduler=torch.optim.lr_scheduler.StepLR),
        "InvalidArgument",
        "scheduler is the class StepLR: pass an instance of it",
    ),
    (
        lambda: autobatch.Plan.load(5),
        "InvalidArgument",
        "Plan.load(5): pass a path, such as 'plan.json'",
    ),
    (
        lambda: fit(device=FakeDevice(lambda n: 50 + 60 * n, total_bytes=100), headroom=0),
        "DoesNotFit",
        (
            "a micro-batch of 1 sample does not fit on fake device: memory ended in the forward pass; 50 bytes were "
            "held, 50 bytes of that before the first sample, and the limit is 100 bytes of a budget of 100 bytes; "
            "OutOfMemoryError: fake device out of memory. Tried to hold 110 bytes for 1 sample in 100 bytes; no other "
            "process is known to hold memory there; what would help: a larger budget= or smaller headroom=, activation "
            "checkpointing, bfloat16 autocast, smaller inputs, an optimizer with less state, or fewer trained "
            "parameters"
        ),
    ),
    (lambda: autobatch.map(None, ROWS), "InvalidArgument", "fn=None must be a function"),
    (lambda: autobatch.map(len, ROWS, on_result=3), "InvalidArgument", "on_result=3 must be a function"),
    (
        lambda: autobatch.map(len, ROWS, collate=list),
        "InvalidArgument",
        "collate= is for samples, and a Tensor has batches: leave it out",
    ),
    (
        lambda: autobatch.map(len, ROWS, to="the host"),
        "InvalidArgument",
        "to='the host' is no device: pass one such as 'cpu', or leave it out",
    ),
    (
        lambda: autobatch.map(len, ROWS, max_piece=0),
        "InvalidArgument",
        "max_piece=0 must be an int of at least 1: it counts samples",
    ),
    (
        lambda: autobatch.map(len, ROWS, to="privateuseone"),
        "InvalidArgument",
        "to='privateuseone' is not here: torch has no memory of it in this process",
    ),
    (
        lambda: autobatch.map(len, ROWS, device="privateuseone:0"),
        "InvalidArgument",
        "device='privateuseone:0' is not here: torch has no memory of it in this process",
    ),
    (
        lambda: autobatch.map(len, ROWS, to="cuda:99"),
        "InvalidArgument",
        "to='cuda:99' is not here: torch has no memory of it in this process",
    ),
    (
        lambda: autobatch.map(len, ROWS, to="meta"),
        "InvalidArgument",
        "to='meta' would drop all values: pass a device with memory, such as 'cpu'",
    ),
    (
        lambda: autobatch.map(nn.Linear(2, 2, device="meta").forward, ROWS),
        "InvalidArgument",
        (
            "device= is needed: Linear is on the meta device, which does not say where its passes run; pass the device "
            "that its weights are brought to"
        ),
    ),
    (
        lambda: autobatch.map(lambda rows: {"x": rows.to_sparse()}, ROWS),
        "InvalidArgument",
        (
            'fn returned a sparse (torch.sparse_coo) Tensor as the result["x"], whose rows cannot be put together: '
            "pass on_result=, or return a dense one, or a list with one tensor a sample"
        ),
    ),
    (
        lambda: next(autobatch.map(torch.Tensor.to_mkldnn, [*ROWS])),
        "InvalidArgument",
        (
            "fn returned a torch._mkldnn Tensor as the result, whose rows cannot be taken apart: return a dense one, "
            "or a list with one tensor a sample"
        ),
    ),
    (
        lambda: autobatch.map(torch.neg, ROWS, cut=autobatch.by_length([1, 2])),
        "InvalidArgument",
        "by_length() has 2 lengths for 4 samples: pass one int a sample, or a function",
    ),
    (
        lambda: list(autobatch.map(torch.neg, iter(ROWS), cut=autobatch.by_length([1, 2]))),
        "InvalidArgument",
        "by_length() has 2 lengths, and there is a sample 2: pass one int a sample, or a function",
    ),
    (
        lambda: autobatch.map(torch.neg, ROWS, cut=autobatch.by_length(5)),
        "InvalidArgument",
        "by_length(5): pass a function that returns a length, or one int a sample in a list",
    ),
    (
        lambda: autobatch.map(torch.neg, ROWS, cut=autobatch.by_length(len)),
        "InvalidArgument",
        (
            "length_of() gave an int for a batch of 4 samples: of one batch it returns one int a sample, such as "
            'lambda batch: batch["attention_mask"].sum(1)'
        ),
    ),
    (
        lambda: next(autobatch.map(torch.neg, list(ROWS), cut=autobatch.by_length(lambda row: 0.5))),
        "InvalidArgument",
        "length_of() gave 0.5 for sample 0: a length is an int of at least 0",
    ),
    (
        lambda: list(autobatch.map(torch.neg, list(ROWS), cut=autobatch.by_length(lambda row: next(iter(()))))),
        "InvalidArgument",
        "length_of() raised StopIteration for sample 0: return an int of at least 0",
    ),
    (
        lambda: autobatch.map(torch.sum, ROWS),
        "InvalidArgument",
        (
            "fn returned a Tensor of shape () as the result for 2 samples; it must return one entry a sample: tensors "
            "with as many rows, or a list as long; several of these in a tuple or a dict"
        ),
    ),
    (
        lambda: autobatch.map(lambda rows: rows.sum(1).expand(len(rows), -1), torch.zeros(5, 2)),
        "InvalidArgument",
        (
            "fn returned a Tensor of torch.float32 with rows of shape (3,) as the result, and a Tensor of "
            "torch.float32 with rows of shape (2,) for the pieces before it, so that they are no one result: pass "
            "samples instead of a batch (a list or a Dataset), whose results stay apart"
        ),
    ),
    (
        lambda: autobatch.map(lambda rows: (rows,) * len(rows), torch.zeros(5, 2)),
        "InvalidArgument",
        (
            "fn returned a tuple of 3 results as the result, and a tuple of 2 results for the pieces before it, so "
            "that they are no one result: return the same ones for all samples"
        ),
    ),
    (
        lambda: autobatch.map(
            lambda rows: {"a": rows, "b": rows} if len(rows) == 2 else {"a": rows}, torch.zeros(5, 2)
        ),
        "InvalidArgument",
        (
            'fn returned a dict with ["a"] as the result, and a dict with ["a"], ["b"] for the pieces before it, so '
            "that "
            "they are no one result: return the same ones for all samples"
        ),
    ),
    (
        lambda: autobatch.map(lambda rows: rows.add_(1), torch.zeros(5, 2)),
        "InvalidArgument",
        "fn wrote into its batch in place, so a piece that is run again would see it changed; work on a copy",
    ),
    (
        lambda: autobatch.map(torch.neg, ROWS, device=FakeDevice(lambda n: 10 + 100 * n, total_bytes=100)),
        "DoesNotFit",
        (
            "sample 0 alone does not fit: 10 bytes of a budget of 100 bytes were held before it; OutOfMemoryError: "
            "fake device out of memory. Tried to hold 110 bytes for 1 sample in 100 bytes: free memory, or pass a "
            "larger budget="
        ),
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), TABLE, ids=[f"{kind}-{text[:40]}" for _, kind, text in TABLE])
def test_the_text_of_each_error(call, kind, text):
    """The whole text, word for word: a message is part of the interface."""
    with pytest.raises(getattr(errors, kind)) as caught:
        call()
    assert str(caught.value) == text
    assert type(caught.value).__name__ == kind
    assert "\n" not in text
    assert len(text) <= ONE_LINE or kind == "DoesNotFit"


def test_cannot_retry_says_that_parameters_may_have_moved():
    """An OOM in the update: what happened, that it was not retried, and what to do."""
    with pytest.raises(errors.CannotRetry) as caught:
        run_out_in_update()
    headroom = re.escape("load your last checkpoint and give fit() the optimizer and more headroom= than ")
    assert re.fullmatch(
        r"ran out of memory inside the optimizer's step \(OutOfMemoryError: CUDA out of memory\. Tried to allocate "
        rf"20\.00 MiB\): parameters may have moved, so step 0 was not retried; {headroom}[\d.]+ [GM]iB",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("text", "place"), [("{}", "target_batch: Field required"), ("nonsense", "the file: Invalid JSON")]
)
def test_a_bad_plan_file_names_the_first_thing_wrong(tmp_path, text, place):
    """The path, the field, and what to do."""
    with pytest.raises(errors.InvalidArgument) as caught:
        save_and_load(text, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'plan.json'} is not a plan that this version reads ({place}")
    assert str(caught.value).endswith("run fit() again and save it")


def test_many_ranks_are_refused_before_anything_runs(monkeypatch):
    """Ranks that do not talk to each other must not begin."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    expected = (
        "4 ranks are running, and gradients of Plain are not summed over them: pass "
        "torch.nn.parallel.DistributedDataParallel(model) or fully_shard(model), or plan on one rank and use "
        "plan.settings()"
    )
    for call in (fit, make_runner):
        with pytest.raises(errors.AutobatchError) as caught:
            call()
        assert str(caught.value) == expected


def test_a_wrong_first_guess_of_the_input_is_the_models_own_error():
    """Where the model's first layer misleads, the user sees the model's error, not ours."""
    model = nn.Sequential(nn.Linear(6, 4))
    model.forward = lambda x: F.conv2d(x, torch.zeros(1, 1, 3, 3))
    with pytest.raises(RuntimeError, match="conv2d"):
        autobatch.fit(model, 4)
