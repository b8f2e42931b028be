"""Finds on a few samples how the numbers of micro-batches are put together.

These are what a module logs and returns, and its loss. A number may be no mean, such as a count of samples, and a loss
may be a sum. A warning names what no rule makes exact, metrics included. Names that first appear in a later batch are
looked at there. Each sample draws the same random numbers in the whole and in its part, so that numbers are compared
exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from autobatch.batch.samples import Layout, describe
from autobatch.batch.tree import map_tensors
from autobatch.exactness.determinism import deterministic, widen
from autobatch.exactness.sample_numbers import SampleNumbers
from autobatch.integrations.lightning.logs import (
    WAYS,
    Key,
    LogCall,
    Logged,
    Rule,
    Way,
    Weighed,
    combine,
    default_rule,
    group_calls,
    is_running,
    values_of,
)
from autobatch.integrations.lightning.metrics import metrics_in, states_of
from autobatch.integrations.lightning.module_step import MicroBatchOutput, ModuleStep
from autobatch.integrations.lightning.outputs import RETURNED, is_number
from autobatch.memory.oom import describe_error, is_oom
from autobatch.undo.undo import Undo

__all__ = ["LOSS", "KnownNames", "agreed_rules", "find_rules"]

_log = logging.getLogger("autobatch")
_PARTS = ((3, 2), (2, 1), (1, 1))
"""Samples that are compared with their whole: unequal, so that a mean by samples is not one by micro-batches; fewer
where the batch has no more, or memory ends."""
_MOST_SEARCHES = 5
"""After the first batch's: a name that has the batch's number in it is new in each."""
_TOLERANCE = 1e-4
"""Relative; float32 sums of a few samples differ by less, and what is a sum in place of a mean by far more."""
_LOSS_TOLERANCE = 0.02
"""Where the step runs only as it trains: a loss in bfloat16 is a mean or a sum, too."""
_MOST_RUNS = 3
"""A draw may turn out to be made in a loop over the samples, and then to be shared by all."""

LOSS: Key = "loss", RETURNED
"""Of the loss, which is a mean or a sum."""

Run = tuple[Mapping[Key, Weighed], Mapping[str, torch.Tensor]]
"""Numbers that micro-batches have logged and returned, and what metrics hold after them."""


@dataclass
class KnownNames:
    """What a module has logged so far.

    Attributes:
        module: Its class.
        may_search: Whether rules are searched for after the first batch.
        new: Names of the last step whose rules are not known.
    """

    module: str
    may_search: bool
    new: AbstractSet[Key] = frozenset()
    _rules: dict[Key, Rule] = field(default_factory=dict)
    _reset: set[Key] = field(default_factory=set)
    _searches: int = 0
    _has_warned: bool = False

    def note(self, rules: Mapping[Key, Rule]) -> None:
        """Note what was found: names that are not among it, or that have several ways there, are searched for again."""
        self._rules.update(rules)

    def learn(self, logged: Sequence[Logged], *, is_searched: bool) -> bool:
        """Whether the rules of a step's names have to be found; warns of those of which no search is left.

        Args:
            logged: By its micro-batches.
            is_searched: Whether rules were searched for on this batch.
        """
        found = {key: calls for key, calls in group_calls(logged).items() if len(calls) > 1}
        self._warn_of_resets(found)
        self.new = {key for key, calls in found.items() if self._is_new(key, calls)}
        may_search = self.may_search and self._searches < _MOST_SEARCHES
        if self.new and may_search and not is_searched:
            self._searches += 1
            return True
        # Another batch's samples may distinguish the ways of those that were met. A mean is only doubtful beside a sum.
        met = {key for key in self.new if key in self._rules and (may_search or "sum" not in self._rules[key].ways)}
        unknown = self.new - met
        if unknown:
            self._warn_of_new(min(unknown)[0])
        return False

    def _is_new(self, key: Key, calls: Weighed) -> bool:
        """Whether it matters in this step, and is not known, how a name is put together."""
        if key in self._reset or is_running(calls) or default_rule(calls[-1][1]) is None:
            return False
        return _do_ways_differ(self._rules.get(key, Rule(("mean", "sum"))), calls)

    def _warn_of_new(self, name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "%s logs %r, and a comparison of a few samples did not show how to combine it over micro-batches: their "
            "mean is logged, or the value of reduce_fx=; log it in every batch",
            self.module,
            name,
        )

    def _warn_of_resets(self, found: Mapping[Key, Weighed]) -> None:
        """A metric that counts fewer updates than in the micro-batch before, which has seen earlier batches."""
        for key, calls in found.items():
            counts = [call.updates for _, call in calls if call.updates is not None]
            if key in self._reset or not any(one > other for one, other in pairwise(counts)):
                continue
            self._reset.add(key)
            _log.warning(
                "%s logs %r of a metric that it resets in training_step, so only the first micro-batch's value "
                "includes earlier batches: reset the metric in on_train_batch_end, or log the metric",
                self.module,
                key[0],
            )


def find_rules(
    step: ModuleStep, batch: Any, objects: Sequence[Any], only: AbstractSet[Key] | None = None
) -> dict[Key, Rule]:
    """Find the rule of each number that a few samples show, whole and in parts.

    The loss has one where the samples show it to be a mean, or a sum, and not the other.

    Args:
        step: The module's.
        batch: Of which a few samples are run, three times.
        objects: What a step changes outside the module; put back, as the module is.
        only: The names that are looked at; ``None``: all, what is returned, and metrics.
    """
    layout = describe(batch)
    possible = [sizes for sizes in _PARTS if sum(sizes) <= layout.count]
    for is_held in (True, False):
        for sizes in possible:
            found = _try(step, layout, sizes, objects, is_held=is_held)
            if found is not None:
                whole, again, parts = found
                if only is None:
                    _warn_of_metrics(step, whole[1], again[1], parts[1])
                near = _TOLERANCE if is_held else _LOSS_TOLERANCE
                return _compare(step, whole[0], again[0], parts[0], only, near_loss=near)
    return {}


def _try(
    step: ModuleStep, layout: Layout, sizes: Sequence[int], objects: Sequence[Any], *, is_held: bool
) -> list[Run] | None:
    """Run the samples whole, whole again, and in parts; ``None`` where that does not work.

    With draws held still kernels may fail that know only half precision; without, memory may end, and the rest raises.
    """
    module, count = step.module, sum(sizes)
    try:
        with deterministic(module, [*module.parameters()]) if is_held else nullcontext() as random:
            batch = layout.take(range(count))
            few = Layout(map_tensors(batch, widen) if is_held else batch, count, layout.lists)
            # Only now: it would put back the rates of dropout.
            before = Undo(module, next(module.parameters()).device, keep=objects)
            try:
                for _ in range(_MOST_RUNS):
                    runs = [_run(step, few, one, before, random) for one in ((count,), (count,), sizes)]
                    if random is None or not random.take_learned():
                        break
                return runs
            finally:
                before.restore()
    except Exception as error:
        if not is_held and not is_oom(error):
            raise
        _log.info("%d samples could not be compared with their parts: %s", count, describe_error(error))
        step.refusal = ""
        return None


def agreed_rules(found: Iterable[Iterable[Sequence[Any]]]) -> dict[Key, Rule]:
    """Return the rules on which those ranks agree that have one.

    Args:
        found: By rank, of each rule: the key's name and number, and the rule's fields.
    """
    by_key: dict[Key, list[Rule]] = {}
    for name, number, ways, adds_up in chain.from_iterable(found):
        by_key.setdefault((name, number), []).append(Rule(tuple(ways), adds_up))
    agreed = {}
    for key, rules in by_key.items():
        ways = tuple(way for way in rules[0].ways if all(way in rule.ways for rule in rules))
        if ways and len({rule.adds_up for rule in rules}) == 1:
            agreed[key] = Rule(ways, rules[0].adds_up)
    return agreed


def _run(step: ModuleStep, few: Layout, sizes: Sequence[int], before: Undo, random: SampleNumbers | None) -> Run:
    for start, stop in pairwise((0, *accumulate(sizes))):
        with before.watch(few.tensors()):  # a metric may add to its tensors in place
            if random is not None:
                random.begin(range(start, stop), few.count)
            step.run(step.module, few.take(range(start, stop)))
    if random is not None:
        random.end()
    numbers = _numbers_of(step.outputs)
    metrics = {
        f"{name}.{state}": value
        for name, one in metrics_in(step.module).items()
        for state, value in states_of(one).items()
    }
    before.restore()
    # So that what is random, and is not held still, differs from one run to the next.
    torch.rand(len(sizes), device=next(step.module.parameters()).device)
    return numbers, metrics


def _numbers_of(outputs: Sequence[MicroBatchOutput]) -> dict[Key, Weighed]:
    """What was logged, and numbers that were returned, the loss among them."""
    logged: list[Logged] = [(output.weight, output.logged) for output in outputs]
    returned: dict[Key, list[tuple[float, LogCall]]] = {}
    for output in outputs:
        for name, value in {LOSS[0]: output.loss, **output.beside}.items():
            if is_number(value):
                returned.setdefault((name, RETURNED), []).append((output.weight, LogCall(name, value, {})))
    return {**group_calls(logged), **returned}


def _compare(
    step: ModuleStep,
    whole: Mapping[Key, Weighed],
    again: Mapping[Key, Weighed],
    parts: Mapping[Key, Weighed],
    only: AbstractSet[Key] | None,
    *,
    near_loss: float,
) -> dict[Key, Rule]:
    rules: dict[Key, Rule] = {}
    for key, calls in parts.items():
        usual = default_rule(calls[-1][1]) if only is None or key in only else None
        if usual is None or key not in whole or key not in again:
            continue
        if len(calls) == 1:
            continue  # one part alone has logged it: that is no comparison
        call = whole[key][0][1]
        value, repeated = call.value, again[key][0][1].value
        if key == LOSS:
            found = _ways_of_loss(value, calls, near_loss) if _is_near(repeated, value) else ()
            rules.update({key: Rule(found)} if len(found) == 1 else {})
            continue
        if not _is_near(repeated, value):
            rules[key] = usual
            continue
        sizes = [one.options.get("batch_size") for _, one in calls]
        adds_up = None in sizes or call.options["batch_size"] == sum(map(int, filter(None, sizes)))
        ways = dict.fromkeys((usual.way, *WAYS))
        found = tuple(way for way in ways if _is_near(combine(way, *values_of(calls, adds_up=adds_up)), value))
        if not found and key[1] != RETURNED:
            _warn_of_value(step, call)
        is_said = usual.way != "mean" and usual.way in found  # ``log_dict`` passes its default, a mean
        rules[key] = Rule(usual.ways if is_said or not found else found, adds_up)
    return rules


def _ways_of_loss(value: Any, calls: Weighed, near: float) -> tuple[Way, ...]:
    """Those that give the whole's loss; a part whose loss is 0, as without labels, does not show that it adds up."""
    values, weights = values_of(calls, adds_up=True)
    possible: tuple[Way, ...] = ("mean", "sum") if all(map(float, values)) else ("mean",)
    return tuple(way for way in possible if _is_near(combine(way, values, weights), value, near))


