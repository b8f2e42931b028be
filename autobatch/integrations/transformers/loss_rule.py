"""Finds how a Trainer's batches are divided and how its loss is read, and checks that this is exact.

1. A loss has one of two readings. It was divided by ``num_items_in_batch``, or is a sum: micro-batches add up. Or it is
   a mean over samples. The loss of a few samples beside those of two parts of them shows which: of 4 parts a sum has 4
   times the value of a mean. ``weigh=`` states a third reading, and nothing is measured.
2. Gradients of a batch and of its parts are compared as in ``autobatch.verify``. The first way to divide that is exact
   is taken; if none is, InexactSplit names the causes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.batch.samples import Layout, describe
from autobatch.errors import AutobatchError, InexactSplit
from autobatch.exactness.determinism import deterministic
from autobatch.exactness.verification import compare_with_parts
from autobatch.integrations.attributes import advise, replaced
from autobatch.integrations.transformers.cuts import Rows, count_labels, has_unequal_lengths
from autobatch.integrations.transformers.trainer_step import TrainerStep, modes_of_training, undone
from autobatch.memory.oom import describe_error
from autobatch.records import Verdict
from autobatch.step.losses import Sum
from autobatch.step.whole_batch import WholeBatch
from autobatch.step.workload import Step, Workload

Reading = Literal[
    "divided by the whole batch's count", "mean over samples", "mean over weigh(batch)", "loss over the whole batch"
]
DIVIDED: Reading = "divided by the whole batch's count"
SAMPLES: Reading = "mean over samples"
WEIGHED: Reading = "mean over weigh(batch)"
WHOLE: Reading = "loss over the whole batch"

_log = logging.getLogger("autobatch")

_FEW = 6  # samples whose losses are read, in parts of 4 and 2: even ones, since two rows may be a pair
_NEAR = 1e-5  # relative error with which a reading explains a loss

_OF_THE_BATCH = ("all alike", "count for nothing", "is not finite")
"""What ``verify`` says if nothing can be compared in this batch; another one may show it."""

_OTHERWISE = "; check='warn' trains anyway"
_NO_CAUSE = "; if it is a mean over something else, state that with attach(trainer, weigh=...)"
_ADVICE = {
    "autobatch.PerStep": " (in a Trainer: multiply the term by the micro-batch's share of the labels, the number "
    "of its labels / num_items_in_batch, in compute_loss)",
    "a dict of losses": " (a Trainer takes one loss: use autobatch.Runner in a loop of your own)",
    "autobatch.Sum": " (in a Trainer: return the sum, and leave weigh= out)",
}


@dataclass(frozen=True)
class LossRule:
    """How batches are divided, and what the loss of a micro-batch is."""

    cut: Rows
    reading: Reading
    step: TrainerStep
    is_exact: bool = False  # a comparison has shown it
    is_guess: bool = False  # nothing could be compared, as with one sample; a later batch is compared

    def run(self, model: nn.Module, micro_batch: Any) -> Any:
        loss = self.step.loss_of(model, self.cut.inputs_of(micro_batch))
        # Shares add up to 1, so the Runner does not divide again what was divided by the whole batch's count.
        return Sum(loss * self.step.scale, self.count(micro_batch)) if self.reading == DIVIDED else loss

    def as_step(self) -> Step:
        """Return the step that runs this rule: in two parts if its loss is over the whole batch."""
        whole, inputs_of = self.step.whole, self.cut.inputs_of
        if whole is None:
            return self.run
        return WholeBatch(
            lambda model, micro_batch: whole.represent(model, inputs_of(micro_batch)),
            lambda embeddings, batch: whole.compare(embeddings, inputs_of(batch)),
        )

    def count(self, micro_batch: Any) -> Any:
        """Return the weight of a micro-batch: its share of the samples of all ranks, its samples, or ``weigh``'s."""
        if self.reading == WEIGHED and self.step.weigh is not None:
            return self.step.weigh(self.cut.inputs_of(micro_batch))
        samples = describe(micro_batch).count
        return samples if self.reading == SAMPLES else samples / self.step.samples / self.step.ranks

    def as_workload(self, model: nn.Module) -> Workload:
        """Return what is compared; without a ``weigh``, the comparison advises one if the loss states no count."""
        weigh = self.count if self.reading == WEIGHED else None
        return Workload(model, self.as_step(), weigh, self.step.trainer.optimizer)

    def __str__(self) -> str:
        loss = self.reading if self.reading == DIVIDED else f"a {self.reading}"
        return f"micro-batches are {self.cut.name}; the loss is {loss}"


