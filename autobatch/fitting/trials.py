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
from autobatch.records import IN_EACH, Checkpointing, ChunkedLoss, Summing, Trial, Way
from autobatch.report.advice import explain_refusal
from autobatch.step.model_info import explain_smallest, refuses_one_sample
from autobatch.strategies.checkpointing import recompute
from autobatch.strategies.choice import Ways
from autobatch.strategies.chunked_loss import chunked


class Trials:
    """Runs the trials of one search."""

    def __init__(self, request: Request, batch: ExampleBatch, whole: Layout) -> None:
        self.ways: Ways = {}  # of the blocks that are recomputed now
        self._by_ways: dict[tuple[tuple[str, Way], ...], list[Trial]] = {(): []}
        self._of_other_loss: list[Trial] = []
        self.chunked_loss: ChunkedLoss | None = None
        self.workload = request.workload  # with its loss in chunks, if so
        self.not_chunked = ""  # why the loss cannot be computed in chunks, if it was tried
        self.shorter: list[Trial] = []
        self.checkpointing: Checkpointing | None = None  # of the plan
        self.recomputable: tuple[str, ...] = ()  # blocks that are known to give the same gradient
        self.forecast: tuple[tuple[int, int], ...] = ()  # predicted bytes by size
        self.batch, self.samples = batch, whole  # a trial of any size repeats these samples
        if batch.by_length is not None:
            self.samples, self._whole = batch.by_length.at(batch.by_length.longest)[0], whole  # a step holds both
            request.memory.watch(tensors_of(whole.batch))
        allowance, wanted = request.allowance, request.wanted
        division, target = request.division, wanted.target_batch
        options = allowance.limit_bytes, request.state, wanted.accumulate_in_float32, target, division.target
        self.probe = Probe(request.workload, self.samples, request.memory, *options, shared=division.trials)
        self._request = request

    @property
    def done(self) -> list[Trial]:
        """Trials with the blocks recomputed that are recomputed now; of the longest samples if lengths differ."""
        return self._by_ways[tuple(self.ways.items())]

    @property
    def earlier(self) -> list[Trial]:
        """Trials with other blocks recomputed, in other ways, or with another loss."""
        now = tuple(self.ways.items())
        others = [trials for ways, trials in self._by_ways.items() if ways != now]
        return [*self._of_other_loss, *(trial for trials in others for trial in trials)]

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

    def chunk(self, found: ChunkedLoss | None) -> None:
        """Compute the loss in chunks in the trials from now on, or not; recompute no blocks."""
        if found != self.chunked_loss:
            self._of_other_loss += [trial for trials in self._by_ways.values() for trial in trials]
            self._by_ways, self.chunked_loss = {}, found
            self.workload = chunked(self._request.workload, found)
        self.recompute({})

    def recompute(self, ways: Ways) -> None:
        """Recompute blocks in these ways in the trials from now on; ``done`` has those that did before."""
        self.ways = dict(ways)
        self._by_ways.setdefault(tuple(ways.items()), [])
        self.probe.workload = recompute(self.workload, ways) if ways else self.workload

    def apply(
        self, found: Checkpointing | None, recomputable: Sequence[str], chunked_loss: ChunkedLoss | None = None
    ) -> None:
        """Use the strategies of an earlier plan, or none; the plan knows these blocks that can be recomputed."""
        self.chunk(chunked_loss)
        self.recompute({} if found is None else found.ways)
        self.checkpointing, self.recomputable = found, tuple(recomputable)

    def fastest(self, size: int) -> Trial:
        """Return the fastest trial of a size that fits."""
        fitting = [trial for trial in self.done if trial.micro_batch_size == size and trial.outcome == "fits"]
        return min(fitting, key=lambda trial: trial.pass_seconds)

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
        refused = explain_refusal(smallest, reason, *limits, device, savings=self.probe.savings)
        return f"{refused}; the loss cannot be computed in chunks: {self.not_chunked}" if self.not_chunked else refused

    def _note(self, trial: Trial, length: int | None, trials: list[Trial]) -> Trial:
        strategies = {
            "checkpointed": len(self.ways),
            "selective": [*self.ways.values()].count("selective"),
            "offloaded": [*self.ways.values()].count("offload"),
            "chunked": self.chunked_loss is not None,
        }
        trial = trial.model_copy(update={"length": length, **strategies})
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
