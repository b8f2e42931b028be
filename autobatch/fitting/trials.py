"""Runs the trials of one search, and reports each."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.batch.lengths import SamplesByLength
from autobatch.batch.samples import Layout
from autobatch.batch.tree import tensors_of
from autobatch.errors import DoesNotFit
from autobatch.events import TrialFinished, emit
from autobatch.fitting.make_plan import ExampleBatch, Request
from autobatch.fitting.probe import Probe
from autobatch.planning.division import least_size, useful_sizes
from autobatch.records import IN_EACH, Checkpointing, Summing, Trial
from autobatch.report.advice import explain_refusal
from autobatch.step.model_info import explain_smallest, refuses_one_sample
from autobatch.strategies.checkpointing import recompute


class Trials:
    """Runs the trials of one search."""

    def __init__(self, request: Request, batch: ExampleBatch, whole: Layout) -> None:
        self.done: list[Trial] = []  # of the longest samples if lengths differ
        self.shorter: list[Trial] = []
        self.earlier: list[Trial] = []  # with other blocks recomputed
        self.checkpointing: Checkpointing | None = None  # of the trials from now on
        self.recomputable: tuple[str, ...] = ()
        self.forecast: tuple[tuple[int, int], ...] = ()  # predicted bytes by size
        self.batch, self.samples = batch, whole  # a trial of any size repeats these samples
        if batch.by_length is not None:
            self.samples, self._whole = batch.by_length.at(batch.by_length.longest)[0], whole  # a step holds both
            request.memory.watch(tensors_of(whole.batch))
        allowance, wanted = request.allowance, request.wanted
        division, target = request.division, wanted.target_batch
        options = allowance.limit_bytes, request.state, wanted.accumulate_in_float32, target, division.target
        self.probe = Probe(request.workload, self.samples, request.memory, *options, shared=division.trials)
        self._request, self._checkpointed = request, 0

    def run(self, size: int) -> Trial:
        """Try a size; raise DoesNotFit instead of the error of a layer that needs more than one sample."""
        try:
            trial = self.probe.run(size)
        except ValueError as error:
            if size > 1 or self._request.wanted.target_batch == 1 or not refuses_one_sample(error):
                raise
            find_candidates(self._request, smallest=2)  # if nothing is left, max_micro_batch= is to blame
            raise DoesNotFit(self.explain(explain_smallest(self._request.workload.model))) from error
        longest = None if self.batch.by_length is None else self.batch.by_length.longest
        return self._note(trial, longest, self.done)

    def run_shorter(self, samples: SamplesByLength, length: int, size: int) -> Trial:
        self.probe.example, length = samples.at(length)
        return self._note(self.probe.run(size), length, self.shorter)

    def recompute(self, blocks: Sequence[str]) -> None:
        """Recompute these blocks in the trials from now on; earlier trials say nothing about them.

        The first ones are all that can be recomputed.
        """
        self.earlier += self.done
        self.done = []
        self.recomputable = self.recomputable or tuple(blocks)
        self.probe.workload = recompute(self._request.workload, blocks)
        self._checkpointed = len(blocks)

    def apply(self, found: Checkpointing | None) -> None:
        """Recompute the blocks of an earlier plan."""
        self.recompute(() if found is None else found.blocks)
        self.checkpointing, self.recomputable = found, () if found is None else found.blocks

    def try_summing(self, size: int, summing: Summing) -> Trial:
        self.probe.summing = summing
        try:
            return self.probe.run(size)
        finally:
            self.probe.summing = IN_EACH

    def explain(self, why_no_smaller: str = "") -> str:
        smallest = min(self.done, key=lambda trial: trial.micro_batch_size)
        reason = self.probe.errors.get(smallest.micro_batch_size, f"it ended as {smallest.outcome!r}")
        if why_no_smaller:
            reason = f"{reason}; {why_no_smaller}"
        allowance, device = self._request.allowance, self._request.memory.describe()
        limits = allowance.limit_bytes, allowance.budget_bytes
        return explain_refusal(smallest, reason, *limits, device, savings=self.probe.savings)

    def _note(self, trial: Trial, length: int | None, trials: list[Trial]) -> Trial:
        trial = trial.model_copy(update={"length": length, "checkpointed": self._checkpointed})
        trials.append(trial)
        limit_bytes = self._request.allowance.limit_bytes
        emit(TrialFinished(trial=trial, limit_bytes=limit_bytes, **self._request.whose), self._request.hooks)
        return trial


def find_candidates(request: Request, smallest: int) -> tuple[int, ...]:
    """Return the sizes that a search may try, in order; raise DoesNotFit if there are none."""
    target, bound = request.wanted.target_batch, request.wanted.max_micro_batch
    least = least_size(target, smallest)
    if bound < least:
        raise DoesNotFit(
            f"max_micro_batch={bound} leaves a micro-batch of one sample of target_batch={target}, and "
            f"{explain_smallest(request.workload.model)}: pass max_micro_batch={least} or more"
        )
    # With lengths each micro-batch has as many samples as ran at their length: any number may be useful.
    sizes = useful_sizes(target, bound) if request.lengths is None else range(1, bound + 1)
    return tuple(size for size in sizes if size >= least)