# ---------------------------------------------------------------------------------------- what a loss was divided by


def read_loss(loss_of: Callable[[int, int], float], samples: int) -> tuple[Reading | None, float]:
    """Return the reading that is nearest to the losses of a few samples, and by how much it misses them.

    ``loss_of`` returns the loss of the samples from one to before another; there are at least two.
    """
    first = 1 if samples == 2 else samples // 2 + 1
    whole, one, other = loss_of(0, samples), loss_of(0, first), loss_of(first, samples)
    if not all(map(math.isfinite, (whole, one, other))) or not whole or not (one or other):
        return None, math.inf
    mean = (one * first + other * (samples - first)) / samples
    errors: dict[Reading, float] = {DIVIDED: abs(one + other - whole), SAMPLES: abs(mean - whole)}
    nearest: Reading = DIVIDED if errors[DIVIDED] < errors[SAMPLES] else SAMPLES
    return nearest, errors[nearest] / max(map(abs, (whole, one, other)))


def choose_telling(inputs: Any, count: int, most: int) -> list[int]:
    """Choose samples of a batch, from few labels to many and by class; each part has labels, if most samples have."""
    labels, order = count_labels(inputs, count), [*range(count)]
    if labels:
        classes = inputs["labels"].reshape(count, -1)[:, 0].tolist()
        order.sort(key=lambda row: (labels[row], classes[row]))
    few = max(2, min(most, count))  # one sample is taken twice
    rows = [order[index * (count - 1) // (few - 1)] for index in range(few)]
    return [rows[-1], *rows[:-1]]


def _read_in_training(
    step: TrainerStep, cut: Rows, model: nn.Module, inputs: Any, samples: Sequence[Any] | None
) -> tuple[Reading | None, float]:
    """Read the loss of a few samples of a batch; of two if a loss is not a number, or memory runs out."""
    batch = cut.batch_of(inputs, samples)
    layout = describe(batch)
    for most in (_FEW, 2):
        rows = choose_telling(cut.inputs_of(batch), layout.count, most)
        try:
            found = _read_few(step, cut, model, layout, rows)
        except AutobatchError:
            raise
        except Exception as error:  # noqa: BLE001 - the step itself runs later, and raises what is the user's
            _log.info("could not compare the losses of a few samples: %s", describe_error(error))
            continue
        if found[0] is not None:
            return found
    return None, math.inf


def _read_few(
    step: TrainerStep, cut: Rows, model: nn.Module, layout: Layout, rows: Sequence[int]
) -> tuple[Reading | None, float]:
    """Read the loss without dropout, and with the same random numbers for each sample."""
    with ExitStack() as stack:
        device = next(model.parameters()).device
        stack.enter_context(undone(step.trainer, model, device, [step.metrics.weights, step.logs]))
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):  # what a loss was divided by does not depend on its statistics
                stack.enter_context(replaced(layer, "training", value=False))
        random = stack.enter_context(deterministic(model, [*model.parameters()]))

        def loss_of(start: int, stop: int) -> float:
            def run(model: nn.Module, part: Any) -> torch.Tensor:
                random.begin(range(start, stop), len(rows))
                return step.loss_of(model, cut.inputs_of(part))

            loss = Workload(model, run).call_step(layout.part([*rows[start:stop]]).batch)
            return float(loss.detach())

        reading, error = read_loss(loss_of, len(rows))
        random.end()
        if random.take_learned():
            reading, error = read_loss(loss_of, len(rows))
        # A term of its own, such as a penalty, hides both readings.
        if _NEAR < error < math.inf and _uses_count(step, lambda: loss_of(0, len(rows))):
            reading = DIVIDED
        return reading, error


def _uses_count(step: TrainerStep, loss_of: Callable[[], float]) -> bool:
    """Return whether the loss depends on ``num_items_in_batch``, by more than it differs each time."""
    counted = step.num_items
    if counted is None:
        return False
    once, again = loss_of(), loss_of()
    step.num_items = counted * 2
    try:
        changed = loss_of()
    finally:
        step.num_items = counted
    return abs(changed - again) > 10 * abs(again - once) + 1e-3 * abs(once)


# -------------------------------------------------------------------------------------------- whether a rule is exact


def find_rule(
    step: TrainerStep,
    cuts: Sequence[Rows],
    model: nn.Module,
    inputs: Any,
    samples: Sequence[Any] | None,
    *,
    device: Any,
    check: Literal["warn", "raise"] | None,
    known: LossRule | None = None,
    last: LossRule | None = None,
) -> LossRule:
    """Return the first rule by which parts of the batch have the whole batch's gradient.

    ``cuts`` are tried in their order, ``known`` (an exact rule for earlier batches of this kind) first. ``last`` (the
    rule of the batch before) stays if nothing can be compared in this batch. ``check=None`` compares no gradients.
    """
    name, error = type(step.trainer).__name__, 0.0
    with modes_of_training(model):
        reading = known.reading if known else WEIGHED if step.whole is None else WHOLE
        if not known and step.weigh is None and step.whole is None:
            read, error = _read_in_training(step, cuts[0], model, inputs, samples)
            reading = read or (last.reading if last else SAMPLES)
        guess = LossRule(cuts[0], reading, step, is_guess=True)
        if check is None:
            if error > _NEAR:
                _log.warning("%s: could not read the loss as a mean or a sum; training uses: %s", name, guess)
            return replace(guess, is_guess=math.isinf(error))
        if step.samples == 1:
            return guess
        verdicts = _compare(guess, cuts, model, inputs, samples, device=device)
        verdict, rule = verdicts[-1]
        if verdict.exact:
            return replace(rule, is_exact=True, is_guess=False)
        if verdicts[0][0].unchecked and last is not None:
            if not last.is_guess:
                why = f"a batch could not be compared with its parts ({verdict.unchecked})"
                _log.warning("%s: %s; this batch is divided as: %s", name, why, guess)
            return guess
        checked = [one for one in verdicts if one[1].reading == reading and not one[0].unchecked]
        verdict, rule = checked[-1] if checked else verdicts[0]
        if not verdict.unchecked:
            batch = rule.cut.batch_of(inputs, samples)
            explained = compare_with_parts(rule.as_workload(model), batch, device=device, explains=True)
            verdict = verdict if explained.exact or explained.unchecked else explained
    if verdict.unchecked:
        reason = f"{name}: it could not be checked whether this loss can be split: {verdict.unchecked}"
    else:
        reason = f"{name}: no way was found to split this loss exactly: {advise(verdict, _ADVICE)}"
        reason += "" if verdict.causes else _NO_CAUSE
    refuse(check, reason, guess)
    return replace(guess, is_guess=any(one in verdict.unchecked for one in _OF_THE_BATCH))


def _compare(
    guess: LossRule, cuts: Sequence[Rows], model: nn.Module, inputs: Any, samples: Any, *, device: Any
) -> list[tuple[Verdict, LossRule]]:
    """Return the verdicts on all rules up to the first that is exact, or to one if nothing can be compared."""
    other: tuple[Reading, ...] = (SAMPLES if guess.reading == DIVIDED else DIVIDED,)
    readings = (guess.reading, *(() if guess.step.weigh or guess.step.whole else other))
    verdicts: list[tuple[Verdict, LossRule]] = []
    for reading, cut in itertools.product(readings, cuts):
        rule = replace(guess, cut=cut, reading=reading)
        batch = cut.batch_of(inputs, samples)
        verdict = compare_with_parts(rule.as_workload(model), batch, device=device)
        verdicts.append((verdict, rule))
        if verdict.exact or verdicts[0][0].unchecked:
            break
    return verdicts


def refuse(check: Literal["warn", "raise"] | None, reason: str, taken: LossRule) -> None:
    """Raise InexactSplit, or warn and say how training divides the batch instead."""
    if check == "raise":
        raise InexactSplit(f"{reason}{_OTHERWISE}")
    if check == "warn":
        _log.warning("%s; training uses: %s", reason, taken)


# ---------------------------------------------------------------------------------------------- rules by kind of batch

_log = logging.getLogger("autobatch")
_T = TypeVar("_T")

Kind = frozenset[tuple[str, str | int]]

_DATASET = "dataset_name"  # where sentence-transformers names the dataset, by which it chooses the loss
_MOST_TEXTS = 8  # values of another text; after these it is taken for the name of a file or the like


class KnownRules(Generic[_T]):
    """Rules by kind of batch. Two rules with the same ``str`` treat batches alike."""

    def __init__(self, name: str) -> None:
        """Remember nothing; ``name`` is for warnings."""
        self._name = name
        self.clear()

    def clear(self) -> None:
        self._rules: dict[Kind, _T] = {}
        self._batches = Counter[Kind]()
        self._ignored: set[str] = set()

    def find(self, inputs: Any, samples: int) -> tuple[Kind, _T | None]:
        """Count a batch; return its kind, and the rule of that kind if there is one."""
        kind = kind_of(inputs, samples, self._ignored)
        self._batches[kind] += 1
        return kind, self._rules.get(kind)

    def is_due(self, kind: Kind) -> bool:
        """Return whether the last batch of this kind, by its number, is compared with its parts: 1, 2, 4, 8, ..."""
        number = self._batches[kind]
        return number & (number - 1) == 0

    def add(self, kind: Kind, rule: _T) -> None:
        """Remember a rule; ignore from now on what a text adds to kinds, if it has many values that change no rule."""
        self._rules[kind] = rule
        for name in sorted({name for name, value in kind if isinstance(value, str)} - {_DATASET}):
            values = {value for known in self._rules for other, value in known if other == name}
            alike: dict[Kind, list[Kind]] = {}
            for known in self._rules:
                alike.setdefault(frozenset(entry for entry in known if entry[0] != name), []).append(known)
            is_needed = any(len({str(self._rules[kind]) for kind in kinds}) > 1 for kinds in alike.values())
            if len(values) >= _MOST_TEXTS and not is_needed:
                self._ignored.add(name)
                self._batches = Counter({one: sum(self._batches[kind] for kind in alike[one]) for one in alike})
                self._rules = {one: self._rules[kinds[0]] for one, kinds in alike.items()}
                _log.warning(
                    "%s: the text %r of a batch has had %d values, and none changed how the loss is divided, so it is "
                    "ignored from now on: if the loss depends on it, name it %r",
                    self._name,
                    name,
                    len(values),
                    _DATASET,
                )


def kind_of(inputs: Any, samples: int, ignored: set[str]) -> Kind:
    """Return names, dimensions and texts of a batch, and whether its samples differ in length or number of labels."""
    entries = inputs.items() if isinstance(inputs, Mapping) else ()
    shown: list[tuple[str, str | int]] = [
        (str(name), value if isinstance(value, str) else getattr(value, "ndim", -1))
        for name, value in entries
        if name not in ignored
    ]
    shown.append(("unequal lengths", has_unequal_lengths(inputs)))
    shown.append(("unequal labels", len(set(count_labels(inputs, samples))) > 1))
    return frozenset(shown)
