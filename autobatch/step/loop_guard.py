"""Refuses a step that does the training loop's work: ``backward``, ``zero_grad``, ``step`` of optimizer or scheduler.

Covers calls from inside the user's step, in whatever form: each is refused by name when it is made, before a parameter
or a learning rate has moved. A backward pass is noticed when it reaches a parameter, so gradients that the step takes
for itself (``torch.autograd.grad``, ``backward(inputs=...)``) are not touched: in the first call of a step when it is
made, at any parameter; in later ones when the step returns, at the first and the last trained parameter. One that then
reaches only others is refused where it changes a gradient (``undo.gradients``), and not where it leaves none. Does not
cover optimizers that neither the workload nor anything in the step's reach holds; in the first call their updates
come after a backward pass, which is refused.

Hooks are on the user's own parameters and optimizers, only while the step runs, and nothing of the process is changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from autobatch._wrappers import is_optimizer, own_table
from autobatch.errors import InvalidArgument
from autobatch.step.gradient_hooks import remove_hook, table_of
from autobatch.step.reachable import attributes_of, parts_of, walk
from autobatch.undo.tensor_header import is_uninitialized

__all__ = ["BACKWARD", "LoopGuard"]

_MISSING = object()
_REQUIRES_GRAD = attrgetter("requires_grad")

BACKWARD = (
    "step() calls backward; return the loss, the Runner does the rest (for a gradient inside the step use "
    "torch.autograd.grad)"
)
_OPTIMIZER = "step() calls optimizer.step(); return the loss, the Runner does the rest"
_ZERO_GRAD = "step() changed .grad: leave backward() and zero_grad() to the Runner, return the loss only"
_SCHEDULER = "step() calls scheduler.step(); return the loss, and pass scheduler= to the Runner"


_Hook = tuple[torch.Tensor, OrderedDict[Any, Any], Callable[[torch.Tensor], None]]
"""A parameter, its table of hooks, and the hook in it."""


class LoopGuard:
    """A context in which the optimizers and schedulers of one step refuse to be stepped.

    It is entered once for all micro-batches of a step, as that costs some microseconds.

    Attributes:
        is_active: Whether it was entered.
        refused: What the step was refused for since, also where it caught the error.
        zeroed: The same for ``zero_grad``, which does nothing meanwhile.
        refusals: What is put in front of which methods; ``None`` before the first ``find``.
        reached: The parameters that a backward pass has reached since somebody cleared this.
        parameters: The workload's; the first and the last that are trained are watched for it.
    """

    def __init__(self) -> None:
        """Nothing is known before the first ``find``."""
        self.refusals: list[_Refusal] | None = None
        self.is_active = False
        self.refused: list[str] = []
        self.zeroed: list[str] = []
        self.reached: list[torch.Tensor] = []
        self.parameters: Sequence[torch.Tensor] = ()
        self._watched: list[tuple[torch.Tensor, OrderedDict[Any, Any]]] = []

    def find(self, step: Callable[..., Any], optimizer: Any | None, parameters: Sequence[torch.Tensor]) -> None:
        """Find the optimizers and schedulers that the step may not step.

        Args:
            step: The user's, in whose reach optimizers and schedulers are looked for.
            optimizer: The workload's.
            parameters: Of the workload.
        """
        known = {id(parameter) for parameter in parameters if parameter.is_leaf and parameter.requires_grad}
        owners = _find_owners(step, optimizer, known)
        self.refusals = [_refuse_step(owner, message, self.refused) for owner, message in owners]
        optimizers = [owner for owner, message in owners if message is _OPTIMIZER]
        self.refusals += [_refuse_zero_grad(owner, self.zeroed) for owner in optimizers if _clears_gradients(owner)]

    def __enter__(self) -> None:
        """From here on refuse."""
        if self.is_active:
            self._leave()  # an interrupt came as the last block ended: a refusal must not stand in front of itself
        try:
            self.is_active = True
            self.refused.clear()
            self.zeroed.clear()
            for refusal in self.refusals or ():
                refusal.earlier = refusal.table.get(refusal.key, _MISSING)
                refusal.table[refusal.key] = refusal
            self._watch_parameters()
        except BaseException:
            self._leave()  # interrupted: nobody leaves what was not entered
            raise

    def __exit__(self, *error: object) -> None:
        """Let all be as it was, but for what another guard or the step itself has put there meanwhile."""
        try:
            self._leave()
        except BaseException:
            self._leave()  # interrupted
            raise

    def _leave(self) -> None:
        self.is_active = False
        for refusal in self.refusals or ():
            table, key, earlier = refusal.table, refusal.key, refusal.earlier
            front = table.get(key)
            if front is refusal:
                if earlier is _MISSING:
                    del table[key]
                    continue
                table[key] = earlier
            while isinstance(front, _Refusal):  # another thread's guard may stand in front of this one
                front.earlier = earlier if front.earlier is refusal else front.earlier
                front = front.earlier
        for parameter, hooks in self._watched:
            remove_hook(parameter, hooks, self)
        self._watched = []

    def _watch_parameters(self) -> None:
        """Note each backward pass that reaches the first or the last of the trained parameters.

        Not all of them: torch calls a hook in every backward pass, the Runner's too, and one that reaches only others
        shows in their gradients.
        """
        trained = partial(filter, _REQUIRES_GRAD)
        ends = next(trained(self.parameters), None), next(trained(reversed(self.parameters)), None)
        for parameter in ends:
            if parameter is None or not parameter.is_leaf:
                continue
            hooks = table_of(parameter)
            self._watched.append((parameter, hooks))  # first: an interrupt may come next
            hooks[self] = self.reached.append

    def refuse_backward(self, parameters: Sequence[torch.Tensor], hooks: list[_Hook]) -> None:
        """Refuse a backward pass that reaches one of these parameters, by hooks that are added to the list."""

        def refuse(_: torch.Tensor) -> None:
            self.refused.append(BACKWARD)
            raise InvalidArgument(BACKWARD)

        for parameter in parameters:
            if parameter.is_leaf and parameter.requires_grad and not is_uninitialized(parameter):
                hooks.append((parameter, table_of(parameter), refuse))  # first: an interrupt may come next
                hooks[-1][1][refuse] = refuse

    @staticmethod
    def allow_backward(hooks: Sequence[_Hook]) -> None:
        """Remove these hooks of ``refuse_backward``; a second time does nothing."""
        for parameter, table, refuse in hooks:
            remove_hook(parameter, table, refuse)


def _clears_gradients(owner: Any) -> bool:
    return callable(getattr(type(owner), "zero_grad", None))


class _Refusal:
    """Refuses a call while it stands under a key of a table, in front of what stood there earlier."""

    __slots__ = ("earlier", "key", "message", "raises", "refused", "table")

    def __init__(self, table: dict[Any, Any], key: Any, message: str, refused: list[str], *, raises: bool) -> None:
        self.table, self.key, self.message = table, self if key is None else key, message
        self.refused, self.raises = refused, raises
        self.earlier: Any = _MISSING

    def __call__(self, *_args: Any, **_options: Any) -> None:
        self.refused.append(self.message)
        if self.raises:
            raise InvalidArgument(self.message)


def _refuse_step(owner: Any, message: str, refused: list[str]) -> _Refusal:
    """Refuse ``owner.step()`` by torch's own hook where it has one, else by an attribute in front of the method."""
    attributes = own_table(owner)
    # Wrappers that derive from Optimizer without its __init__ (accelerate's, Lightning's) never call the hooks.
    if isinstance(owner, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in attributes:
        # Not by register_step_pre_hook(), which takes ten times as long, in every step.
        return _Refusal(attributes["_optimizer_step_pre_hooks"], None, message, refused, raises=True)
    return _Refusal(attributes, "step", message, refused, raises=True)


def _refuse_zero_grad(owner: Any, zeroed: list[str]) -> _Refusal:
    """Record the call and do nothing: a backward pass that follows gives a better message.

    Where no gradient stands, or another tensor than the optimizer's is run on (in a trace), nothing else would show it.
    """
    return _Refusal(own_table(owner), "zero_grad", _ZERO_GRAD, zeroed, raises=False)


def _find_owners(step: Callable[..., Any], optimizer: Any | None, known: set[int]) -> list[tuple[Any, str]]:
    """Optimizers of these parameters and schedulers, each with the message for a step that steps it."""
    reached = [*walk([optimizer, step], _lead_on)]
    optimizers = [v for v in reached if v is optimizer or (_can_step(v) and _holds_any(v, known))]
    stepped = {id(value) for value in optimizers}
    schedulers = [v for v in reached if _is_scheduler(v) and id(own_table(v).get("optimizer")) in stepped]
    return [*((value, _OPTIMIZER) for value in optimizers), *((value, _SCHEDULER) for value in schedulers)]


def _lead_on(value: Any) -> Iterator[Any]:
    # An optimizer's groups and state hold thousands of tensors, which lead to nothing.
    return (part for part in parts_of(value, attributes_of) if not isinstance(part, torch.Tensor))


def _can_step(value: Any) -> bool:
    return is_optimizer(value) and callable(getattr(type(value), "step", None))


def _holds_any(optimizer: Any, known: set[int]) -> bool:
    try:
        return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])
    except Exception:  # noqa: BLE001 - of the user's code: a client that is not connected
        return False


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler) or all(
        callable(getattr(type(value), name, None)) for name in ("step", "get_last_lr")
    )