def _do_ways_differ(rule: Rule, calls: Weighed) -> bool:
    """Whether it matters for these values which of the rule's ways is taken."""
    if len(rule.ways) == 1:
        return False
    first, *others = [combine(way, *values_of(calls, adds_up=rule.adds_up)) for way in rule.ways]
    return not all(_is_near(first, other) for other in others)


def _is_near(one: Any, other: Any, tolerance: float = _TOLERANCE) -> bool:
    a, b = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return a.shape == b.shape and torch.allclose(a, b.to(a.device), rtol=tolerance, atol=1e-7, equal_nan=True)


def _warn_of_value(step: ModuleStep, call: LogCall) -> None:
    _log.warning(
        "%s logs %r, which is not a mean, sum, largest or smallest value of its samples, so the mean over "
        "micro-batches is logged: log a metric of torchmetrics for the whole batch's value",
        type(step.module).__name__,
        call.name,
    )


def _warn_of_metrics(
    step: ModuleStep,
    whole: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    parts: Mapping[str, torch.Tensor],
) -> None:
    """A metric that takes one number of each micro-batch counts these, and not samples."""
    wrong = [
        name
        for name, value in whole.items()
        if name in again and name in parts and _is_near(again[name], value) and not _is_near(parts[name], value)
    ]
    for name in sorted({name.rpartition(".")[0] for name in wrong}):
        kind = type(step.module.get_submodule(name)).__name__
        _log.warning(
            "%s.%s (%s) does not add up over micro-batches: update it with samples, or pass their number as a weight",
            type(step.module).__name__,
            name,
            kind,
        )
