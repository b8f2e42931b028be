"""Refuses a step that does the training loop's work: ``backward``, ``zero_grad``, ``step`` of optimizer or scheduler.

Covers calls from inside the user's step, in whatever form: each is refused by name when it is made, before a parameter
or a learning rate has moved. A backward pass is noticed when it reaches a parameter, so gradients that the step takes
for itself (``torch.autograd.grad``, ``backward(inputs=...)``) are not touched. Does not cover optimizers that neither
the workload nor anything in the step's reach holds; their updates come after a backward pass, which is refused.

Hooks are on the user's own parameters and optimizers, only while the step runs, and nothing of the process is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from autobatch.errors import InvalidStep
from autobatch.state.tensor_header import is_uninitialized
from autobatch.step.reachable import parts_of, walk

__all__ = ["LoopGuard"]

_MOST_REACHED = 2_000  # objects from the step to its optimizers; a dataset in a list may be among them
_WATCHED_LATER = 4
"""Parameters that are watched after the first call. Watching one takes 2 us, and a step that calls backward does so in
its first call; a later backward pass reaches these as well."""

_BACKWARD = (
    "step() calls backward; return the loss, the Runner does the rest (for a gradient inside the step use "
    "torch.autograd.grad)"
)
_OPTIMIZER = "step() calls optimizer.step(); return the loss, the Runner does the rest"
_ZERO_GRAD = "step() changed .grad: leave backward() and zero_grad() to the Runner, return the loss only"
_SCHEDULER = "step() calls scheduler.step(); return the loss, and pass scheduler= to the Runner"


class LoopGuard:
    """Watches the calls of one step. The first call watches all parameters, later ones a few of them."""

    def __init__(self) -> None:
        """Nothing is watched before the first call."""
        self._parameters: list[torch.Tensor] | None = None
        self._owners: list[tuple[Any, str]] = []

    @contextmanager
    def watch(
        self, step: Callable[..., Any], optimizer: Any | None, parameters: Callable[[], Sequence[torch.Tensor]]
    ) -> Iterator[None]:
        """While this lasts, refuse what only the Runner may do.

        Args:
            step: The user's, in whose reach optimizers and schedulers are looked for.
            optimizer: The workload's.
            parameters: Asked once.

        Raises:
            InvalidStep: The step did it. Also where it caught the error, or went on into another.
        """
        refused: list[str] = []
        zeroed: list[str] = []
        watched = self._begin(step, optimizer, parameters)
        with ExitStack() as stack:
            _watch_gradients(stack, watched, refused)
            for owner, message in self._owners:
                _watch_step(stack, owner, message, refused)
                if message is _OPTIMIZER:
                    _watch_zero_grad(stack, owner, zeroed)
            try:
                yield
            except Exception as error:
                if refused and not isinstance(error, InvalidStep):
                    raise InvalidStep(refused[0]) from error
                raise
        if refused or zeroed:
            raise InvalidStep([*refused, *zeroed][0])

    def _begin(
        self, step: Callable[..., Any], optimizer: Any | None, parameters: Callable[[], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        if self._parameters is not None:
            return self._parameters
        found = [parameter for parameter in parameters() if parameter.is_leaf and parameter.requires_grad]
        self._parameters = _spread(found)
        self._owners = _find_owners(step, optimizer, {id(parameter) for parameter in found})
        return found


def _spread(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A few of them, the first and the last among these."""
    last = len(parameters) - 1
    rows = {last * index // (_WATCHED_LATER - 1) for index in range(_WATCHED_LATER)}
    return [parameters[row] for row in sorted(rows)] if parameters else []


def _watch_gradients(stack: ExitStack, parameters: Sequence[torch.Tensor], refused: list[str]) -> None:
    def refuse(_: torch.Tensor) -> None:
        refused.append(_BACKWARD)
        raise InvalidStep(_BACKWARD)

    for parameter in parameters:
        if parameter.is_leaf and parameter.requires_grad and not is_uninitialized(parameter):
            before = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - no public twin
            if before is None:
                stack.callback(_drop_empty_hooks, parameter)
            stack.callback(parameter.register_post_accumulate_grad_hook(refuse).remove)


def _drop_empty_hooks(parameter: torch.Tensor) -> None:
    if not parameter._post_accumulate_grad_hooks:  # noqa: SLF001 - no public twin; those of the step's own stay
        setattr(parameter, "_post_accumulate_grad_hooks", None)  # noqa: B010 - typed as a dict, and None at first


def _watch_step(stack: ExitStack, owner: Any, message: str, refused: list[str]) -> None:
    """Refuse ``owner.step()`` by torch's own hook where it has one, else by an attribute in front of the method."""

    def refuse(*_args: Any, **_options: Any) -> None:
        refused.append(message)
        raise InvalidStep(message)

    # Wrappers that derive from Optimizer without its __init__ (accelerate's, Lightning's) never call the hooks.
    if isinstance(owner, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(owner):
        stack.callback(owner.register_step_pre_hook(refuse).remove)
        return
    _put_in_front(stack, owner, "step", refuse)


def _watch_zero_grad(stack: ExitStack, owner: Any, zeroed: list[str]) -> None:
    """Replace ``zero_grad()`` by a note: if a backward pass follows, its error explains the mistake better.

    Where no gradient stands, or another tensor than the optimizer's is run on (in a trace), nothing else would show it.
    """

    def note(*_args: Any, **_options: Any) -> None:
        zeroed.append(_ZERO_GRAD)

    if callable(getattr(type(owner), "zero_grad", None)):
        _put_in_front(stack, owner, "zero_grad", note)


def _put_in_front(stack: ExitStack, owner: Any, name: str, function: Callable[..., None]) -> None:
    attributes = vars(owner)
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = function


def _find_owners(step: Callable[..., Any], optimizer: Any | None, known: set[int]) -> list[tuple[Any, str]]:
    """Optimizers of these parameters and schedulers, each with what is said where the step steps it."""
    reached = [value for value in walk([optimizer, step], _lead_on, _MOST_REACHED) if hasattr(value, "__dict__")]
    optimizers = [v for v in reached if v is optimizer or (_is_optimizer(v) and _holds_any(v, known))]
    stepped = {id(value) for value in optimizers}
    schedulers = [v for v in reached if _is_scheduler(v) and id(vars(v).get("optimizer")) in stepped]
    return [*((value, _OPTIMIZER) for value in optimizers), *((value, _SCHEDULER) for value in schedulers)]


def _lead_on(value: Any) -> Iterator[Any]:
    # An optimizer's groups and state hold thousands of tensors, which lead to nothing.
    return (part for part in parts_of(value, _attributes) if not isinstance(part, torch.Tensor))


def _attributes(value: Any) -> Iterator[Any]:
    yield from vars(value).values()
    call = vars(type(value)).get("__call__")
    if isinstance(call, types.FunctionType):
        yield call  # a callable object: the globals of its method


def _is_optimizer(value: Any) -> bool:
    """By its type and attributes alone: asking an instance may run the user's code."""
    has_groups = "param_groups" in vars(value) or hasattr(type(value), "param_groups")
    return has_groups and callable(getattr(type(value), "step", None))


def _holds_any(optimizer: Any, known: set[int]) -> bool:
    return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler) or all(
        callable(getattr(type(value), name, None)) for name in ("step", "get_last_lr")
    )
