"""Defines ``RunnerState``: what decides the sizes of a Runner's next steps, to be saved and loaded.

Parameters, optimizers, schedulers, scalers, generators and the user's objects have their own ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError

from autobatch._bounds import Count, Samples, Target
from autobatch._formatting import show_value
from autobatch.batch.registry import ListReading
from autobatch.errors import InvalidArgument
from autobatch.plan import Plan
from autobatch.planning.pacing import Ceiling, Pace, Reason
from autobatch.records import Record, spell_invalid


class RunnerState(Record):
    """State from which a Runner continues.

    Attributes:
        version: Version of this form.
        target_batch: The plan's, as the five that follow.
        samples: Number of samples in this rank's share.
        micro_batch_size: The largest.
        rank: Rank of the process.
        world_size: Number of ranks.
        smallest_micro_batch: Fewest samples that the model can run, as far as it is known.
        steps: Committed steps.
        passes: Number of passes over a loader that ``run`` has finished.
        pass_samples: Number of samples of the present pass that committed steps have used.
        size: The most samples in a micro-batch of the next step.
        batch_lists: Content of each list of a batch, by path.
        reason: Why it last changed.
        ceiling: Largest size that runs since the plan's size failed.
        clean_steps: Steps at this size without trouble, as far as they are counted.
        thrashed_steps: In a row, up to now.
        counted_per_sample: Divisor of the last step's losses, for each sample, if it stated its count.
    """

    version: Literal[1]
    target_batch: Target
    samples: Target | Literal[0]
    micro_batch_size: Samples
    rank: Count
    world_size: Count
    smallest_micro_batch: Samples
    steps: Count
    size: Samples
    batch_lists: dict[str, ListReading]
    passes: Count = 0
    pass_samples: Count = 0
    reason: Reason | None = None
    ceiling: Ceiling | None = None
    clean_steps: Count = 0
    thrashed_steps: Count = 0
    counted_per_sample: Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)] = 0.0

    @classmethod
    def of(cls, plan: Plan, pace: Pace, **learnt: Any) -> RunnerState:
        """The state of a Runner of this plan, between two steps."""
        return cls(
            version=1,
            target_batch=plan.target_batch,
            samples=sum(plan.micro_batch_sizes),
            micro_batch_size=plan.micro_batch_size,
            rank=plan.rank,
            world_size=plan.world_size,
            smallest_micro_batch=pace.smallest,
            size=pace.size,
            reason=pace.reason,
            ceiling=pace.ceiling,
            clean_steps=pace.clean_steps,
            thrashed_steps=pace.thrashed_steps,
            **learnt,
        )

    def resume(self, pace: Pace) -> Pace:
        """The pace that was saved, in the place of a new one of the same plan."""
        return replace(
            pace,
            size=self.size,
            reason=self.reason,
            ceiling=self.ceiling,
            clean_steps=self.clean_steps,
            thrashed_steps=self.thrashed_steps,
        )


def read_state(state: Any, plan: Plan) -> RunnerState:
    """The state of a Runner of this plan."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise InvalidArgument(f"state={show_value(state)}: pass what state_dict() of a Runner returned")
    if type(state["version"]) is not int or state["version"] != 1:
        raise InvalidArgument(f"the state is of version {show_value(state['version'])}, and this one reads version 1")
    try:
        found = RunnerState.model_validate({**state})
    except ValidationError as error:
        raise InvalidArgument(f"the state is none of a Runner ({spell_invalid(error)})") from None
    for name, value in _describe_plan(plan).items():
        if getattr(found, name) != value:
            raise InvalidArgument(
                f"the state is of a plan with {name}={getattr(found, name)}, and this Runner's has {name}={value}: "
                f"make it with the plan with which it was saved (plan.save(path), Plan.load(path))"
            )
    sizes = [found.size, found.smallest_micro_batch, found.ceiling.failed if found.ceiling else 1]
    most = max([plan.micro_batch_size, *(one.micro_batch_size for one in plan.lengths)])
    if max(sizes) > most:
        raise InvalidArgument(f"the state is none of a Runner (a size of {max(sizes)}, where micro_batch_size={most})")
    return found


def _describe_plan(plan: Plan) -> dict[str, int]:
    return {
        "target_batch": plan.target_batch,
        "samples": sum(plan.micro_batch_sizes),
        "micro_batch_size": plan.micro_batch_size,
        "rank": plan.rank,
        "world_size": plan.world_size,
    }
