"""Names what differs between the model that a plan was made for and the one that it is used with.

Covers sentences for people. Does not cover how a model is recognised (``step.model_identity``).
"""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.planning.plan_record import PlanRecord
from autobatch.records import ModelIdentity

__all__ = ["differences"]


def differences(plan: PlanRecord, model: str, identity: ModelIdentity) -> tuple[str, ...]:
    """What is not as it was when the plan was made; nothing where the plan does not say what it was made for.

    Args:
        plan: Made for another model, or for this one.
        model: The class of this one.
        identity: What this one is recognised by.
    """
    return () if plan.identity is None else tuple(_compare(plan, plan.identity, model, identity))


def _compare(plan: PlanRecord, then: ModelIdentity, model: str, now: ModelIdentity) -> Iterator[str]:
    if not (then.shapes and now.shapes):
        pass  # a lazy module has no shapes yet
    elif then.shapes != now.shapes:
        yield f"it was made for {_describe(plan.model, then)}, and this is {_describe(model, now)}"
    elif then.trained != now.trained:
        yield f"{then.trained} of {then.parameters} parameters were trained, and now {now.trained} are"
    # Without one its memory was not counted, which the plan says itself; a runner without one only accumulates.
    if then.optimizer and now.optimizer and then.optimizer != now.optimizer:
        yield f"the optimizer was {then.optimizer}, and now is {now.optimizer}"


def _describe(model: str, identity: ModelIdentity) -> str:
    return f"{model or 'a model'} with {identity.parameters} parameters in {identity.tensors} tensors"
