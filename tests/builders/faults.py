"""Memory that ends at every operation of a training step, and what must then be true."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from moving_models import (
    CLASS_WEIGHTS,
    DataDependent,
    Embedded,
    Hidden,
    Hooked,
    KeyEncoder,
    LateTeacher,
    Lazy,
    Normalised,
    Teacher,
    class_weighted_step,
    sum_class_weights,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from workloads import Everything, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import CannotRetry, DoesNotFit, RankFailed
from autobatch.events import Retried
from autobatch.records import Checkpointing, ChunkedLoss
from autobatch.testing import FakeDevice, oom_at

SAMPLES = 8
LARGEST = 4
"""Two micro-batches of four by the plan, of three or fewer in a retry: 3, 3, 2."""


class Convolution(nn.Module):
    """BatchNorm's running statistics move with every forward pass, also with one that fails later."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.convolution(inputs.view(-1, 1, 2, 3)))).flatten(1))


class Transformer(nn.Module):
    """Dropout draws in every layer: a retry must draw what an undisturbed run draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(inputs.view(-1, 3, 2))))


class Tied(nn.Module):
    """One weight used three times inside a checkpoint: its gradient may be written more than once a backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for _ in range(2):
            hidden = checkpoint(self._block, hidden, use_reentrant=self.reentrant)
        return self.head(self.shared(hidden))

    def _block(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.tanh(self.shared(hidden)))


