"""Refuses what would do the training loop's work for each micro-batch: calls in the step, and hooks on gradients.

In a watched call ``backward``, ``zero_grad`` and ``step`` of optimizer or scheduler are refused by name before a
parameter or a learning rate has moved. ``torch.autograd.grad`` and ``backward(inputs=...)`` reach no parameter, so they
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from autobatch._user_errors import contextmanager
from autobatch._wrappers import is_optimizer, own_table
from autobatch.errors import InvalidArgument
from autobatch.step.reachable import attributes_of, parts_of, walk
from autobatch.torch_internals.storages import is_uninitialized

_BACKWARD = (
    "the step calls backward: return the loss, autobatch runs the backward pass "
    "(in a Trainer: accelerator.backward(loss); for a gradient inside the step: torch.autograd.grad)"
)
_OPTIMIZER = "the step calls optimizer.step(): return the loss, the optimizer steps once after all micro-batches"
_ZERO_GRAD = "the step changed .grad: return the loss only, and leave backward() and zero_grad() to autobatch"
_SCHEDULER = (
    "the step calls scheduler.step(): return the loss; the scheduler steps after the optimizer "
    "(scheduler= of a Runner, or your Trainer's own)"
)


Owner = tuple[Any, str]  # an optimizer or a scheduler, with the message for a step that steps it


@contextmanager
def refuse_loop_calls(owners: Iterable[Owner], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Raise InvalidArgument if a call in this block does the loop's work, even if the step catches the refusal."""
    refused: list[str] = []
    try:
        with ExitStack() as stack:
            _refuse(owners, parameters, refused, stack)
            yield
    except Exception as error:
        refused = [message for message in refused if message is not _ZERO_GRAD]
        if refused and str(error) != refused[0]:
            raise InvalidArgument(refused[0]) from error
        raise
    if refused:  # a call says more than a changed gradient
        raise InvalidArgument(min(refused, key=lambda message: message is _ZERO_GRAD))


def _refuse(owners: Iterable[Owner], parameters: Iterable[torch.Tensor], refused: list[str], stack: ExitStack) -> None:
    """Refuse the loop's calls until the stack is closed, and note the message of each."""

    def refuse(message: str, *_: object) -> NoReturn:
        refused.append(message)
        raise InvalidArgument(message)

    for parameter in _trained(parameters):
        if not is_uninitialized(parameter):
            hook = parameter.register_post_accumulate_grad_hook(partial(refuse, _BACKWARD))
            stack.callback(hook.remove)
    for owner, message in owners:
        # A hook sees calls of a method that the step has looked up before. Wrappers of accelerate and Lightning derive
        # from Optimizer without its __init__, and call no hooks.
        if isinstance(owner, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in own_table(owner):
            stack.callback(owner.register_step_pre_hook(partial(refuse, message)).remove)
        else:
            _replace(owner, "step", partial(refuse, message), stack)
        if message is _OPTIMIZER and callable(getattr(type(owner), "zero_grad", None)):
            # Only noted: a backward pass that follows gives a better message.
            _replace(owner, "zero_grad", partial(refused.append, _ZERO_GRAD), stack)


def _trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter for parameter in parameters if parameter.is_leaf and parameter.requires_grad]


def _replace(owner: Any, name: str, refuse: Callable[[], object], stack: ExitStack) -> None:
    """Refuse calls of a method of one object until the stack is closed."""
    table, method, is_closed = own_table(owner), getattr(owner, name), list[bool]()
    earlier = {name: table[name]} if name in table else {}

    def call(*arguments: Any, **options: Any) -> Any:
        return method(*arguments, **options) if is_closed else refuse()

    def close() -> None:
        is_closed.append(True)
        if table.get(name) is call:  # else another thread's guard is in front, and may leave this one there
            del table[name]
            table.update(earlier)

    table[name] = call
    stack.callback(close)


def find_owners(step: Callable[..., Any], optimizer: Any | None, parameters: Iterable[torch.Tensor]) -> list[Owner]:
    """Find what the step may not step: this optimizer, others of these parameters in its reach, their schedulers."""
    known = {id(parameter) for parameter in _trained(parameters)}

    def lead_on(value: Any) -> Iterator[Any]:
        # An optimizer's groups and state hold thousands of tensors, which lead to nothing.
        return (part for part in parts_of(value, attributes_of) if not isinstance(part, torch.Tensor))

    reached = [*walk([optimizer, step], lead_on)]
    optimizers = [value for value in reached if value is optimizer or _steps_any(value, known)]
    stepped = {id(value) for value in optimizers}
    schedulers = [v for v in reached if _is_scheduler(v) and id(own_table(v).get("optimizer")) in stepped]
    return [*((value, _OPTIMIZER) for value in optimizers), *((value, _SCHEDULER) for value in schedulers)]


def _steps_any(optimizer: Any, known: set[int]) -> bool:
    if not (is_optimizer(optimizer) and callable(getattr(type(optimizer), "step", None))):
        return False
    try:
        return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])
    except Exception:  # noqa: BLE001 - of the user's code: a client that is not connected
        return False


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler) or all(
        callable(getattr(type(value), name, None)) for name in ("step", "get_last_lr")
    )


# ------------------------------------------------------------------------------------ hooks on gradients


def find_hooks(parameters: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the keys of hooks on the gradients of trained parameters; each hook of a process has another key."""
    hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]  # noqa: SLF001 - as below
    if not hooked:
        return frozenset()
    return frozenset(key for p in hooked if p.requires_grad for keys in _keys_of(p) for key in keys)


def _keys_of(parameter: torch.Tensor) -> list[set[int]]:
    """Return the keys of hooks before and after a gradient is added, without those of another thread's guard."""
    tables: list[Mapping[int, Any] | None] = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # noqa: SLF001 - no public equivalent
    return [{k for k, hook in (table or {}).items() if getattr(hook, "args", ()) != (_BACKWARD,)} for table in tables]


def refuse_hooks(name: str, parameter: torch.Tensor, known: frozenset[int]) -> None:
    """Raise InvalidArgument if the parameter has a hook whose key is not among ``known``, or its own optimizer.

    ``torch.distributed.optim._apply_optimizer_in_backward`` hooks the parameter's ``AccumulateGrad`` node, and stores
    its optimizers on the parameter.
    """
    early, late = _keys_of(parameter)
    if not known.issuperset(late) or getattr(parameter, "_in_backward_optimizers", None):
        raise InvalidArgument(
            f"{name} has a post-accumulate-grad hook: an update inside the backward pass happens at every "
            f"micro-batch and cannot be undone; remove the hook, and use an optimizer that is stepped after the "
            f"backward pass, such as torch.optim.AdamW, in place of a layerwise one"
        )
    if not known.issuperset(early):
        raise InvalidArgument(
            f"{name} has a gradient hook, which would run on the part of each micro-batch instead of on the "
            f"whole gradient; remove it, and do its work on .grad before the update: after runner.accumulate(batch), "
            f"or in on_pre_optimizer_step of a Trainer, on_before_optimizer_step of Lightning"
        )


def refuse_sample_gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InvalidArgument if gradients of single samples are gathered, as opacus and other DP-SGD do.

    Each micro-batch's loss is multiplied by its share, which scales those gradients before they are clipped.
    """
    for name, parameter in parameters:
        if "grad_sample" in getattr(parameter, "__dict__", ()):
            raise InvalidArgument(
                f"parameter {name} has grad_sample, the gradients of single samples, which no division into "
                f"micro-batches leaves as they are: with opacus use its "
                f"BatchMemoryManager(max_physical_batch_size=...) without autobatch, or plan on the model before it "
                f"is wrapped"
            )
