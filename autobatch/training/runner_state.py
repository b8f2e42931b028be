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
    """State from which a Runner continues, with what identifies its plan."""

    version: Literal[1]
    target_batch: Target
    samples: Target | Literal[0]  # in this rank's share
    micro_batch_size: Samples
    rank: Count
    world_size: Count
    smallest_micro_batch: Samples  # that the model can run, as far as it is known
    steps: Count
    size: Samples  # the most samples in a micro-batch of the next step
    batch_lists: dict[str, ListReading]  # content of each list of a batch, by path
    passes: Count = 0  # over a loader that ``run`` has finished
    pass_samples: Count = 0  # that committed steps of the present pass have used
    reason: Reason | None = None  # why the size last changed
    ceiling: Ceiling | None = None  # largest size that runs since the plan's size failed
    clean_steps: Count = 0  # at this size without trouble, as far as they are counted
    thrashed_steps: Count = 0  # in a row, up to now
    recomputes_more: Annotated[bool, Strict()] = False  # than its plan, since a step ran out of memory at one sample
    summing_wait: Count = 0  # steps in which sharded gradients are summed in each micro-batch after the last shortage
    summing_left: Count = 0  # of them still to come
    counted_per_sample: Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)] = 0.0  # of the last step's losses

    @classmethod
    def of(cls, plan: Plan, pace: Pace, **learnt: Any) -> RunnerState:
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
