"""Finds on a few samples how what a module logs is put together from micro-batches.

Covers values that are no mean, such as a number of samples, and warns of those that no rule makes exact, metrics
included; and names that first appear in a later batch. Does not cover gradients, which ``fit`` compares.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch

from autobatch.batch.layout import Layout, describe
from autobatch.integrations.lightning.logs import (
    WAYS,
    Key,
    LogCall,
    Logged,
    Rule,
    Weighed,
    combine,
    default_rule,
    group_calls,
    is_running,
    values_of,
)
from autobatch.integrations.lightning.metrics import metrics_in, states_of
from autobatch.integrations.lightning.module_step import ModuleStep
from autobatch.memory.oom import is_oom
from autobatch.state.rewind_point import RewindPoint

__all__ = ["KnownNames", "agreed_rules", "find_rules"]

_log = logging.getLogger("autobatch")
_PARTS = ((3, 2), (2, 1), (1, 1))
"""Samples that are compared with their whole: unequal, so that a mean by samples is not one by micro-batches; fewer
where the batch has no more, or memory ends."""
_MOST_SEARCHES = 5
"""After the first batch's: a name that has the batch's number in it is new in each."""
_TOLERANCE = 1e-4
"""Relative; float32 sums of a few samples differ by less, and what is a sum in place of a mean by far more."""

Run = tuple[list[Logged], dict[str, torch.Tensor]]
"""What micro-batches have logged, and what metrics hold after them."""


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
    _known: set[Key] = field(default_factory=set)
    _open: set[Key] = field(default_factory=set)
    _reset: set[Key] = field(default_factory=set)
    _searches: int = 0
    _has_warned: bool = False

    def note(self, rules: Mapping[Key, Rule]) -> None:
        """Note what was found: names that are not among it, or open there, are searched for again."""
        self._known |= {key for key, rule in rules.items() if not rule.is_open}
        self._open |= {key for key, rule in rules.items() if rule.is_open}

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
        # Of those that a search has met as zeros alone, another batch's samples will say more.
        unknown = self.new - self._open if may_search else self.new
        if unknown:
            self._warn_of_new(min(unknown)[0])
        return False

    def _is_new(self, key: Key, calls: Weighed) -> bool:
        """Whether it matters in this step, and is not known, how a name is put together."""
        if key in self._known or key in self._reset or is_running(calls):
            return False
        return default_rule(calls[-1][1]) is not None and not _is_any_way_right(*values_of(calls, adds_up=True))

    def _warn_of_new(self, name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "autobatch: %s logs %r, and the few samples that were compared do not show how it is put together: it is "
            "the mean over micro-batches, or what reduce_fx= says; log it in each batch, whatever its samples are",
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
                "autobatch: %s logs %r of a metric that it resets in training_step: the first micro-batch's value is "
                "of earlier batches, too, and the others' are not; reset it in on_train_batch_end, or log the metric",
                self.module,
                key[0],
            )


def find_rules(
    step: ModuleStep, batch: Any, objects: Sequence[Any], only: AbstractSet[Key] | None = None
) -> dict[Key, Rule]:
    """The rule of each name that a few samples show, whole and in parts.

    Args:
        step: The module's.
        batch: Of which a few samples are run, three times.
        objects: What a step changes outside the module; put back, as the module is.
        only: The names that are looked at; ``None``: all, and metrics.
    """
    layout = describe(batch)
    device = next(step.module.parameters()).device
    before = RewindPoint([*step.module.modules()], device, objects=objects)
    for sizes in _PARTS:
        found = _try(step, layout, sizes, before, device) if sum(sizes) <= layout.count else None
        if found is not None:
            whole, again, parts = found
            if only is None:
                _warn_of_metrics(step, whole[1], again[1], parts[1])
            return _compare(step, whole[0], again[0], parts[0], only)
    return {}


def _try(
    step: ModuleStep, layout: Layout, sizes: Sequence[int], before: RewindPoint, device: torch.device
) -> list[Run] | None:
    """Run the samples whole, whole again, and in parts; ``None`` where memory ends."""
    whole = (sum(sizes),)
    try:
        return [_run(step, layout, one, before, device) for one in (whole, whole, sizes)]
    except Exception as error:
        if not is_oom(error):
            raise
        return None
    finally:
        before.restore()


def agreed_rules(said: Iterable[Iterable[Sequence[Any]]]) -> dict[Key, Rule]:
    """The rules on which those ranks agree that could tell.

    Args:
        said: By rank, of each rule: the key's name and number, and the rule's fields.
    """
    found: dict[Key, list[Rule]] = {}
    for name, number, *rule in chain.from_iterable(said):
        found.setdefault((name, number), []).append(Rule(*rule))
    told = {key: {one for one in rules if not one.is_open} or {*rules} for key, rules in found.items()}
    return {key: rules.pop() for key, rules in told.items() if len(rules) == 1}


def _run(step: ModuleStep, layout: Layout, sizes: Sequence[int], before: RewindPoint, device: torch.device) -> Run:
    start = 0
    for size in sizes:
        with before.record(layout.tensors()):  # a metric may add to its tensors in place
            step.run(step.module, layout.take(start, start + size))
        start += size
    logged: list[Logged] = [(output.weight, output.logged) for output in step.outputs]
    metrics = {
        f"{name}.{state}": value for name, one in metrics_in(step.module).items() for state, value in _states(one)
    }
    before.restore()
    torch.rand(len(logged), device=device)  # so that what is random differs from one run to the next
    return logged, metrics


def _states(metric: Any) -> Sequence[tuple[str, torch.Tensor]]:
    return [*states_of(metric).items()]


def _compare(
    step: ModuleStep,
    whole: Sequence[Logged],
    again: Sequence[Logged],
    parts: Sequence[Logged],
    only: AbstractSet[Key] | None,
) -> dict[Key, Rule]:
    rules: dict[Key, Rule] = {}
    expected, repeated = group_calls(whole), group_calls(again)
    for key, calls in group_calls(parts).items():
        usual = default_rule(calls[-1][1]) if only is None or key in only else None
        if usual is None or key not in expected or key not in repeated:
            continue
        if len(calls) == 1:
            continue  # one part alone has logged it: that is no comparison
        value, call = expected[key][0][1].value, expected[key][0][1]
        if not _is_near(repeated[key][0][1].value, value):
            rules[key] = usual  # random: no samples will show more
            continue
        sizes = [one.options.get("batch_size") for _, one in calls]
        adds_up = None in sizes or call.options["batch_size"] == sum(map(int, filter(None, sizes)))
        found = [way for way in (usual.way, *WAYS) if _is_near(combine(way, *values_of(calls, adds_up=adds_up)), value)]
        if not found:
            _warn_of_value(step, call)
        is_open = _is_any_way_right(*values_of(calls, adds_up=adds_up))
        rules[key] = Rule(found[0] if found else usual.way, adds_up, is_open)
    return rules


def _is_any_way_right(values: Sequence[Any], weights: Sequence[float]) -> bool:
    """Whether their sum is their mean, as of zeros."""
    return _is_near(combine("sum", values, weights), combine("mean", values, weights))


def _is_near(one: Any, other: Any) -> bool:
    a, b = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return a.shape == b.shape and torch.allclose(a, b.to(a.device), rtol=_TOLERANCE, atol=1e-7, equal_nan=True)


def _warn_of_value(step: ModuleStep, call: LogCall) -> None:
    _log.warning(
        "autobatch: %s logs %r, which is no mean, sum, largest or smallest value of its samples: what is logged is the "
        "mean over micro-batches; log a metric of torchmetrics to have the whole batch's",
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
            "autobatch: %s.%s (%s) does not add up over micro-batches: give it samples, or their number as a weight",
            type(step.module).__name__,
            name,
            kind,
        )