class TwoHeads(nn.Module):
    """Two tasks on one body, and a regulariser in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh())
        self.classes = nn.Linear(8, 4)
        self.value = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(inputs)
        return self.classes(hidden), self.value(hidden)


class TwoViews(nn.Module):
    """Two views of each sample, and a loss over the whole batch with parameters of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = Everything(dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), dtype=dtype))
        self.register_buffer("center", torch.zeros(4, dtype=dtype))

    def represent(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws from every generator, and moves BatchNorm's statistics and a counter."""
        noisy = inputs * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        return self.body(inputs), checkpoint(self.body, noisy, use_reentrant=False)

    def lose(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Draws, moves a buffer, and has a term of a parameter alone."""
        self.center.lerp_(second.detach().mean(0).to(self.center.dtype), 0.1)
        scores = self.scale.exp() * F.dropout(first, 0.2) @ (second - self.center).to(first.dtype).T + self.bias
        return -F.logsigmoid((2 * torch.eye(len(scores), dtype=scores.dtype) - 1) * scores).mean() + self.bias.square()


def represent_views(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.represent(batch[0])


def represent_views_in_bfloat16(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return model.represent(batch[0])


def token_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the tokens that count; the third of each sequence whose label is 0 does not."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), _token_labels(batch).flatten(), ignore_index=-100)


def count_tokens(batch: Any) -> torch.Tensor:
    return (_token_labels(batch) != -100).sum()


def _token_labels(batch: Any) -> torch.Tensor:
    labels = batch[1].unsqueeze(1).repeat(1, 3)
    labels[:, 2] = torch.where(batch[1] == 0, -100, labels[:, 2])
    return labels


def stated_step(model: nn.Module, batch: Any) -> autobatch.Mean:
    """The total is known only after the last micro-batch; what is left to multiply then may not fit."""
    return autobatch.Mean(mean_step(model, batch), count=3 * len(batch[0]))


def augmented_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Draws from Python's and NumPy's generators as well."""
    inputs, labels = batch
    noisy = inputs * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
    return F.cross_entropy(model(noisy), labels)


def autocast_step(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_step(model, batch)


def terms_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A mean over samples, a sum over part of them, and a term that counts once a step."""
    classes, value = model(batch[0])
    chosen = (batch[1] > 0).float()
    squares = ((value[:, 0] - batch[0].sum(1)).square() * chosen).sum()
    return {
        "classes": autobatch.Mean(F.cross_entropy(classes, batch[1]), count=len(batch[1])),
        "value": autobatch.Sum(squares, count=chosen.sum()),
        "weights": autobatch.PerStep(0.01 * model.value.weight.square().sum()),
    }


def weighted_terms_step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Two means over class weights, of which neither total is a whole number."""
    classes, value = model(batch[0])
    weights = CLASS_WEIGHTS[batch[1]]
    squares = (value[:, 0] - 1).square() * weights.sqrt()
    return {
        "classes": F.cross_entropy(classes, batch[1], weight=CLASS_WEIGHTS),
        "value": squares.sum() / weights.sqrt().sum(),
    }


def weigh_terms(batch: Any) -> dict[str, torch.Tensor]:
    weights = CLASS_WEIGHTS[batch[1]]
    return {"classes": weights.sum(), "value": weights.sqrt().sum()}


def count_terms(batch: Any) -> dict[str, Any]:
    return {"classes": len(batch[1]), "value": (batch[1] > 0).sum()}


def divided_step(model: nn.Module, batch: Any) -> autobatch.Sum:
    """Divided by the whole step's count, which is known before."""
    share = len(batch[0]) / SAMPLES
    return autobatch.Sum(mean_step(model, batch) * share, count=share)


def run_backward(loss: torch.Tensor) -> None:
    """A framework's own backward function, with something before and after the pass."""
    torch.zeros(1).add_(1)
    loss.backward()
    torch.zeros(1).add_(1)


@dataclass(frozen=True)
class Case:
    """One training that memory is to end in."""

    name: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    step: Callable[[nn.Module, Any], Any] = mean_step
    weigh: Callable[[Any], Any] | None = None
    dtype: torch.dtype = torch.float32
    scaled: bool = False
    scheduled: bool = False
    max_grad_norm: float | None = 0.05
    taught: bool = False
    backward: Callable[[torch.Tensor], object] | None = None
    represent: Callable[[nn.Module, Any], Any] | None = None
    recomputed: tuple[str, ...] = ()
    chunked: str = ""
    selective: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def make_step(self, model: nn.Module) -> tuple[Callable[[nn.Module, Any], Any], tuple[Any, ...]]:
        """The step, and what it changes outside the model."""
        if self.represent is not None:
            return autobatch.WholeBatch(self.represent, lambda views, _: model.lose(*views)), ()
        if not self.taught:
            return self.step, ()
        teacher = Teacher()
        return teacher.step, (teacher,)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A momentum buffer a parameter, made in the first step."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_dropout() -> nn.Module:
    """Draws in every forward pass, and nothing else."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4))


def make_blocks(width: int = 8) -> nn.Module:
    """Two blocks that draw, and a head."""
    blocks = [nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 6)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 4))


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw_foreach(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def adamw_fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def sparse_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=0.01)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


CASES = (
    Case("convolution + BatchNorm, SGD", Convolution, sgd),
    Case(
        "transformer + dropout, weighed by tokens, AdamW foreach", Transformer, adamw_foreach, token_step, count_tokens
    ),
    Case("tied + checkpoint, AdamW fused", lambda: Tied(reentrant=False), adamw_fused),
    Case("tied + reentrant checkpoint, SGD", lambda: Tied(reentrant=True), sgd, augmented_step),
    Case("frozen parts, buffers, AdamW foreach", Everything, adamw_foreach, augmented_step, scheduled=True),
    Case("mixed precision + GradScaler, SGD", Everything, sgd, autocast_step, scaled=True, scheduled=True),
    Case("bfloat16, AdamW fused", lambda: Everything(torch.bfloat16), adamw_fused, dtype=torch.bfloat16),
    Case("stated mean + GradScaler, SGD", Everything, sgd, stated_step, scaled=True),
    Case("several loss terms, AdamW foreach", TwoHeads, adamw_foreach, terms_step, count_terms, max_grad_norm=None),
    Case("key encoder moved in place, SGD", lambda: KeyEncoder(way="in place"), sgd),
    Case("key encoder moved through .data, SGD", lambda: KeyEncoder(way="data in place"), sgd),
    Case("key encoder whose .data is assigned, SGD", lambda: KeyEncoder(way="data assigned"), sgd),
    Case("key encoder copied into, scaled, SGD", lambda: KeyEncoder(way="copied"), sgd, autocast_step, scaled=True),
    Case("teacher made in forward and hidden, AdamW foreach", LateTeacher, adamw_foreach),
    Case("trained weights that forward moves, AdamW fused", Normalised, adamw_fused),
    Case("state in plain attributes, SGD", Hidden, sgd, augmented_step),
    Case("buffer and parameter registered in forward, SGD", DataDependent, sgd, max_grad_norm=None),
    Case("lazy modules, AdamW foreach", Lazy, adamw_foreach),
    Case("hooks and flags that forward sets, SGD", Hooked, sgd),
    Case("class weights, SGD", TwoHeads, sgd, weighted_terms_step, weigh_terms),
    Case("one class-weighted loss, AdamW fused", make_dropout, adamw_fused, class_weighted_step, sum_class_weights),
    Case("sparse embedding, plain SGD", Embedded, plain_sgd, max_grad_norm=None),
    Case("sparse embedding, SparseAdam", Embedded, sparse_adam, max_grad_norm=None),
    Case("sparse embedding, Adagrad", Embedded, adagrad, max_grad_norm=None),
    Case("divided before, a backward of one's own, SGD", Everything, sgd, divided_step, backward=run_backward),
    Case("teacher outside the model, kept, SGD", lambda: nn.Linear(6, 4), sgd, taught=True),
)


WHOLE_BATCH_CASES = (
    Case("whole batch, SGD", TwoViews, sgd, represent=represent_views),
    Case(
        "whole batch, mixed precision + GradScaler, AdamW foreach",
        TwoViews,
        adamw_foreach,
        scaled=True,
        represent=represent_views_in_bfloat16,
    ),
    Case(
        "whole batch in bfloat16, a backward of one's own, AdamW fused",
        lambda: TwoViews(torch.bfloat16),
        adamw_fused,
        dtype=torch.bfloat16,
        backward=run_backward,
        represent=represent_views,
    ),
)
"""Steps in two passes: memory may end in either of them, or in the loss between them."""

CHECKPOINTED_CASES = (
    Case(
        "a block with dropout recomputed, weighed by tokens, AdamW foreach",
        *(Transformer, adamw_foreach, token_step, count_tokens),
        recomputed=("layer",),
    ),
    Case(
        "blocks recomputed, mixed precision + GradScaler, SGD",
        *(make_blocks, sgd, autocast_step),
        scaled=True,
        scheduled=True,
        recomputed=("0", "1"),
    ),
    Case(
        "a block with dropout recomputed selectively, weighed by tokens, AdamW foreach",
        *(Transformer, adamw_foreach, token_step, count_tokens),
        recomputed=("layer",),
        selective=("layer",),
    ),
    Case(
        "a block recomputed and one selectively, mixed precision + GradScaler, SGD",
        *(make_blocks, sgd, autocast_step),
        scaled=True,
        scheduled=True,
        recomputed=("0", "1"),
        selective=("1",),
    ),
    Case(
        "a block recomputed and one offloaded, AdamW foreach",
        *(lambda: make_blocks(4096), adamw_foreach),  # one sample's activations have the bytes that are moved
        recomputed=("0", "1"),
        offloaded=("1",),
    ),
)
"""Steps that recompute or offload blocks: memory may end in the recomputation, or in a copy."""

CHUNKED_CASES = (
    Case(
        "a loss in chunks and a block recomputed, weighed by tokens, AdamW foreach",
        *(Transformer, adamw_foreach, token_step, count_tokens),
        recomputed=("layer",),
        chunked="head",
    ),
    Case(
        "a loss in chunks, mixed precision + GradScaler, SGD",
        *(make_dropout, sgd, autocast_step),
        scaled=True,
        chunked="2",
    ),
)
"""Steps whose loss is computed in chunks of its classes: memory may end in each."""


class Scaler(torch.amp.GradScaler):
    """Says when the update begins: ``step`` reads what ``unscale_`` has found before it steps the optimizer."""

    begin: Callable[[], None]

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.begin()
        return super().step(optimizer, *args, **kwargs)


class Training:
    """A case from its seed on: two of them are equal bit for bit until their steps differ."""

    def __init__(self, case: Case, *, earlier_steps: int = 0, earlier_gradients: bool = False) -> None:
        _seed()
        self.case = case
        self.events: list[Any] = []
        self.where = "elsewhere"
        self.device = Roomy()
        self.model = case.make_model()
        self.step, self.kept = case.make_step(self.model)
        self.optimizer = case.make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.scaler = Scaler("cpu", init_scale=1024.0, growth_interval=1) if case.scaled else None
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5) if case.scheduled else None
        self.when_update: Callable[[], None] = lambda: None
        self.optimizer.register_step_pre_hook(lambda *_: self._begin_update())
        if self.scaler is not None:
            self.scaler.begin = self._begin_update
        self.runner = self._make_runner()
        _seed()
        for number in range(earlier_steps):
            self.runner.step(make_batch(SAMPLES, case.dtype, seed=100 + number))
        self.where = "elsewhere"
        if earlier_gradients:
            for index, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
                has_shape = not isinstance(parameter, nn.parameter.UninitializedParameter)
                parameter.grad = torch.full_like(parameter, 0.01) if index % 2 and has_shape else None
        self.batch = make_batch(SAMPLES, case.dtype)

    def state(self) -> dict[str, Any]:
        return {
            **bits_of(self.model, self.optimizer),
            "numpy": np.random.get_state(legacy=False),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "kept": [{**teacher.state_dict(), **bits_of(teacher.model)} for teacher in self.kept],
            "runner": (self.runner.steps, self.runner.micro_batch_size),
        }

    def _make_runner(self) -> autobatch.Runner:
        case = self.case
        step: Any = self._step
        if isinstance(self.step, autobatch.WholeBatch):
            step = autobatch.WholeBatch(self._note("forward", self.step.represent), self._note("loss", self.step.loss))
        return autobatch.Runner(
            self._plan(),
            self.model,
            step,
            self.optimizer,
            weigh=None if case.weigh is None else self._weigh,
            scaler=self.scaler,
            max_grad_norm=case.max_grad_norm,
            scheduler=self.scheduler,
            hooks=[self.events.append],
            keep=self.kept,
            backward=case.backward,
            device=self.device,
        )

    def _plan(self) -> autobatch.Plan:
        return plan_of(self.case)

    def _begin_update(self) -> None:
        self.where = "optimizer"
        self.when_update()

    def _step(self, model: nn.Module, batch: Any) -> Any:
        return self._note("forward", self.step)(model, batch)

    def _note(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.where = place
            try:
                return function(*arguments)
            finally:
                self.where = "elsewhere"

        return call

    def _weigh(self, batch: Any) -> Any:
        self.where = "weigh"  # until the step is called: a count that is a tensor is read after this has returned
        return self.case.weigh(batch)


class Roomy(FakeDevice):
    """Room for everything: only planned operations run out of memory, and the CPU counts nothing."""

    def __init__(self) -> None:
        super().__init__(lambda n: 10 + n, total_bytes=1000)
        self.in_micro_batch = False

    @contextmanager
    def micro_batch(self, samples: int) -> Iterator[None]:
        self.in_micro_batch = True
        try:
            with super().micro_batch(samples):
                yield
        finally:
            self.in_micro_batch = False


@cache
def plan_of(case: Case) -> autobatch.Plan:
    """The plan of a case, from a model of its own."""
    model = case.make_model()
    plan = autobatch.fit(
        model,
        SAMPLES,
        batch=make_batch(SAMPLES, case.dtype),
        step=case.make_step(model)[0],
        weigh=case.weigh,
        optimizer=case.make_optimizer([p for p in model.parameters() if p.requires_grad]),
        device=Roomy(),
        max_micro_batch=LARGEST,
        check=None,
    )
    if case.chunked:
        chunked = ChunkedLoss(head=case.chunked, chunks=16, micro_batch_size=LARGEST, logits_bytes=0)
        plan = plan.model_copy(update={"chunked_loss": chunked})
    return recompute_blocks(plan, case) if case.recomputed else plan


def recompute_blocks(plan: autobatch.Plan, case: Case) -> autobatch.Plan:
    peak = plan.peak_bytes
    found = {"micro_batch_size": LARGEST, "plain_bytes": peak, "peak_bytes": peak, "slowdown": 0.0}
    found |= {"blocks": case.recomputed, "selective": case.selective, "offloaded": case.offloaded}
    chosen = Checkpointing(candidates=len(case.recomputed), **found)
    return plan.model_copy(update={"checkpointing": chosen})


def _seed() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


class _Places(TorchDispatchMode):
    """Writes down, for each operation that ``oom_at`` counts, in which part of the step it is."""

    def __init__(self, training: Training, counted: Any) -> None:
        super().__init__()
        self.training, self.counted = training, counted
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counted.operations
        in_backward = torch._C._current_graph_task_id() != -1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            place = "backward" if in_backward else self.training.where
            if place == "elsewhere" and _runs_in("_check_counts"):
                place = "weigh"  # as there: what ends in it is asked again or left out, and no micro-batch is undone
            if place == "elsewhere" and (self.training.device.in_micro_batch or _runs_in("_run_micro_batches")):
                place = "around"
            self.places += [place] * (self.counted.operations - before)


def _runs_in(name: str) -> bool:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def places_of(case: Case, kind: type[Training] = Training, **options: Any) -> list[str]:
    """For each operation of one step of a training of this kind: "weigh", "forward", "backward", "clip" or "optimizer".

    What is neither the user's step nor autograd nor the optimizer counts as forward before the last backward pass (the
    loss's share, copies of buffers), as backward in the rest of the last micro-batch (the sum of the losses), as clip
    before the optimizer's step (its state, unscaling, clipping), and as optimizer from there on.
    """
    training = kind(case, **options)
    with oom_at(10**9) as counted, _Places(training, counted) as written:
        training.runner.step(training.batch)
    places = written.places
    last_backward = len(places) - 1 - places[::-1].index("backward")
    first_update = places.index("optimizer") if "optimizer" in places else len(places)
    for index, place in enumerate(places):
        if place in ("elsewhere", "around"):
            after = "backward" if place == "around" else "clip" if index < first_update else "optimizer"
            places[index] = "forward" if index < last_backward else after
    return places


@dataclass
class Tally:
    """The outcomes of the faults of one case.

    Attributes:
        places: How many faults there were in each part of the step.
        outcomes: "committed": without a retry; "restarted": committed after the step began again;
            "undone": ``DoesNotFit``, everything as before; "raised": the error itself came out, everything as before;
            "reported": ``CannotRetry``; "wrong".
        wrong: The first few wrong outcomes.
    """

    places: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, place: str, outcome: str) -> None:
        """Count one fault; an outcome that is none of these is wrong."""
        self.places[place] += 1
        good = outcome in OUTCOMES
        self.outcomes[outcome if good else "wrong"] += 1
        if not good:
            self.wrong.append(f"{place}: {outcome}")

    def merge(self, other: Tally) -> None:
        self.places += other.places
        self.outcomes += other.outcomes
        self.wrong += other.wrong

    def __str__(self) -> str:
        faults = " + ".join(f"{self.places[place]} {place}" for place in PLACES)
        return f"{faults} -> " + ", ".join(f"{self.outcomes[name]} {name}" for name in (*OUTCOMES, "wrong"))


PLACES = ("weigh", "forward", "loss", "backward", "clip", "optimizer")
OUTCOMES = ("committed", "restarted", "undone", "raised", "reported")
RIGHT = {
    "weigh": {"committed"},
    "forward": {"committed", "restarted"},
    "loss": {"restarted"},
    "backward": {"restarted"},
    "clip": {"undone"},
    "optimizer": {"reported"},
}
"""What may come of a fault in each place. ``weigh`` counts before anything is run: it is asked again."""


class Judge:
    """Says what came of a fault in one case; the undisturbed runs it compares with are made once each."""

    def __init__(self, case: Case, training: type[Training] = Training, **options: Any) -> None:
        self.case, self.training, self.options = case, training, options
        self._committed: dict[tuple[int, ...], tuple[dict[str, Any], torch.Tensor]] = {}

    def outcome(self, fault: AbstractContextManager[Any]) -> str:
        """Run one step with the fault in it; returns an outcome, or what is wrong."""
        training = self.training(self.case, **self.options)
        before = training.state()
        ending, result = self._attempt(training, fault)
        # Only now is the traceback gone: in torch 2.8 it keeps the hooks of a checkpoint active that was interrupted.
        return self._judge(training, before, ending, result)

    def _attempt(self, training: Training, fault: AbstractContextManager[Any]) -> tuple[str, Any]:
        """How a step with the fault in it ended, if it did not succeed, and its result."""
        try:
            with fault:
                return "", training.runner.step(training.batch)
        except CannotRetry:
            return "reported", None
        except (DoesNotFit, RankFailed):
            return "undone", None
        except (torch.OutOfMemoryError, KeyboardInterrupt, ValueError):  # BatchNorm refuses one sample
            return "raised", None
        except Exception as error:
            return f"{type(error).__name__} came out: {error}", None

    def _judge(self, training: Training, before: dict[str, Any], ending: str, result: Any) -> str:
        if ending in ("undone", "raised"):
            return self._judge_undone(training, before, ending)
        return ending or self._judge_committed(training, result)

    def _judge_undone(self, training: Training, before: dict[str, Any], outcome: str) -> str:
        changed = differences(training.state(), before)
        if changed:
            return f"not undone: {changed[:3]}"
        result = training.runner.step(training.batch)
        verdict = self._judge_committed(training, result)
        return outcome if verdict in OUTCOMES else f"{outcome}, but the next try is {verdict}"

    def _judge_committed(self, training: Training, result: Any) -> str:
        state, loss = self._commit(result.micro_batch_sizes)
        changed = differences(_comparable(training.state()), state)
        if changed or not torch.equal(result.loss, loss):
            return f"sizes {result.micro_batch_sizes} differ at {changed[:3] or 'the loss'}"
        return "restarted" if any(isinstance(event, Retried) for event in training.events) else "committed"

    def _commit(self, sizes: tuple[int, ...]) -> tuple[dict[str, Any], torch.Tensor]:
        """The run that used these micro-batches from the start."""
        if sizes not in self._committed:
            training = self.training(self.case, **self.options)
            cut_into(training.runner, sizes)
            result = training.runner.step(training.batch)
            assert (result.micro_batch_sizes, result.retries) == (sizes, 0)
            self._committed[sizes] = _comparable(training.state()), result.loss
        return self._committed[sizes]


def cut_into(runner: autobatch.Runner, sizes: tuple[int, ...]) -> None:
    """Let a runner cut its batch into these sizes."""
    accumulation: Any = runner._accumulation
    cut = accumulation._cut

    def cut_anew(groups: Any, largest: int) -> Any:
        [group] = groups
        if largest >= len(group.rows):
            return cut(groups, largest)
        stops = accumulate(sizes)
        parts = [(group._replace(rows=range(stop - size, stop)), size) for stop, size in zip(stops, sizes, strict=True)]
        return [micro_batch for part, size in parts for micro_batch in cut([part], size)]

    accumulation._cut = cut_anew


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Without what two trainings cannot share, and the size for the next step, which a retry makes smaller."""
    return {k: v for k, v in state.items() if not k.startswith("gradient object") and k != "runner"}


def prove(case: Case, stride: int = 1, **options: Any) -> Tally:
    """Let memory end at each operation of one step, or at some in each of its places, a fresh training each."""
    judge, tally, places = Judge(case, **options), Tally(), places_of(case, **options)
    for position in spread_positions(
        places, stride, first=(*CASES, *WHOLE_BATCH_CASES, *CHECKPOINTED_CASES, *CHUNKED_CASES).index(case)
    ):
        place, outcome = places[position - 1], judge.outcome(oom_at(position))
        if outcome in OUTCOMES and outcome not in RIGHT[place]:
            outcome = f"{outcome} at operation {position}, where only {sorted(RIGHT[place])} is right"
        tally.add(place, outcome)
    return tally


def spread_positions(places: Sequence[str], stride: int, first: int = 0) -> list[int]:
    """Every so-manieth operation of each place, counted from 1; of a place that is too short for that, the last."""
    chosen: list[int] = []
    for place in PLACES:
        found = [position for position, name in enumerate(places, start=1) if name == place]
        chosen += found[first % stride :: stride] or found[-1:]
    return sorted(chosen)


class InterruptAt(TorchDispatchMode):
    """The user presses Ctrl-C at the n-th operation; here views and copies count too."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations == self.position:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def count_before_update(case: Case, **options: Any) -> int:
    """How many operations ``InterruptAt`` counts in one step before the optimizer's own."""
    training, counted = Training(case, **options), []
    with InterruptAt(-1) as interrupt:
        training.when_update = lambda: counted.append(interrupt.operations)
        training.runner.step(training.batch)
    return counted[0]
